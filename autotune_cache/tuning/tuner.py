"""The tuner: times the candidates of a problem, which passed verification, in a subprocess.

They are timed in turns, in one trial under a time limit.  One wins over the architecture's default
if it saves 1 %, less being noise.
"""

import dataclasses
import statistics
from importlib.metadata import version
from pathlib import Path

from cutefce.autotune_cache import table_io
from cutefce.autotune_cache.lookup import current_build
from cutefce.autotune_cache.table import Candidate, Entry, Table
from cutefce.autotune_cache.tuning.jobs import Job
from cutefce.cute_kernels.gpu import Gpu
from cutefce.cute_kernels.jit.subprocess_worker import SubprocessWorker
from cutefce.version import __version__

TRIAL_SECONDS = 60
"""Time limit of a trial."""
MIN_GAIN = 0.01
"""Smallest relative saving that counts as one; less is noise."""


def tune(job: Job, process: SubprocessWorker, path: Path, header: Table) -> Entry:
    """Return the winner of one problem, and add it to a file.

    Args:
        job: The problem.
        process: Runs the trial.
        path: The file.
        header: A table without entries that names the GPU and the kernels.

    Raises:
        WorkerError: if the trial fails; the file has no entry of it then.
        RuntimeError: if no subprocess can be started.
    """
    times = process.ask(job.trial, TRIAL_SECONDS)
    default = job.candidates[0]

    def ratio(candidate: Candidate) -> float:
        """Return the median over the rounds of its time divided by the default's."""
        return statistics.median(
            a / b for a, b in zip(times[candidate], times[default], strict=True)
        )

    best = min(times, key=ratio)
    ms, default_ms = (_digits(statistics.median(times[x])) for x in (best, default))
    if ms >= default_ms or ratio(best) >= 1 - MIN_GAIN:
        best, ms = default, default_ms
    entry = Entry(best, ms, default_ms)
    table_io.update(path, dataclasses.replace(header, entries={job.key: entry}))
    return entry


def _digits(ms: float) -> float:
    """Return a time with four significant digits."""
    return float(f"{ms:.4g}")


def read_done(path: Path, header: Table) -> Table:
    """Return the file's table if `header` can be added to it, else `header`."""
    try:
        return table_io.read_like(path, header)
    except OSError:
        return header


def header_for(gpu: Gpu) -> Table:
    """Return a table without entries for `gpu`, with the versions of this installation."""
    return Table(gpu, {"torch": version("torch"), "cutefce": __version__, **current_build()})
