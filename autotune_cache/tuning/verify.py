"""Verification: runs every configuration on a GPU once and compares with the portable path.

A kernel that never ran on a GPU model may hang or give wrong results there.  Before the first
launch, all configurations that lookups return run on small problems in a subprocess, under a time
limit.  The verdict is recorded for the GPU model, kernels, compiler and dtype.
"""

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from cutefce.autotune_cache import lookup, table_io, verdicts
from cutefce.autotune_cache.table import DSL_PACKAGE, Candidate, Rejection, Table
from cutefce.autotune_cache.tuning import tuner, worker
from cutefce.autotune_cache.tuning.subprocess_worker import SubprocessWorker, WorkerError
from cutefce.autotune_cache.tuning.targets.base import TuningTarget
from cutefce.autotune_cache.verdicts import Verdict
from cutefce.cute_kernels import cache_files, process_cache
from cutefce.cute_kernels.gpu import Gpu
from cutefce.cute_kernels.spec import KernelSpec

LOCK_SECONDS = 1200
"""How long to wait for another process that verifies the same kernels."""
CHECK_SECONDS = 60
"""Time limit of checking one configuration."""

Targets = Sequence[TuningTarget]


@dataclass(frozen=True)
class Check:
    """One configuration to verify on the small problems of a dtype."""

    target: TuningTarget
    dtype: str
    candidate: Candidate

    def __str__(self) -> str:
        return f"{self.target.name}, {self.dtype}, {self.candidate}"

    def is_default(self) -> bool:
        """Whether the architecture may choose the configuration without a table."""
        return self.candidate is None or self.candidate in self.target.defaults()

    def identity(self) -> tuple[str, str, Candidate]:
        """Return kernel, dtype and configuration, as tables name them."""
        return self.target.name, self.dtype, self.candidate

    def kernels(self) -> Sequence[KernelSpec]:
        """Return the kernels to compile."""
        problem = self.target.reference_problem(self.dtype)
        return self.target.kernels(problem, self.candidate)


def verify_once(targets: Targets, dtype: str) -> Verdict:
    """Return the known verdict on `dtype`; verify without one, in one process at a time."""
    gpu = targets[0].gpu
    with contextlib.ExitStack() as stack:
        try:
            # one lock for all dtypes: two verifications would slow each other past the time limits
            path = verdicts.record_path(gpu, dtype).with_name("verify")
            stack.enter_context(cache_files.lock(path, LOCK_SECONDS))
        except OSError:
            pass  # without a lock, each process verifies
        lookup.reload(gpu)  # another process may have verified, and rejected, meanwhile
        return verdicts.known(gpu, dtype) or verify(targets, dtype)


def verify(targets: Targets, dtype: str) -> Verdict:
    """Verify every configuration for `dtype` that lookups return on this GPU; record the verdict.

    The kernels fail with the first default configuration that does.  If only tuned ones fail, or do
    not compile, they become rejections in the user's table, so that lookups skip them.  A failure
    of the check itself, such as a GPU without free memory or a compiler that fails for the
    defaults, is returned and not recorded.
    """
    gpu = targets[0].gpu
    checked = verdicts.unproven(gpu, dtype)
    checks = configurations(targets, dtype, lookup.tables(gpu))
    try:
        verdict = _verdict(gpu, sorted(checks, key=lambda check: not check.is_default()))
    except (OSError, RuntimeError) as error:
        return Verdict(False, f"not checked: {error}")
    verdicts.record(gpu, dtype, verdict, checked)
    return verdict


def _verdict(gpu: Gpu, checks: Sequence[Check]) -> Verdict:
    """Run checks, the defaults first; reject tuned configurations that fail.

    Raises:
        OSError, RuntimeError: if the check itself fails.
    """
    faults = _compile(checks, lambda _: None)
    for check in faults:
        if check.is_default():
            raise RuntimeError(faults[check])
    runnable = [check for check in checks if check not in faults]
    for check, fault in run_checks(runnable, lambda _: None):
        if fault is not None and check.is_default():
            return Verdict(False, f"{check}: {fault}")
        if fault is not None:
            faults[check] = fault
    _reject(gpu, faults)
    return Verdict(True)


def _compile(checks: Sequence[Check], advance: Callable[[str], None]) -> dict[Check, str]:
    """Compile the kernels of checks; return the checks whose kernels cannot be, with the reasons.

    Raises:
        RuntimeError: for lack of memory.
    """
    kernels = tuner.missing([kernel for check in checks for kernel in check.kernels()])
    done = itertools.count(1)
    unusable = tuner.build(
        kernels, lambda: advance(f"compiled {next(done)} of {len(kernels)} kernels")
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
        table: A table for the GPU of `targets`.
        targets: All tuning targets.
        advance: Called with what has been compiled, then with each configuration before its check.

    Raises:
        ValueError: if the table was made on another kind of GPU, or a default configuration fails.
        OSError, RuntimeError: if the check itself fails.
    """
    table.check_matches(targets[0].gpu)
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
                    process.ask(functools.partial(worker.load, kernel), tuner.BUILD_SECONDS)
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
