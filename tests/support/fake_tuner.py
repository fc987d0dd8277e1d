"""A tuning target without hardware, and benchmarks with a known outcome."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from cutefce.autotune_cache.table import Table
from cutefce.autotune_cache.tuning import worker
from cutefce.autotune_cache.tuning.candidates import Job
from cutefce.autotune_cache.tuning.tuner import Tuner
from cutefce.autotune_cache.tuning.worker import Timing
from cutefce.cute_kernels.jit.subprocess_worker import SubprocessWorker, WorkerError
from tests.support.faulty_candidates import FaultyTarget, Kind, config
from tests.support.tables import GPU, VERSIONS

HEADER = Table(GPU, VERSIONS)
TARGET = FaultyTarget(GPU, "cpu")
SIZES = (24, 16, 300)


def nothing() -> None:
    pass


def job(kinds: tuple[Kind, ...], sizes: tuple[int, int, int] = SIZES) -> Job:
    candidates = tuple(config(kind) for kind in kinds)
    return Job(TARGET, TARGET.problem(sizes, "bfloat16"), candidates, 0)


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
        if call.func is worker.verify:
            entrants = call.args[2:]
        else:
            assert call.func is worker.benchmark_interleaved
            entrants = call.args[2]
        kinds = [Kind.FAST if e == worker.CUBLAS else Kind(e.raster_group) for e in entrants]
        for kind in kinds:
            if kind not in (Kind.SLOW, Kind.FAST):
                raise WorkerError("out of memory" if kind is Kind.LEAKS else "wrong")
        if call.func is worker.verify:
            return True
        times = [1.0 if kind is Kind.FAST else 2.0 for kind in kinds]
        return tuple(Timing(time, time / times[-1]) for time in times)


def tune_inline(path: Path, vocabularies: range, note: Callable[[Job], object]) -> None:
    work = Tuner(path, HEADER, InlineWorker(), {})
    for vocab in vocabularies:
        todo = job(tuple(Kind), (24, 16, vocab))
        assert work.tune(todo, nothing).entry is not None
        note(todo)
