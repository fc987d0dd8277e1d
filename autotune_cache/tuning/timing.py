"""Interleaved timing: rounds in which every call is timed once, in random order.

Clocks and temperatures drift, and a GPU's clock depends on its preceding work, so that only times
of the same rounds are comparable.
"""

import random
import time
from collections.abc import Callable, Hashable, Mapping
from typing import Any, TypeVar

import torch

Call = Callable[[], object]
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
    order, names = random.Random(0), list(calls)
    taken: dict[K, list[tuple[Any, Any]]] = {name: [] for name in names}
    for _ in range(rounds):
        order.shuffle(names)
        for name in names:
            if before is not None:
                before()
            start = _now(device)
            for _ in range(repeats):
                calls[name]()
            taken[name].append((start, _now(device)))
    return {name: tuple(_ms(*pair) / repeats for pair in pairs) for name, pairs in taken.items()}


def _now(device: str) -> Any:
    """Return the time in seconds, or of a GPU an event behind all that was launched."""
    if device == "cpu":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _ms(start: Any, end: Any) -> float:
    """Return the milliseconds between two times, once a GPU has come to the second one."""
    if isinstance(end, torch.cuda.Event):
        end.synchronize()
        return float(start.elapsed_time(end))
    return float(end - start) * 1e3
