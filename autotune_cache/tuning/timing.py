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
"""Waits for a sample to finish and returns its time in ms."""
K = TypeVar("K", bound=Hashable)


def interleaved(
    calls: Mapping[K, Call],
    device: str,
    rounds: int,
    calls_per_sample: int = 1,
    before: Call | None = None,
) -> dict[K, tuple[float, ...]]:
    """Return the time of each call in ms, round by round.

    Does not wait for a GPU between samples, so that launches overlap with its work.  Includes
    compilation on first use: call once before if that matters.

    Args:
        calls: What to time, by name.
        device: Device type that runs the calls, as torch names it.
        rounds: Samples of each call.
        calls_per_sample: Calls in a row whose mean time is one sample.
        before: Called before each sample, untimed.
    """
    order, names = random.Random(0), list(calls)
    readers: dict[K, list[Reader]] = {name: [] for name in names}
    for _ in range(rounds):
        for name in order.sample(names, len(names)):
            if before is not None:
                before()
            readers[name].append(sample(calls[name], device, calls_per_sample))
    return {name: tuple(read() for read in taken) for name, taken in readers.items()}


def sample(call: Call, device: str, repeats: int = 1) -> Reader:
    """Make `repeats` calls in a row; return a reader of their mean time."""
    return (_cpu_sample if device == "cpu" else _gpu_sample)(call, repeats)


def _cpu_sample(call: Call, repeats: int) -> Reader:
    begin = time.perf_counter()
    for _ in range(repeats):
        call()
    ms = (time.perf_counter() - begin) * 1e3 / repeats
    return lambda: ms


def _gpu_sample(call: Call, repeats: int) -> Reader:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(repeats):
        call()
    end.record()

    def read() -> float:
        end.synchronize()
        return float(start.elapsed_time(end)) / repeats

    return read
