"""The tuner: times candidates in a subprocess and writes the winners to a table.

Each candidate goes through one trial, under a time limit: it is compared with the portable path on
small problems, then timed against the architecture's default.  The fastest one is timed again, with
the default and cuBLAS, since the fastest of several timings is lucky.  Candidates that hang, crash,
give wrong results or run out of memory are rejected with the reason.  Every result is written
immediately.
"""

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from cutefce.autotune_cache import table_io
from cutefce.autotune_cache.lookup import current_build
from cutefce.autotune_cache.table import (
    DSL_PACKAGE,
    MIN_GAIN,
    Candidate,
    Entry,
    Key,
    Rejections,
    Table,
    key_of,
)
from cutefce.autotune_cache.tuning import worker
from cutefce.autotune_cache.tuning.targets import TuningTarget
from cutefce.autotune_cache.tuning.worker import CUBLAS, Entrant, Timing
from cutefce.cute_kernels.gpu import Gpu
from cutefce.cute_kernels.jit.subprocess_worker import SubprocessWorker, WorkerError
from cutefce.cute_kernels.parts import PARTS
from cutefce.cute_kernels.problem import Problem
from cutefce.cute_kernels.spec import KernelSpec
from cutefce.version import __version__

PREPARE_SECONDS, TRIAL_SECONDS = 120, 60
"""Time limits of making inputs and expected outputs, of a trial."""


@dataclass(frozen=True)
class Job:
    """One problem with its candidates."""

    target: TuningTarget
    problem: Problem
    candidates: tuple[Candidate, ...]
    """The default first."""

    @property
    def key(self) -> Key:
        """The key of the problem in a table."""
        return key_of(self.target.name, self.problem)

    def kernels(self, candidate: Candidate) -> list[KernelSpec]:
        """Return the kernels that a trial of a candidate launches."""
        configs = self.target.configs(candidate)
        return self.target.runner.kernels(self.problem.dtype, configs, PARTS)

    def all_kernels(self) -> list[KernelSpec]:
        """Return the kernels to compile."""
        return [kernel for candidate in self.candidates for kernel in self.kernels(candidate)]


def make_job(target: TuningTarget, problem: Problem, exhaustive: bool = False) -> Job:
    """Return the job with the architecture's configurations or, if `exhaustive`, all legal ones."""
    others = (*target.prebuilt(), *(target.legal() if exhaustive else ()))
    return Job(target, problem, tuple(dict.fromkeys((target.default(problem), *others))))


@dataclass(frozen=True)
class Outcome:
    """The result of tuning one problem."""

    job: Job
    entry: Entry | None
    failures: dict[Candidate, str]
    """Rejected candidates with the reasons."""


class Tuner:
    """Tunes problems one after another and adds the results to a file."""

    def __init__(
        self,
        path: Path,
        header: Table,
        process: SubprocessWorker,
        unusable: dict[KernelSpec, str],
    ) -> None:
        """Write to `path`; `header` names the GPU, `unusable` the kernels that did not compile."""
        self.path, self.header, self.process, self.unusable = path, header, process, unusable
        self.rejected: Rejections = {}
        self.failures: dict[Candidate, str] = {}

    def tune(self, job: Job, advance: Callable[[], None]) -> Outcome:
        """Tune one problem; call `advance` after each candidate."""
        self.rejected = read_matching(self.path, self.header).rejected
        self.failures = {}
        try:
            entry = self._tune(job, advance)
        except _NotPreparedError as error:
            return Outcome(job, None, {**self.failures, job.candidates[0]: str(error)})
        if entry is not None:
            table_io.update(self.path, dataclasses.replace(self.header, entries={job.key: entry}))
        return Outcome(job, entry, self.failures)

    def _tune(self, job: Job, advance: Callable[[], None]) -> Entry | None:
        default, ratios = job.candidates[0], dict[Candidate, float]()
        for candidate in job.candidates:
            timings = self._trial(job, candidate, tuple(dict.fromkeys((candidate, default))))
            advance()
            if timings is not None:
                ratios[candidate] = timings[candidate].ratio
            elif candidate == default:
                return None
        for best in sorted(ratios, key=lambda candidate: ratios[candidate]):
            last = self._trial(job, best, tuple(dict.fromkeys((best, CUBLAS, default))))
            if last is not None:
                is_faster = last[best].ms < last[default].ms and last[best].ratio < 1 - MIN_GAIN
                winner = best if is_faster else default
                ms, default_ms, cublas_ms = (
                    _rounded(last[each].ms) for each in (winner, default, CUBLAS)
                )
                build = self.header.versions["kernels"], self.header.versions[DSL_PACKAGE]
                return Entry(winner, ms, default_ms, cublas_ms, True, *build)
        return None

    def _trial(
        self, job: Job, candidate: Candidate, entrants: tuple[Entrant, ...]
    ) -> dict[Entrant, Timing] | None:
        """Return the times of entrants; None if `candidate` is rejected, for which they failed."""
        if self._is_rejected(job, candidate):
            return None
        prepare = functools.partial(worker.prepare_problem, job.target, job.problem)
        trial = functools.partial(worker.trial, job.target, job.problem, entrants)
        try:
            self.process.ask(prepare, PREPARE_SECONDS)
        except WorkerError as error:
            raise _NotPreparedError(f"no inputs or expected outputs: {error}") from error
        try:
            return self.process.ask(trial, TRIAL_SECONDS)
        except WorkerError as error:
            if error.is_out_of_memory:  # another problem may need less
                self.failures[candidate] = str(error)
            else:
                self._reject(job, candidate, str(error))
            return None

    def _is_rejected(self, job: Job, candidate: Candidate) -> bool:
        reason = self.rejected.get(job.key.rejects(candidate))
        if reason is not None:
            self.failures[candidate] = reason
            return True
        for kernel in job.kernels(candidate):
            if kernel in self.unusable:
                self._reject(job, candidate, self.unusable[kernel])
                return True
        return False

    def _reject(self, job: Job, candidate: Candidate, reason: str) -> None:
        self.failures[candidate] = reason
        found = {job.key.rejects(candidate): reason}
        self.rejected = {**self.rejected, **found}
        table_io.update(self.path, dataclasses.replace(self.header, rejected=found))


class _NotPreparedError(Exception):
    """Inputs and expected outputs cannot be made, for reasons other than a candidate."""


def _rounded(ms: float) -> float:
    """Return `ms` with four significant digits."""
    return float(f"{ms:.4g}")


def read_matching(path: Path, header: Table) -> Table:
    """Return the file's table if GPU, kernels and compiler are those of `header`, else `header`."""
    try:
        held = table_io.read(path)
        held.check_matches(header.gpu)
    except (OSError, ValueError):
        return header
    return held if held.has_build_of(header) else header


def is_done(job: Job, path: Path, header: Table) -> bool:
    """Whether the file has a verified entry for `job` of the kernels and compiler of `header`."""
    entry = read_matching(path, header).entries.get(job.key)
    build = header.versions["kernels"], header.versions[DSL_PACKAGE]
    return entry is not None and entry.verified and (entry.kernels, entry.dsl) == build


def header_for(gpu: Gpu) -> Table:
    """Return a table without entries for `gpu`, with the versions of this installation."""
    return Table(gpu, {"torch": version("torch"), "cutefce": __version__, **current_build()})
