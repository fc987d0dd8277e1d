"""Verification: runs configurations on a GPU once and compares with the portable path.

A kernel that never ran on an architecture may hang or give wrong results there.  So before their
first launch, kernels run on small problems in a subprocess, under a time limit: those of the
configurations and of the part that a call launches, or all that lookups may return.  Verdicts are
recorded for the architecture, kernels, compiler and dtype.
"""

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from cutefce.autotune_cache import lookup, table_io, verdicts
from cutefce.autotune_cache.table import DSL_PACKAGE, TUNED, Candidate, Rejections, Table
from cutefce.autotune_cache.tuning import tuner, worker
from cutefce.autotune_cache.tuning.runner import Runner, with_tuned
from cutefce.autotune_cache.verdicts import Verdict
from cutefce.cute_kernels import cache_files, process_cache
from cutefce.cute_kernels.config import KernelConfigs
from cutefce.cute_kernels.gpu import Gpu
from cutefce.cute_kernels.jit import build
from cutefce.cute_kernels.jit.notices import announce
from cutefce.cute_kernels.jit.subprocess_worker import SubprocessWorker, WorkerError
from cutefce.cute_kernels.parts import PARTS, has_gradients, part_configs, parts_of
from cutefce.cute_kernels.spec import KernelSpec

LOCK_SECONDS = 1200
"""How long to wait for another process that verifies the same kernels."""
CHECK_SECONDS = 60
"""Time limit of checking one configuration."""


@dataclass(frozen=True)
class Check:
    """Configurations to verify together on the small problems of a dtype."""

    runner: Runner
    dtype: str
    configs: KernelConfigs
    kernel: str = ""
    """The kernel whose tuned configuration is tested beside defaults; empty if none is."""
    parts: tuple[str, ...] = PARTS
    """The parts of calls that are checked, of `cute_kernels.parts`."""

    def __str__(self) -> str:
        parts = "" if self.parts == PARTS else f" in {', '.join(self.parts)}"
        kernel = self.kernel or "defaults with project_exp"
        return f"{kernel}{parts}, {self.dtype}, {self.candidate}"

    @property
    def candidate(self) -> Candidate:
        """The configuration of the kernel under test."""
        candidate: Candidate = getattr(self.configs, self.kernel or "project_exp")
        return candidate

    def kernels(self) -> Sequence[KernelSpec]:
        """Return the kernels to compile."""
        return self.runner.kernels(self.dtype, self.configs, self.parts)

    def uses(self) -> set[str]:
        """Return what it proves, as verdicts name it."""
        return verdicts.uses(self.configs, self.parts)


def configurations(runner: Runner, dtype: str, tables: Sequence[Table]) -> list[Check]:
    """Return checks of all defaults, then of every other entry of `tables` for `dtype`."""
    every, base = runner.default_configs(), runner.base()
    prebuilt = {(kernel, getattr(configs, kernel)) for configs in every for kernel in TUNED}
    tuned = [
        (key.kernel, entry.config)
        for table in tables
        for key, entry in table.entries.items()
        if key.dtype == dtype and entry.config is not None
    ]
    return [Check(runner, dtype, configs) for configs in every] + [
        Check(runner, dtype, with_tuned(base, *each), each[0])
        for each in dict.fromkeys(tuned)
        if each not in prebuilt
    ]


def verify_once(runner: Runner, dtype: str) -> Verdict:
    """Return the known verdict on all that `verify` checks; verify without one."""
    with _alone(runner.gpu, dtype):
        checks = configurations(runner, dtype, lookup.tables(runner.gpu))
        return verdicts.known(runner.gpu, dtype, _uses(checks)) or verify(runner, dtype)


def verify(runner: Runner, dtype: str) -> Verdict:
    """Verify every configuration for `dtype` that lookups return on this GPU; record the verdict.

    The kernels fail with the first default configuration that does.  If only tuned ones fail, or do
    not compile, they become rejections in the user's table, so that lookups skip them.  A failure
    of the check itself, such as a GPU without free memory or a compiler that fails for the
    defaults, is returned and not recorded.
    """
    checks = configurations(runner, dtype, lookup.tables(runner.gpu))
    try:
        faults = _faults(checks)
        verdict = _verdict(faults)
        if verdict.passed:
            _reject(runner.gpu, faults)
    except (OSError, RuntimeError) as error:
        return Verdict(False, f"not checked: {error}")
    right = _uses(check for check in checks if check not in faults)
    verdicts.record(runner.gpu, dtype, verdict, right)
    return verdict


def verify_call(
    runner: Runner, dtype: str, configs: KernelConfigs, default: KernelConfigs, part: str
) -> Verdict | None:
    """Return the verdict on a part of calls with `configs`; verify that part without one.

    It is that of `verify`, and recorded likewise.

    Args:
        runner: The GPU.
        dtype: Dtype of hidden states and weight.
        configs: The configurations of the call.
        default: Those that it has if nothing was tuned.
        part: What it launches, of `cute_kernels.parts`.

    Returns:
        None if tuned configurations failed and were rejected: lookups return others now.
    """
    gpu, parts = runner.gpu, parts_of(part)
    checks = [Check(runner, dtype, configs, parts=parts)]
    if has_gradients(parts) and configs.grad_hidden not in (None, configs.grad_hidden_short):
        # small problems have few columns
        wide = with_tuned(configs, "grad_hidden", configs.grad_hidden)
        checks.append(Check(runner, dtype, wide, parts=parts))
    with _alone(gpu, dtype):
        needed = verdicts.uses(configs, parts)
        known = verdicts.known(gpu, dtype, needed)
        if known is not None:
            return known
        kernels = {kernel for check in checks for kernel in check.kernels()}
        announce(
            f"compares {len(kernels)} kernels with the portable path on this {gpu.name}, once; "
            "that may take a minute"
        )
        try:
            verdict = _verdict_of_call(checks, default)
        except (OSError, RuntimeError) as error:
            return Verdict(False, f"not checked: {error}")
        if verdict is not None:
            verdicts.record(gpu, dtype, verdict, needed)
        return verdict


def _verdict_of_call(checks: Sequence[Check], default: KernelConfigs) -> Verdict | None:
    """Run the checks of a call; if one fails, tell a wrong default from tuned configurations.

    Each of these is then tested beside defaults.  Return None if some have been rejected.

    Raises:
        OSError, RuntimeError: if the check itself fails.
    """
    together, *_ = checks
    unusable = _compile(checks, _ignore)
    faults = unusable or _failing(checks)
    if not faults:
        return Verdict(True)
    used = {kernel for part in together.parts for kernel, _ in part_configs(part, together.configs)}
    one_by_one = [
        dataclasses.replace(together, configs=with_tuned(default, *each), kernel=each[0])
        for each in ((kernel, getattr(together.configs, kernel)) for kernel in TUNED)
        if each[0] in used and each[1] != getattr(default, each[0])
    ]
    if one_by_one:
        of_tuned = _faults([dataclasses.replace(together, configs=default), *one_by_one])
        verdict = _verdict(of_tuned)
        if not verdict.passed:
            return verdict
        if of_tuned:
            _reject(together.runner.gpu, of_tuned)
            return None
    check, fault = next(iter(faults.items()))
    if unusable:
        raise RuntimeError(fault)
    return Verdict(False, f"{check}: {fault}")


@contextlib.contextmanager
def _alone(gpu: Gpu, dtype: str) -> Iterator[None]:
    """Verify in one process at a time, with what others have found."""
    with contextlib.ExitStack() as stack:
        try:
            # one lock for all dtypes: two verifications would slow each other past the time limits
            path = verdicts.record_path(gpu.arch, dtype).with_name("verify")
            stack.enter_context(cache_files.lock(path, LOCK_SECONDS))
        except OSError:
            pass  # without a lock, each process verifies
        lookup.reload(gpu)  # another process may have verified, and rejected, meanwhile
        yield


def _uses(checks: Iterable[Check]) -> set[str]:
    return {use for check in checks for use in check.uses()}


def _ignore(_: str) -> None:
    """Show no progress."""


def _verdict(faults: Mapping[Check, str]) -> Verdict:
    """Return the verdict on checks of which some failed: that on the defaults."""
    for check, fault in faults.items():
        if not check.kernel:
            return Verdict(False, f"{check}: {fault}")
    return Verdict(True)


def _faults(checks: Sequence[Check]) -> dict[Check, str]:
    """Compile and run checks until a default one fails; return those that failed, with reasons.

    Raises:
        OSError, RuntimeError: if the check itself fails.
    """
    faults = _compile(checks, _ignore)
    for check in faults:
        if not check.kernel:
            raise RuntimeError(faults[check])
    return faults | _failing([check for check in checks if check not in faults])


def _failing(checks: Sequence[Check], advance: Callable[[str], None] = _ignore) -> dict[Check, str]:
    """Run checks until a default one fails; return those that failed, with the reasons."""
    faults = {}
    for check, fault in run_checks(checks, advance):
        if fault is not None:
            faults[check] = fault
            if not check.kernel:
                break
    return faults


def _compile(checks: Sequence[Check], advance: Callable[[str], None]) -> dict[Check, str]:
    """Compile the kernels of checks; return the checks whose kernels cannot be, with the reasons.

    Raises:
        RuntimeError: for lack of memory.
    """
    kernels = build.missing([kernel for check in checks for kernel in check.kernels()])
    done = itertools.count(1)
    unusable = build.build(
        kernels,
        lambda: advance(f"compiled {next(done)} of {len(kernels)} kernels"),
        build.compile_clean,
    )
    for reason in unusable.values():
        if WorkerError(reason).is_out_of_memory:
            raise RuntimeError(reason)
    return {
        check: unusable[kernel]
        for check in checks
        for kernel in check.kernels()
        if kernel in unusable
    }


def _reject(gpu: Gpu, faults: Mapping[Check, str]) -> None:
    """Write rejections of tuned configurations into the user's table, with a warning for each."""
    rejected = _rejections(faults)
    if rejected:
        header = dataclasses.replace(tuner.header_for(gpu), rejected=rejected)
        table_io.update(lookup.user_folder() / table_io.file_name(gpu), header)
        process_cache.reset()
    for check, fault in faults.items():
        process_cache.warn_once(f"{check} is rejected: {fault}")


def verify_table(table: Table, runner: Runner, advance: Callable[[str], None]) -> Table:
    """Return `table`, made with any kernels, as verified with the installed kernels.

    Entries whose configuration passes get the current source fingerprint and compiler version and
    keep their times; the others become rejections.  Rejections of other kernels are dropped.

    Args:
        table: A table of the architecture of `runner`, of any GPU: times are not measured.
        runner: The GPU.
        advance: Called with what has been compiled, then with each configuration before its check.

    Raises:
        ValueError: if the table was made on another architecture, or a default configuration fails.
        OSError, RuntimeError: if the check itself fails.
    """
    table.check_arch(runner.gpu)
    dtypes = sorted({key.dtype for key in table.entries})
    checks = [check for dtype in dtypes for check in configurations(runner, dtype, (table,))]
    faults = _compile(checks, advance)
    faults |= _failing([check for check in checks if check not in faults], advance)
    verdict = _verdict(faults)
    if not verdict.passed:
        raise ValueError(verdict.reason)
    build = lookup.current_build()
    kernels, dsl = build["kernels"], build[DSL_PACKAGE]
    entries = {
        key: dataclasses.replace(entry, verified=True, kernels=kernels, dsl=dsl)
        for key, entry in table.entries.items()
    }
    versions, rejected = {**table.versions, **build}, _rejections(faults)
    renewed = dataclasses.replace(table, versions=versions, entries=entries, rejected=rejected)
    return renewed.without_rejected(rejected)


def _rejections(faults: Mapping[Check, str]) -> Rejections:
    """Return checks that failed as rejections of the configurations under test."""
    return {(each.kernel, each.dtype, each.candidate): fault for each, fault in faults.items()}


def run_checks(
    checks: Sequence[Check], advance: Callable[[str], None]
) -> Iterator[tuple[Check, str | None]]:
    """Run checks in a subprocess; yield each with its fault, None if it is right.

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
                process.ask(prepare, tuner.PREPARE_SECONDS)
            except WorkerError as error:
                raise RuntimeError(str(error)) from error
            try:
                process.ask(functools.partial(worker.check_small, *operands), CHECK_SECONDS)
            except WorkerError as error:
                if error.is_out_of_memory:
                    raise RuntimeError(str(error)) from error
                yield check, str(error)
            else:
                yield check, None
