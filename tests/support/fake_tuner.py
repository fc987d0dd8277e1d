"""Tuning jobs without hardware, and trials with a known outcome."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from cutefce.autotune_cache.tables import Table
from cutefce.autotune_cache.tuning import tuner
from cutefce.cute_kernels.jit.subprocess_worker import SubprocessWorker, WorkerError
from tests.support.faulty_candidates import FaultyJob, FaultyRunner, Kind, kind_of
from tests.support.tables import GPU, VERSIONS

HEADER = Table(GPU, VERSIONS)
RUNNER = FaultyRunner(GPU, "cpu")
SIZES = (24, 16, 300)


def job(
    kinds: tuple[Kind, ...] = (Kind.SLOW, Kind.FAST), sizes: tuple[int, int, int] = SIZES
) -> FaultyJob:
    return FaultyJob(RUNNER, "project_exp", RUNNER.problem(sizes, "bfloat16"), kinds)


class InProcess(SubprocessWorker):
    """Runs calls in this process, which no fault of a candidate may end."""

    def ask(self, call: Any, seconds: float) -> Any:
        try:
            return call()
        except Exception as error:
            raise WorkerError(f"{type(error).__name__}: {error}") from error


class InlineWorker(SubprocessWorker):
    """Answers at once, as a subprocess would after timing the candidates."""

    def ask(self, call: Any, seconds: float) -> Any:
        times = {}
        for candidate in call.__self__.candidates:
            kind = kind_of(candidate)
            if kind not in (Kind.SLOW, Kind.FAST):
                raise WorkerError("out of memory" if kind is Kind.LEAKS else "it hung")
            times[candidate] = (1.0 if kind is Kind.FAST else 2.0,) * 3
        return times


def tune_inline(path: Path, vocabularies: range, note: Callable[[FaultyJob], object]) -> None:
    for vocab in vocabularies:
        todo = job(sizes=(24, 16, vocab))
        tuner.tune(todo, InlineWorker(), path, HEADER)
        note(todo)
