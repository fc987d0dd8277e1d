"""Whether the kernels may be launched on a kind of GPU: only where they once were right.

A kernel that was never run on a GPU model may hang there or be wrong.  Before the first launch all
of them run once in a child process, under a time limit, against the portable path.  The verdict is
kept in the user's folder for the GPU model and these kernels.  A table that comes with the package
says that it was done before.
"""

import contextlib
import functools
import json
import os
from dataclasses import asdict
from typing import TYPE_CHECKING

import filelock

from cutefce.autotune_cache import lookup
from cutefce.autotune_cache.table import Choice
from cutefce.autotune_cache.tuning.subprocess_worker import Child, ChildError

if TYPE_CHECKING:
    from cutefce.autotune_cache.tuning.targets.base import Tunable
from cutefce.autotune_cache.verdicts import Verdict, _record, known

LOCK_SECONDS = 1200
"""How long to wait for another process that verifies the same kernels."""
PREPARE_SECONDS, CHECK_SECONDS = 120, 30
"""Time limits of reaching the GPU and finding what is expected, and of one configuration."""


def verify_once(tunables: "tuple[Tunable, ...]", device: str) -> Verdict:
    """Return the verdict; verify if no process has yet.  One of several processes does."""
    with contextlib.ExitStack() as stack:
        try:
            _record(device).parent.mkdir(parents=True, exist_ok=True)
            lock = filelock.FileLock(_record(device).with_suffix(".lock"), timeout=LOCK_SECONDS)
            stack.enter_context(lock)
        except OSError:
            pass  # each process for itself
        verdict = known(tunables[0].arch, device, tunables[0].num_sms)
        return verdict or verify(tunables, device)


def verify(tunables: "tuple[Tunable, ...]", device: str) -> Verdict:
    """Check every configuration that may be chosen on this kind of GPU; record the verdict.

    What hinders the check itself, such as a GPU without memory to spare or a compiler that fails,
    is not recorded.
    """
    try:
        fault = _fault(tunables, device)
    except (OSError, RuntimeError) as error:
        return Verdict(False, f"not checked: {error}")
    verdict = Verdict(fault is None, fault or "")
    with contextlib.suppress(OSError):
        path = _record(device)
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(f".{os.getpid()}.tmp")
        temporary.write_text(json.dumps(asdict(verdict)) + "\n")
        os.replace(temporary, path)
    return verdict


def _fault(tunables: "tuple[Tunable, ...]", device: str) -> str | None:
    """Return what is wrong with the kernels, None if nothing is.

    Raises:
        OSError, RuntimeError: if that cannot be found out.
    """
    from cutefce.autotune_cache.tuning import tuner, worker

    todo = [
        (tunable, dtype, choice, tunable.kernels(tunable.typical(dtype), choice))
        for tunable in tunables
        for choice in dict.fromkeys((*tunable.defaults(), *_tuned(tunable, device)))
        for dtype in tunable.arch.dtypes
    ]
    kernels = [kernel for *_, own in todo for kernel in own]
    for fault in tuner.build(tuner.missing(kernels), lambda: None).values():
        raise RuntimeError(fault)
    with Child() as child:
        for tunable, dtype, choice, own in todo:
            try:
                for kernel in own:
                    child.ask(functools.partial(worker.load, kernel), tuner.BUILD_SECONDS)
                child.ask(functools.partial(worker.prepare, tunable, dtype), PREPARE_SECONDS)
            except ChildError as error:
                raise RuntimeError(str(error)) from error
            try:
                child.ask(functools.partial(worker.check, tunable, dtype, choice), CHECK_SECONDS)
            except ChildError as error:
                if error.is_out_of_memory:
                    raise RuntimeError(str(error)) from error
                return f"{tunable.name}, {dtype}, {choice}: {error}"
    return None


def _tuned(tunable: "Tunable", device: str) -> list[Choice]:
    """Return what the tables let `tunable` choose on this GPU model."""
    held = lookup.tables(tunable.arch, device, tunable.num_sms)
    return [
        entry.config
        for table in held
        for key, entry in table.entries.items()
        if key.kernel == tunable.name
    ]
