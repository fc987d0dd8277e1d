"""A GPU that is not there, what is tuned on it, and races whose outcome is known."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from cutefce.autotune_cache.table import Table
from cutefce.autotune_cache.tuning import worker
from cutefce.autotune_cache.tuning.candidates import Job
from cutefce.autotune_cache.tuning.subprocess_worker import Child, ChildError
from cutefce.autotune_cache.tuning.tuner import Tuner
from cutefce.autotune_cache.tuning.worker import Timing
from cutefce.cute_kernels.arch.sm90 import Sm90
from tests.support.faulty_candidates import Kind, StandIn, config

DEVICE, SIZE = "NVIDIA Test 9000", 132
HEAD = Table(DEVICE, SIZE, "sm_90a", {"kernels": "0123"})
STAND_IN = StandIn(Sm90(), SIZE, "cpu")
SIZES = (24, 16, 300)


def nothing() -> None:
    pass


def job(kinds: tuple[Kind, ...], sizes: tuple[int, int, int] = SIZES) -> Job:
    choices = tuple(config(kind) for kind in kinds)
    return Job(STAND_IN, STAND_IN.problem(sizes, "bfloat16"), choices, 0)


class Inline(Child):
    """Answers in the place of a child, as if the stand-ins had been raced."""

    def ask(self, call: Any, seconds: float) -> Any:
        if call.func is worker.prepare_full:
            return None
        if call.func is worker.qualify:
            contestants = call.args[2:]
        else:
            assert call.func is worker.race
            contestants = call.args[2]
        kinds = [Kind.FAST if c == "product" else Kind(c.raster_group) for c in contestants]
        for kind in kinds:
            if kind not in (Kind.SLOW, Kind.FAST):
                raise ChildError("out of memory" if kind is Kind.LEAKS else "wrong")
        if call.func is worker.qualify:
            return True
        times = [1.0 if kind is Kind.FAST else 2.0 for kind in kinds]
        return tuple(Timing(time, time / times[-1]) for time in times)


def tune_inline(path: Path, vocabularies: range, note: Callable[[Job], object]) -> None:
    work = Tuner(path, HEAD, Inline(), {})
    for vocab in vocabularies:
        todo = job(tuple(Kind), (24, 16, vocab))
        assert work.tune(todo, nothing).entry is not None
        note(todo)
