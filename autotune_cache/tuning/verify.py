"""Verification: runs configurations on a GPU once and compares with the portable path.

A kernel that never ran on an architecture may hang or give wrong results there.  So before their
first launch, kernels run on small problems in a subprocess, under a time limit: those of the part
that a call launches, or of all parts, in all configurations that the architecture lists.  Verdicts
are recorded for the architecture, kernels, compiler and dtype.
"""

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from cutefce.autotune_cache import verdicts
from cutefce.autotune_cache.table import TUNED
from cutefce.autotune_cache.tuning import worker
from cutefce.autotune_cache.tuning.runner import Runner
from cutefce.autotune_cache.verdicts import Verdict
from cutefce.cute_kernels import cache_files
from cutefce.cute_kernels.config import KernelConfigs
from cutefce.cute_kernels.gpu import Gpu
from cutefce.cute_kernels.jit import build
from cutefce.cute_kernels.jit.notices import announce
from cutefce.cute_kernels.jit.subprocess_worker import SubprocessWorker, WorkerError
from cutefce.cute_kernels.parts import DIVERGENCES, PARTS, parts_of
from cutefce.cute_kernels.spec.kernel import KernelSpec

LOCK_SECONDS = 1200
"""How long to wait for another process that verifies the same kernels."""
PREPARE_SECONDS, CHECK_SECONDS = 120, 60
"""Time limits of making inputs and expected outputs, and of checking one configuration."""


@dataclass(frozen=True)
class Check:
    """Configurations to verify together on the small problems of a dtype."""

    runner: Runner
    dtype: str
    configs: KernelConfigs
    parts: tuple[str, ...] = PARTS
    """The parts of calls that are checked, of `cute_kernels.parts`."""

    def __str__(self) -> str:
        parts = "" if self.parts == PARTS else f" in {', '.join(self.parts)}"
        configs = [f"{name} {getattr(self.configs, name) or 'cuBLAS'}" for name in TUNED]
        return f"{self.dtype}{parts}, {'; '.join(configs)}"

    def kernels(self) -> Sequence[KernelSpec]:
        """Return the kernels to compile."""
        return self.runner.kernels(self.dtype, self.configs, self.parts)


def listed(runner: Runner, dtype: str, parts: tuple[str, ...] = PARTS) -> list[Check]:
    """Return checks of all configurations that the architecture lists."""
    every = runner.listed_configs()
    if parts == (DIVERGENCES,):  # which depend on none of these
        every = every[:1]
    return [Check(runner, dtype, configs, parts) for configs in every]


def _ignore(_: str) -> None:
    """Show no progress."""


def verify_once(runner: Runner, dtype: str) -> Verdict:
    """Return the known verdict on all that `verify` checks; verify without one."""
    with _alone(runner.gpu, dtype):
        return verdicts.known(runner.gpu, dtype, *PARTS) or verify(runner, dtype)


def verify(runner: Runner, dtype: str, advance: Callable[[str], None] = _ignore) -> Verdict:
    """Verify every configuration that lookups may return for `dtype`; record the verdict.

    The kernels fail with the first one that does.  A failure of the check itself, such as a GPU
    without free memory or a compiler that fails, is returned and not recorded.

    Args:
        runner: The GPU.
        dtype: Dtype of hidden states and weight.
        advance: Called with what has been compiled, then with each configuration before its check.
    """
    return _verdict(listed(runner, dtype), advance)


def verify_call(gpu: Gpu, device: str, dtype: str, part: str) -> Verdict:
    """Return the verdict on a part of calls; verify that part without one.

    It is that of `verify`, and recorded likewise.

    Args:
        gpu: The GPU model.
        device: The GPU that runs the check, as torch names it.
        dtype: Dtype of hidden states and weight.
        part: What it launches, of `cute_kernels.parts`.
    """
    parts = parts_of(part)
    with _alone(gpu, dtype):
        known = verdicts.known(gpu, dtype, *parts)
        if known is not None:  # by another process, meanwhile
            return known
        checks = listed(Runner(gpu, device), dtype, parts)
        kernels = {kernel for check in checks for kernel in check.kernels()}
        announce(
            f"compares {len(kernels)} kernels with the portable path on this {gpu.name}, once; "
            "that may take a minute"
        )
        return _verdict(checks)


@contextlib.contextmanager
def _alone(gpu: Gpu, dtype: str) -> Iterator[None]:
    """Verify in one process at a time."""
    with contextlib.ExitStack() as stack:
        # without a lock, each process verifies
        with contextlib.suppress(OSError):
            # one lock for all dtypes: two verifications would slow each other past the time limits
            path = verdicts.record_path(gpu.arch, dtype).with_name("verify")
            stack.enter_context(cache_files.lock(path, LOCK_SECONDS))
        yield


def _verdict(checks: Sequence[Check], advance: Callable[[str], None] = _ignore) -> Verdict:
    """Compile and run checks of one GPU, dtype and parts until one fails; record the verdict.

    A failure of the check itself is returned, and not recorded.
    """
    gpu, dtype = checks[0].runner.gpu, checks[0].dtype
    try:
        compile_all((kernel for check in checks for kernel in check.kernels()), advance)
        fault = first_fault(checks, advance)
    except (OSError, RuntimeError) as error:
        return Verdict(False, f"not checked: {error}")
    verdict = Verdict(not fault, fault)
    verdicts.record(gpu, dtype, verdict, checks[0].parts)
    return verdict


def compile_all(kernels: Iterable[KernelSpec], advance: Callable[[str], None]) -> None:
    """Compile the kernels that are not compiled yet.

    Raises:
        RuntimeError: if one cannot be compiled.
    """
    missing, done = build.missing(kernels), itertools.count(1)
    failed = build.build(
        missing, lambda: advance(f"compiled {next(done)} of {len(missing)} kernels")
    )
    for reason in failed.values():
        raise RuntimeError(reason)


def first_fault(checks: Sequence[Check], advance: Callable[[str], None]) -> str:
    """Run checks in a subprocess until one fails; return its fault, "" if all are right.

    Raises:
        OSError, RuntimeError: if the check itself fails.
    """
    with SubprocessWorker() as process:
        for check in checks:
            advance(str(check))
            prepare = functools.partial(worker.prepare, check.runner, check.dtype, check.parts)
            operands = check.runner, check.dtype, check.configs, check.parts
            try:
                for kernel in check.kernels():
                    process.ask(functools.partial(worker.load, kernel), build.BUILD_SECONDS)
                process.ask(prepare, PREPARE_SECONDS)
            except WorkerError as error:
                raise RuntimeError(str(error)) from error
            try:
                process.ask(functools.partial(worker.check_small, *operands), CHECK_SECONDS)
            except WorkerError as error:
                if error.is_out_of_memory:
                    raise RuntimeError(str(error)) from error
                return f"{check}: {error}"
    return ""
