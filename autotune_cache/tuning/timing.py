"""Interleaved timing: rounds in which every call is timed once, in random order.

Clocks and temperatures drift, and a GPU's clock depends on its preceding work, so that only times
of the same rounds are comparable.
"""

import random
import time
from collections.abc import Callable, Hashable, Mapping
from typing import TypeVar

import torch

Call = Callable[[], object]
Reader = Callable[[], float]
"""Waits for calls to finish and returns their mean time in ms."""
K = TypeVar("K", bound=Hashable)


def interleaved(
    calls: Mapping[K, Call],
    device: str,
    rounds: int,
    repeats: int = 1,
    before: Call | None = None,
) -> dict[K, tuple[float, ...]]:
    """Return the time of each call in ms, round by round.

    Does not wait for a GPU between calls, so that launches overlap with its work.  Includes
    compilation on first use: call once before if that matters.

    Args:
        calls: What to time, by name.
        device: Device type that runs the calls, as torch names it.
        rounds: Times of each call.
        repeats: Calls in a row of which a time is the mean.
        before: Called before these, untimed.
    """
    timed = _timed_on_cpu if device == "cpu" else _timed_on_gpu
    order, names = random.Random(0), list(calls)
    readers: dict[K, list[Reader]] = {name: [] for name in names}
    for _ in range(rounds):
        order.shuffle(names)
        for name in names:
            if before is not None:
                before()
            readers[name].append(timed(calls[name], repeats))
    return {name: tuple(read() for read in taken) for name, taken in readers.items()}


def _timed_on_cpu(call: Call, repeats: int) -> Reader:
    """Make `repeats` calls in a row; return a reader of their mean time."""
    begin = time.perf_counter()
    for _ in range(repeats):
        call()
    ms = (time.perf_counter() - begin) * 1e3 / repeats
    return lambda: ms


def _timed_on_gpu(call: Call, repeats: int) -> Reader:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(repeats):
        call()
    end.record()

    def read() -> float:
        end.synchronize()
        return float(start.elapsed_time(end)) / repeats

    return read
