"""The tuner: times candidates in subprocesses and writes the winners to a table.

Each problem goes through these steps, under time limits:

1. compile the kernels of the candidates that the cost model left,
2. verify each candidate against the portable path,
3. time all against the architecture's default, briefly,
4. time the fastest ones, the default and cuBLAS for longer.

Candidates that hang, crash, give wrong results or run out of memory are rejected with the reason.
Every result is written immediately.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TypeVar

from cutefce.autotune_cache import table_io
from cutefce.autotune_cache.lookup import current_build
from cutefce.autotune_cache.table import (
    DSL_PACKAGE,
    MIN_GAIN,
    Candidate,
    Entry,
    Key,
    Rejection,
    Table,
)
from cutefce.autotune_cache.tuning import worker
from cutefce.autotune_cache.tuning.candidates import Job
from cutefce.autotune_cache.tuning.worker import CUBLAS, Entrant, Timing
from cutefce.cute_kernels.gpu import Gpu
from cutefce.cute_kernels.jit.subprocess_worker import SubprocessWorker, WorkerError
from cutefce.cute_kernels.spec import KernelSpec
from cutefce.version import __version__

T = TypeVar("T")
MAX_FINALISTS = 3
"""Candidates faster than the default that are timed for longer."""
SCREENING_SECONDS, FINAL_SECONDS = 0.3, 0.6
"""Durations of the two timings; both have at least `worker.MIN_ROUNDS` rounds."""
CALLS_PER_STEP = 3
"""Calls in a row of an entrant in the final timing: the GEMMs of a training step.  A candidate with
fewer cycles but higher power wins short timings and loses once the GPU lowers its clock."""
PREPARE_SECONDS, TRIAL_SECONDS = 120, 30
"""Time limits of making inputs and expected outputs, of a trial."""


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
        self.rejected: dict[tuple[Key, Candidate], Rejection] = {}
        self.failures: dict[Candidate, str] = {}

    def tune(self, job: Job, advance: Callable[[], None]) -> Outcome:
        """Tune one problem; call `advance` after each candidate."""
        self.rejected = dict(read_matching(self.path, self.header).rejected)
        self.failures = {}
        try:
            entry = self._tune(job, advance)
        except _NotPreparedError as error:
            return Outcome(job, None, {**self.failures, job.candidates[0]: str(error)})
        if entry is not None:
            table_io.update(self.path, dataclasses.replace(self.header, entries={job.key: entry}))
        return Outcome(job, entry, self.failures)

    def _tune(self, job: Job, advance: Callable[[], None]) -> Entry | None:
        default, *others = job.candidates
        if not self._verify(job, default, advance):
            return None
        right = [candidate for candidate in others if self._verify(job, candidate, advance)]
        first = self._benchmark(job, right, default, SCREENING_SECONDS, 1) if right else {}
        faster = [candidate for candidate in right if candidate in first]
        faster = [candidate for candidate in faster if first[candidate].ratio < 1]
        finalists = sorted(faster, key=lambda candidate: first[candidate].ratio)[:MAX_FINALISTS]
        last = self._benchmark(job, [CUBLAS, *finalists], default, FINAL_SECONDS, CALLS_PER_STEP)
        if CUBLAS not in last:
            return None
        best = min((x for x in (default, *finalists) if x in last), key=lambda x: last[x].ratio)
        if last[best].ms >= last[default].ms or last[best].ratio >= 1 - MIN_GAIN:
            best = default  # the screening was noise
        ms, default_ms, cublas_ms = (_rounded(last[x].ms) for x in (best, default, CUBLAS))
        versions = self.header.versions
        build = versions["kernels"], versions[DSL_PACKAGE]
        return Entry(best, ms, default_ms, cublas_ms, True, *build)

    def _verify(self, job: Job, candidate: Candidate, advance: Callable[[], None]) -> bool:
        """Whether a candidate gives right results; it is rejected if not."""
        call = functools.partial(worker.verify, job.target, job.problem, candidate)
        passed = self._ask(job, candidate, call)
        advance()
        return bool(passed)

    def _benchmark(
        self,
        job: Job,
        entrants: Sequence[Entrant],
        default: Candidate,
        seconds: float,
        calls: int,
    ) -> dict[Entrant, Timing]:
        """Time all entrants with the default, or pair by pair with it if one of them fails."""

        def benchmark(some: Sequence[Entrant]) -> Callable[[], Sequence[Timing]]:
            return functools.partial(
                worker.benchmark_interleaved, job.target, job.problem, some, seconds, calls
            )

        all_entrants = (*entrants, default)
        self._prepare(job)
        try:
            timings = self.process.ask(benchmark(all_entrants), TRIAL_SECONDS)
            return dict(zip(all_entrants, timings, strict=True))
        except WorkerError:
            found: dict[Entrant, Timing] = {}
            for entrant in entrants:
                pair, candidate = (entrant, default), entrant
                if candidate == CUBLAS:
                    candidate = default
                timed = self._ask(job, candidate, benchmark(pair))
                found |= zip(pair, timed, strict=True) if timed else ()
            return found

    def _ask(self, job: Job, candidate: Candidate, trial: Callable[[], T]) -> T | None:
        """Return what a trial of `candidate` returns in the subprocess, None if it is rejected."""
        if self._is_rejected(job, candidate):
            return None
        self._prepare(job)
        try:
            return self.process.ask(trial, TRIAL_SECONDS)
        except WorkerError as error:
            self._reject(job, candidate, Rejection(str(error), not error.is_out_of_memory))
            return None

    def _prepare(self, job: Job) -> None:
        """Make inputs and expected outputs, unless the subprocess holds them already."""
        call = functools.partial(worker.prepare_problem, job.target, job.problem)
        try:
            self.process.ask(call, PREPARE_SECONDS)
        except WorkerError as error:
            raise _NotPreparedError(f"no inputs or expected outputs: {error}") from error

    def _is_rejected(self, job: Job, candidate: Candidate) -> bool:
        for (key, config), rejection in self.rejected.items():
            same = (key.kernel, key.dtype, config) == (job.key.kernel, job.key.dtype, candidate)
            if same and (rejection.for_all_shapes or key == job.key):
                self.failures[candidate] = rejection.reason
                return True
        for kernel in job.target.kernels(job.problem, candidate):
            if kernel in self.unusable:
                reason = self.unusable[kernel]
                self._reject(job, candidate, Rejection(reason, for_all_shapes=True))
                return True
        return False

    def _reject(self, job: Job, candidate: Candidate, rejection: Rejection) -> None:
        self.failures[candidate] = rejection.reason
        self.rejected[job.key, candidate] = rejection
        found = {(job.key, candidate): rejection}
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
