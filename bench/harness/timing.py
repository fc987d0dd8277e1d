"""Time and peak memory of calls, on a CPU or a GPU."""

import gc
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch.profiler import ProfilerActivity, profile

from cutefce.autotune_cache.tuning import timing
from cutefce.autotune_cache.tuning.timing import Call as Call

SECONDS = 6.0
"""Time of the rounds of one measurement, unless their number is given."""
MIN_ROUNDS, MAX_ROUNDS = 5, 11
"""Limits of the number of rounds that take `SECONDS`."""


@dataclass(frozen=True)
class Timing:
    """Milliseconds of repeated runs of one call, in the order of the runs."""

    samples_ms: tuple[float, ...]

    @property
    def median_ms(self) -> float:
        """The median of the runs."""
        return statistics.median(self.samples_ms)

    @property
    def quartiles_ms(self) -> tuple[float, float]:
        """The lower and the upper quartile of the runs."""
        low, _, high = statistics.quantiles(self.samples_ms, n=4, method="inclusive")
        return low, high


def interleaved(
    calls: Mapping[str, Call],
    device: str,
    rounds: int | None = None,
    *,
    before: Call | None = None,
) -> dict[str, Timing]:
    """Time every call once per round, in a new random order each round.

    Clocks and temperature drift, so only ratios of times from one such run are meaningful; the
    random order keeps a call from always following the same one.  An untimed round comes first:
    it compiles, tunes and loads what the first run needs.

    Args:
        calls: by name.
        device: "cpu", or a CUDA device whose current stream the calls use.
        rounds: number of samples of each call; if None, as many as `rounds_of_seconds` finds after
            another untimed round.
        before: runs untimed before each sample, such as `preceding_gemms(device)`.

    Returns:
        the timing of each call; sample i of every call is from round i.
    """
    for call in calls.values():
        call()
    if rounds is None:
        if device != "cpu":
            torch.cuda.synchronize()
        begin = time.perf_counter()
        timing.interleaved(calls, device, 1, before=before)
        rounds = rounds_of_seconds(time.perf_counter() - begin)
    times = timing.interleaved(calls, device, rounds, before=before)
    return {name: Timing(samples) for name, samples in times.items()}


def rounds_of_seconds(round_seconds: float) -> int:
    """Return how many rounds of `round_seconds` take `SECONDS`, within the limits."""
    return min(max(MIN_ROUNDS, int(SECONDS / round_seconds)), MAX_ROUNDS)


def preceding_gemms(device: str) -> Call | None:
    """Return GEMMs that stand for the layers before a loss; None on a CPU.

    They bring the GPU to the clock and power of a training step before each call, and evict the
    inputs of the call from the L2 cache.
    """
    if device == "cpu":
        return None
    a, b, out = (torch.randn(8192, 8192, device=device, dtype=torch.bfloat16) for _ in range(3))

    def run() -> None:
        for _ in range(36):
            torch.mm(a, b, out=out)

    return run


def peak_bytes(call: Call, device: str) -> int:
    """Return the peak bytes that `call` holds beyond what is allocated before it.

    Counts bytes requested from torch's allocators: unlike allocated bytes, these do not depend on
    which cached blocks an allocation happens to reuse.  The result of the call counts while it is
    alive.  Run `call` once before, so that what it allocates permanently is not counted.
    """
    gc.collect()  # garbage freed during the call would hide what it allocates
    if device == "cpu":
        return _cpu_peak_bytes(call)
    # autograd's thread lets go of what a backward before returned once it takes up the next one
    with torch.enable_grad():
        torch.zeros((), device=device, requires_grad=True).mul(1).backward()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    call()
    torch.cuda.synchronize()
    return int(torch.cuda.memory_stats()["requested_bytes.all.peak"] - before)


def _cpu_peak_bytes(call: Call) -> int:
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        call()
    results = profiler.profiler.kineto_results if profiler.profiler else None
    assert results is not None
    held = peak = 0
    for event in sorted(results.events(), key=lambda event: event.start_ns()):
        if event.name() == "[memory]" and event.device_type().name == "CPU":
            held += event.nbytes()
            peak = max(peak, held)
    return peak
