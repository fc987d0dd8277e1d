"""The tuner: times candidates, which passed verification, in a subprocess.

Each candidate goes through one trial, under a time limit: it is timed against the architecture's
default.  It wins if it saves 1 %, less being noise.  Candidates that hang, crash or run out of
memory do not win; the former two are not tried again.
"""

import dataclasses
import functools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

from cutefce.autotune_cache import table_io
from cutefce.autotune_cache.lookup import current_build
from cutefce.autotune_cache.table import Candidate, Entry, Table
from cutefce.autotune_cache.tuning import worker
from cutefce.autotune_cache.tuning.jobs import Job
from cutefce.cute_kernels.gpu import Gpu
from cutefce.cute_kernels.jit.subprocess_worker import SubprocessWorker, WorkerError
from cutefce.version import __version__

TRIAL_SECONDS = 60
"""Time limit of a trial."""
MIN_GAIN = 0.01
"""Smallest relative saving that counts as one; less is noise."""

Times = dict[Candidate, tuple[float, ...]]
"""Times of a trial in ms, round by round."""


@dataclass(frozen=True)
class Tuner:
    """Tunes problems one after another and adds each winner to a file at once."""

    path: Path
    """The file."""
    header: Table
    """A table without entries that names the GPU and the kernels."""
    process: SubprocessWorker
    """Runs the trials."""
    failures: dict[tuple[Job, Candidate], str] = field(default_factory=dict)
    """Problems and candidates that failed, with the reasons."""
    left_out: set[tuple[str, Candidate]] = field(default_factory=set)
    """Kernels and candidates that hang or crash, which have no other trial."""

    def tune(self, job: Job, advance: Callable[[], None]) -> Entry | None:
        """Return the winner of one problem, None if the default fails.

        Calls `advance` after each candidate.
        """
        default, trials = job.candidates[0], dict[Candidate, Times]()
        for candidate in job.candidates:
            times = self._times(job, candidate)
            advance()
            if times is not None:
                trials[candidate] = times
            elif candidate == default:
                return None
        best = min(trials, key=lambda candidate: _ratio(trials[candidate], candidate, default))
        ms, default_ms = (_median_ms(trials[best][x]) for x in (best, default))
        if ms >= default_ms or _ratio(trials[best], best, default) >= 1 - MIN_GAIN:
            best, ms = default, default_ms
        entry = Entry(best, ms, default_ms)
        table_io.update(self.path, dataclasses.replace(self.header, entries={job.key: entry}))
        return entry

    def _times(self, job: Job, candidate: Candidate) -> Times | None:
        """Return the times of a candidate and of the default; None if the candidate fails."""
        timed = tuple(dict.fromkeys((candidate, job.candidates[0])))
        if (job.kernel, candidate) in self.left_out:
            return None
        try:
            return self.process.ask(functools.partial(worker.trial, job, timed), TRIAL_SECONDS)
        except WorkerError as error:
            self.failures[job, candidate] = str(error)
            if error.is_of_the_call:  # another problem may need less memory
                self.left_out.add((job.kernel, candidate))
            return None


def _ratio(times: Times, one: Candidate, other: Candidate) -> float:
    """Return the median over the rounds of the time of one candidate divided by the other one's."""
    return statistics.median(a / b for a, b in zip(times[one], times[other], strict=True))


def _median_ms(times: Sequence[float]) -> float:
    """Return the median with four significant digits."""
    return float(f"{statistics.median(times):.4g}")


def read_done(path: Path, header: Table) -> Table:
    """Return the file's table if `header` can be added to it, else `header`."""
    try:
        return table_io.read_like(path, header)
    except (OSError, ValueError):
        return header


def header_for(gpu: Gpu) -> Table:
    """Return a table without entries for `gpu`, with the versions of this installation."""
    return Table(gpu, {"torch": version("torch"), "cutefce": __version__, **current_build()})
