"""Verification: runs configurations on a GPU once and compares with the portable path.

A kernel that never ran on an architecture may hang or give wrong results there.  So before their
first launch, kernels run on small problems in a subprocess, under a time limit: those of the part
that a call launches, or of all parts, in all configurations that the architecture lists.  Verdicts
are recorded for the architecture, kernels, compiler and dtype.
"""

import contextlib
import functools
from collections.abc import Callable

from cutefce.autotune_cache import verdicts
from cutefce.autotune_cache.tables import TUNED
from cutefce.autotune_cache.tuning.runner import Runner
from cutefce.autotune_cache.verdicts import PARTS, Verdict
from cutefce.cute_kernels import cache_files
from cutefce.cute_kernels.jit import build
from cutefce.cute_kernels.jit.notices import announce
from cutefce.cute_kernels.jit.subprocess_worker import SubprocessWorker, WorkerError

PREPARE_SECONDS, CHECK_SECONDS = 300, 60
"""Time limits of loading kernels and making expected outputs, and of checking a configuration."""


def verify_once(runner: Runner, dtype: str, parts: tuple[str, ...] = PARTS) -> Verdict:
    """Return the known verdict on parts of calls; verify them without one, in one process."""
    with contextlib.ExitStack() as stack:
        # without a lock, each process verifies
        with contextlib.suppress(OSError):
            # one lock for all dtypes: two verifications would slow each other past the time limits
            path = verdicts.record_path(runner.gpu.arch, dtype).with_name("verify")
            stack.enter_context(cache_files.lock(path))
        known = verdicts.known(runner.gpu, dtype, *parts)
        if known is not None:  # by another process, meanwhile
            return known
        count = len(runner.all_kernels(dtype, parts))
        announce(
            f"compares {count} kernels with the portable path on this {runner.gpu.name}, once; "
            "that may take a minute"
        )
        return verify(runner, dtype, parts)


def verify(
    runner: Runner,
    dtype: str,
    parts: tuple[str, ...] = PARTS,
    advance: Callable[[str], None] = lambda step: None,
) -> Verdict:
    """Verify parts of calls in every configuration that lookups may return; record the verdict.

    Code of options and of divergences is the same in all of them: it is checked in one.

    The kernels fail with the first one that does.  A failure of the check itself, such as a GPU
    without free memory or a compiler that fails, is returned and not recorded.

    Args:
        runner: The GPU.
        dtype: Dtype of hidden states and weight.
        parts: The parts of calls that are checked, of `verdicts`.
        advance: Called with each configuration before its check.
    """
    try:
        compile_all(runner, dtype, parts)
        fault = first_fault(runner, dtype, parts, advance)
    except (OSError, RuntimeError) as error:
        return Verdict(False, f"not checked: {error}")
    verdict = Verdict(not fault, fault)
    verdicts.record(runner.gpu, dtype, verdict, parts)
    return verdict


def compile_all(runner: Runner, dtype: str, parts: tuple[str, ...]) -> None:
    """Compile those kernels that are not compiled yet.

    Raises:
        RuntimeError: if one cannot be compiled.
    """
    missing = build.missing(runner.all_kernels(dtype, parts))
    for reason in build.build(missing, build.store_clean).values():
        raise RuntimeError(reason)


def first_fault(
    runner: Runner,
    dtype: str,
    parts: tuple[str, ...],
    advance: Callable[[str], None],
) -> str:
    """Check configurations in a subprocess until one fails; return its fault, "" if all are right.

    Raises:
        OSError, RuntimeError: if the check itself fails.
    """
    with SubprocessWorker() as process:
        for configs, own in runner.checks(parts):
            tuned = [f"{name} {getattr(configs, name) or 'cuBLAS'}" for name in TUNED]
            name = f"{dtype} in {', '.join(own)}, {'; '.join(tuned)}"
            advance(name)
            process.ask(functools.partial(runner.prepare, dtype, configs, own), PREPARE_SECONDS)
            try:
                process.ask(functools.partial(runner.check, dtype, configs, own), CHECK_SECONDS)
            except WorkerError as error:
                if error.is_of_the_call:
                    return f"{name}: {error}"
                raise
    return ""
