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
from cutefce.autotune_cache.table import DSL_PACKAGE, Candidate, Rejection, Table
from cutefce.autotune_cache.tuning import tuner, worker
from cutefce.autotune_cache.tuning.targets.base import TuningTarget
from cutefce.autotune_cache.verdicts import Verdict
from cutefce.cute_kernels import cache_files, process_cache
from cutefce.cute_kernels.config import KernelConfigs
from cutefce.cute_kernels.gpu import Gpu
from cutefce.cute_kernels.jit import build
from cutefce.cute_kernels.jit.subprocess_worker import SubprocessWorker, WorkerError
from cutefce.cute_kernels.notices import announce
from cutefce.cute_kernels.parts import PARTS, has_gradients, part_configs, parts_of
from cutefce.cute_kernels.problem import Problem
from cutefce.cute_kernels.spec import KernelSpec

LOCK_SECONDS = 1200
"""How long to wait for another process that verifies the same kernels."""
CHECK_SECONDS = 60
"""Time limit of checking one configuration."""

Targets = Sequence[TuningTarget]


@dataclass(frozen=True)
class Check:
    """One configuration to verify on the small problems of a dtype, in the target's parts."""

    target: TuningTarget
    dtype: str
    candidate: Candidate

    def __str__(self) -> str:
        parts = "" if self.target.parts == PARTS else f" in {', '.join(self.target.parts)}"
        return f"{self.target.name}{parts}, {self.dtype}, {self.candidate}"

    def is_default(self) -> bool:
        """Whether the architecture may choose the configuration without a table."""
        return self.candidate is None or self.candidate in self.target.defaults()

    def identity(self) -> tuple[str, str, Candidate]:
        """Return kernel, dtype and configuration, as tables name them."""
        return self.target.name, self.dtype, self.candidate

    def kernels(self) -> Sequence[KernelSpec]:
        """Return the kernels to compile."""
        return self.target.kernels(self._problem, self.candidate)

    def uses(self) -> set[str]:
        """Return what it proves, as verdicts name it."""
        configs = self.target.configs(self._problem, self.candidate)
        return verdicts.uses(configs, self.target.parts)

    @property
    def _problem(self) -> Problem:
        return self.target.reference_problem(self.dtype)


def verify_once(targets: Targets, dtype: str) -> Verdict:
    """Return the known verdict on all that `verify` checks; verify without one."""
    gpu = targets[0].gpu
    with _alone(gpu, dtype):
        checks = configurations(targets, dtype, lookup.tables(gpu))
        return verdicts.known(gpu, dtype, _uses(checks)) or verify(targets, dtype)


def verify(targets: Targets, dtype: str) -> Verdict:
    """Verify every configuration for `dtype` that lookups return on this GPU; record the verdict.

    The kernels fail with the first default configuration that does.  If only tuned ones fail, or do
    not compile, they become rejections in the user's table, so that lookups skip them.  A failure
    of the check itself, such as a GPU without free memory or a compiler that fails for the
    defaults, is returned and not recorded.
    """
    gpu = targets[0].gpu
    checks = configurations(targets, dtype, lookup.tables(gpu))
    checks.sort(key=lambda check: not check.is_default())
    try:
        faults = _faults(checks)
        verdict = _verdict(faults)
        if verdict.passed:
            _reject(gpu, faults)
    except (OSError, RuntimeError) as error:
        return Verdict(False, f"not checked: {error}")
    verdicts.record(gpu, dtype, verdict, _uses(check for check in checks if check not in faults))
    return verdict


def verify_call(
    targets: Targets, dtype: str, configs: KernelConfigs, default: KernelConfigs, part: str
) -> Verdict | None:
    """Return the verdict on a part of calls with `configs`; verify that part without one.

    It is that of `verify`, and recorded likewise.

    Args:
        targets: All tuning targets.
        dtype: Dtype of hidden states and weight.
        configs: The configurations of the call.
        default: Those that it has if nothing was tuned.
        part: What it launches, of `cute_kernels.parts`.

    Returns:
        None if tuned configurations failed and were rejected: lookups return others now.
    """
    gpu, parts = targets[0].gpu, parts_of(part)
    targets = [dataclasses.replace(target, base=configs, parts=parts) for target in targets]
    checks = _of_call(targets, dtype, configs)
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
            verdict = _verdict_of_call(checks, _one_by_one(targets, dtype, configs, default))
        except (OSError, RuntimeError) as error:
            return Verdict(False, f"not checked: {error}")
        if verdict is not None:
            verdicts.record(gpu, dtype, verdict, needed)
        return verdict


def _of_call(targets: Targets, dtype: str, configs: KernelConfigs) -> list[Check]:
    """Return the checks of all of `configs` together.

    Small problems have windows of few columns, for which dX may have another configuration than for
    many: a second check has that of many for them.
    """
    checks = [Check(targets[0], dtype, configs.project_exp)]
    wide = configs.grad_hidden
    if wide not in (None, configs.grad_hidden_short) and has_gradients(targets[0].parts):
        checks += [Check(target, dtype, wide) for target in targets if target.name == "grad_hidden"]
    return checks


def _one_by_one(
    targets: Targets, dtype: str, configs: KernelConfigs, default: KernelConfigs
) -> list[Check]:
    """Return a check of the default, then each of `configs` that differs, beside default ones.

    There is none if nothing differs.
    """
    targets = [dataclasses.replace(target, base=default) for target in targets]
    kernels = {kernel for part in targets[0].parts for kernel, _ in part_configs(part, configs)}
    tuned = [
        Check(target, dtype, getattr(configs, target.name))
        for target in targets
        if target.name in kernels and getattr(configs, target.name) != getattr(default, target.name)
    ]
    return [Check(targets[0], dtype, default.project_exp), *tuned] if tuned else []


def _verdict_of_call(together: Sequence[Check], one_by_one: Sequence[Check]) -> Verdict | None:
    """Check all configurations of a call together; if that fails, the tuned ones one by one.

    Return None if some of these have been rejected.

    Raises:
        OSError, RuntimeError: if the check itself fails.
    """
    unusable = _compile(together, _ignore)
    faults = unusable or _failing(together)
    if not faults:
        return Verdict(True)
    of_tuned = _faults(one_by_one)
    verdict = _verdict(of_tuned)
    if not verdict.passed:
        return verdict
    if of_tuned:
        _reject(together[0].target.gpu, of_tuned)
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
    """Return the verdict on checks of which some failed."""
    for check, fault in faults.items():
        if check.is_default():
            return Verdict(False, f"{check}: {fault}")
    return Verdict(True)


def _faults(checks: Sequence[Check]) -> dict[Check, str]:
    """Compile and run checks until a default one fails; return those that failed, with reasons.

    Raises:
        OSError, RuntimeError: if the check itself fails.
    """
    faults = _compile(checks, _ignore)
    for check in faults:
        if check.is_default():
            raise RuntimeError(faults[check])
    return faults | _failing([check for check in checks if check not in faults])


def _failing(checks: Sequence[Check]) -> dict[Check, str]:
    """Run checks until a default one fails; return those that failed, with the reasons."""
    faults = {}
    for check, fault in run_checks(checks, _ignore):
        if fault is not None:
            faults[check] = fault
            if check.is_default():
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
    rejected = {
        (key, entry.config): Rejection(fault, for_all_shapes=True)
        for check, fault in faults.items()
        for table in lookup.tables(gpu)
        for key, entry in table.entries.items()
        if (key.kernel, key.dtype, entry.config) == check.identity()
    }
    if rejected:
        header = dataclasses.replace(tuner.header_for(gpu), rejected=rejected)
        table_io.update(lookup.user_folder() / table_io.file_name(gpu), header)
        process_cache.reset()
    for check, fault in faults.items():
        process_cache.warn_once(f"{check} is rejected: {fault}")


def verify_table(table: Table, targets: Targets, advance: Callable[[str], None]) -> Table:
    """Return `table`, made with any kernels, as verified with the installed kernels.

    Entries whose configuration passes get the current source fingerprint and compiler version and
    keep their times; the others become rejections.  Rejections of other kernels are dropped.

    Args:
        table: A table of the architecture of `targets`, of any GPU: times are not measured.
        targets: All tuning targets.
        advance: Called with what has been compiled, then with each configuration before its check.

    Raises:
        ValueError: if the table was made on another architecture, or a default configuration fails.
        OSError, RuntimeError: if the check itself fails.
    """
    table.check_arch(targets[0].gpu)
    dtypes = sorted({key.dtype for key in table.entries})
    checks = [check for dtype in dtypes for check in configurations(targets, dtype, (table,))]
    faults = _compile(checks, advance)
    runnable = [check for check in checks if check not in faults]
    ran = run_checks(runnable, advance)
    faults |= {check: fault for check, fault in ran if fault is not None}
    for check in faults:
        if check.is_default():
            raise ValueError(f"default configuration {check}: {faults[check]}")
    return _renewed(table, {check.identity(): fault for check, fault in faults.items()})


def _renewed(table: Table, faults: dict[tuple[str, str, Candidate], str]) -> Table:
    build = lookup.current_build()
    header = dataclasses.replace(
        table, versions={**table.versions, **build}, entries={}, rejected={}
    )
    entries, rejected = {}, {}
    for key, entry in table.entries.items():
        fault = faults.get((key.kernel, key.dtype, entry.config))
        if fault is None:
            entries[key] = dataclasses.replace(
                entry, verified=True, kernels=build["kernels"], dsl=build[DSL_PACKAGE]
            )
        else:
            rejected[key, entry.config] = Rejection(fault, for_all_shapes=True)
    return table.updated_with(dataclasses.replace(header, entries=entries, rejected=rejected))


def configurations(targets: Targets, dtype: str, tables: Sequence[Table]) -> list[Check]:
    """Return a check for every default and every entry of `tables` for `dtype`, each once."""
    found = []
    for target in targets:
        tuned = (
            entry.config
            for table in tables
            for key, entry in table.entries.items()
            if (key.kernel, key.dtype) == (target.name, dtype)
        )
        found += [Check(target, dtype, c) for c in dict.fromkeys((*target.defaults(), *tuned))]
    return found


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
            try:
                for kernel in check.kernels():
                    process.ask(functools.partial(worker.load, kernel), build.BUILD_SECONDS)
                prepare = functools.partial(worker.prepare, check.target, check.dtype)
                process.ask(prepare, tuner.PREPARE_SECONDS)
            except WorkerError as error:
                raise RuntimeError(str(error)) from error
            call = functools.partial(worker.check_small, check.target, check.dtype, check.candidate)
            try:
                process.ask(call, CHECK_SECONDS)
            except WorkerError as error:
                if error.is_out_of_memory:
                    raise RuntimeError(str(error)) from error
                yield check, str(error)
            else:
                yield check, None
