"""The tuner: times candidates in a subprocess and writes the winners to a table.

Each candidate goes through one trial, under a time limit: it is compared with the portable path on
small problems, then timed against the architecture's default.  The fastest one is timed again, with
the default, since the fastest of several timings is lucky.  Candidates that hang, crash,
or give wrong results are left out of the run, and those that run out of memory of the problem.
Every winner is written immediately.
"""

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from cutefce.autotune_cache import table_io
from cutefce.autotune_cache.lookup import current_build
from cutefce.autotune_cache.table import MIN_GAIN, Candidate, Entry, Key, Table, key_of
from cutefce.autotune_cache.tuning import worker
from cutefce.autotune_cache.tuning.targets import TuningTarget
from cutefce.autotune_cache.tuning.worker import Timing
from cutefce.cute_kernels.gpu import Gpu
from cutefce.cute_kernels.jit.subprocess_worker import SubprocessWorker, WorkerError
from cutefce.cute_kernels.parts import PARTS
from cutefce.cute_kernels.problem import Problem
from cutefce.cute_kernels.spec.kernel import KernelSpec
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

    def kernels(self) -> list[KernelSpec]:
        """Return the kernels that trials launch."""
        every = map(self.target.configs, self.candidates)
        own, dtype = self.target.runner, self.problem.dtype
        return [kernel for configs in every for kernel in own.kernels(dtype, configs, PARTS)]


def make_job(target: TuningTarget, problem: Problem) -> Job:
    """Return the job with the default and the architecture's other configurations."""
    every = target.default(problem), *target.candidates()
    return Job(target, problem, tuple(dict.fromkeys(every)))


class Tuner:
    """Tunes problems one after another and adds the results to a file."""

    def __init__(self, path: Path, header: Table, process: SubprocessWorker) -> None:
        """Write to `path`; `header` names the GPU and the kernels."""
        self.path, self.header, self.process = path, header, process
        self.failures: dict[tuple[Job, Candidate], str] = {}
        """Problems and candidates that failed, with the reasons."""
        self._left_out: set[tuple[str, Candidate]] = set()

    def tune(self, job: Job, advance: Callable[[], None]) -> Entry | None:
        """Return the winner of one problem, None if the default fails.

        Calls `advance` after each candidate.
        """
        entry = self._winner(job, advance)
        if entry is not None:
            table_io.update(self.path, dataclasses.replace(self.header, entries={job.key: entry}))
        return entry

    def _winner(self, job: Job, advance: Callable[[], None]) -> Entry | None:
        default, ratios = job.candidates[0], dict[Candidate, float]()
        for candidate in job.candidates:
            timings = self._trial(job, candidate, tuple(dict.fromkeys((candidate, default))))
            advance()
            if timings is not None:
                ratios[candidate] = timings[candidate].ratio
            elif candidate == default:
                return None
        for best in sorted(ratios, key=lambda candidate: ratios[candidate]):
            last = self._trial(job, best, tuple(dict.fromkeys((best, default))))
            if last is not None:
                is_faster = last[best].ms < last[default].ms and last[best].ratio < 1 - MIN_GAIN
                winner = best if is_faster else default
                return Entry(winner, *(_rounded(last[x].ms) for x in (winner, default)))
        return None

    def _trial(
        self, job: Job, candidate: Candidate, timed: tuple[Candidate, ...]
    ) -> dict[Candidate, Timing] | None:
        """Return the times of some candidates; None if `candidate` fails, and is left out."""
        name = job.target.name, candidate
        if name in self._left_out:
            return None
        prepare = functools.partial(worker.prepare_problem, job.target, job.problem)
        trial = functools.partial(worker.trial, job.target, job.problem, timed)
        try:
            self.process.ask(prepare, PREPARE_SECONDS)
        except WorkerError as error:  # which is no fault of the candidate
            self.failures[job, candidate] = f"no inputs or expected outputs: {error}"
            return None
        try:
            return self.process.ask(trial, TRIAL_SECONDS)
        except WorkerError as error:
            self.failures[job, candidate] = str(error)
            if not error.is_out_of_memory:  # another problem may need less
                self._left_out.add(name)
            return None


def _rounded(ms: float) -> float:
    """Return `ms` with four significant digits."""
    return float(f"{ms:.4g}")


def read_done(path: Path, header: Table) -> Table:
    """Return the file's table if `header` can be added to it, else `header`."""
    try:
        return table_io.read_like(path, header)
    except (OSError, ValueError):
        return header


def header_for(gpu: Gpu) -> Table:
    """Return a table without entries for `gpu`, with the versions of this installation."""
    return Table(gpu, {"torch": version("torch"), "cutefce": __version__, **current_build()})
