"""A tuning target without hardware, and trials with a known outcome."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from cutefce.autotune_cache.table import Table
from cutefce.autotune_cache.tuning import worker
from cutefce.autotune_cache.tuning.tuner import Job, Tuner
from cutefce.autotune_cache.tuning.worker import Timing
from cutefce.cute_kernels.jit.subprocess_worker import SubprocessWorker, WorkerError
from tests.support.faulty_candidates import FaultyRunner, FaultyTarget, Kind, config, kind_of
from tests.support.tables import GPU, VERSIONS

HEADER = Table(GPU, VERSIONS)
RUNNER = FaultyRunner(GPU, "cpu")
TARGET = FaultyTarget(RUNNER)
SIZES = (24, 16, 300)


def nothing() -> None:
    pass


def job(kinds: tuple[Kind, ...], sizes: tuple[int, int, int] = SIZES) -> Job:
    candidates = tuple(config(kind) for kind in kinds)
    return Job(TARGET, RUNNER.problem(sizes, "bfloat16"), candidates)


class InProcess(SubprocessWorker):
    """Runs calls in this process, which no fault of a candidate may end."""

    def ask(self, call: Any, seconds: float) -> Any:
        try:
            return call()
        except Exception as error:
            raise WorkerError(f"{type(error).__name__}: {error}") from error


class InlineWorker(SubprocessWorker):
    """Answers at once, as a subprocess would after verifying and timing the candidates."""

    def ask(self, call: Any, seconds: float) -> Any:
        if call.func is worker.prepare_problem:
            return None
        assert call.func is worker.trial
        times = {}
        for candidate in call.args[2]:
            kind = kind_of(candidate)
            if kind not in (Kind.SLOW, Kind.FAST):
                raise WorkerError("out of memory" if kind is Kind.LEAKS else "wrong")
            times[candidate] = 1.0 if kind is Kind.FAST else 2.0
        last = [*times.values()][-1]
        return {candidate: Timing(time, time / last) for candidate, time in times.items()}


def tune_inline(path: Path, vocabularies: range, note: Callable[[Job], object]) -> None:
    work = Tuner(path, HEADER, InlineWorker())
    for vocab in vocabularies:
        todo = job(tuple(Kind), (24, 16, vocab))
        assert work.tune(todo, nothing) is not None
        note(todo)
