"""Time and peak memory of a call, on a CPU or on a GPU."""

import gc
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.profiler import ProfilerActivity, profile

Call = Callable[[], object]
STRETCHES = 3
"""Of runs of a form, for which it has a GPU to itself."""


@dataclass(frozen=True)
class Timing:
    """What repeated runs of one form took."""

    samples_ms: tuple[float, ...]
    """In the order of the runs."""

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
    forms: dict[str, Call], device: str, repeats: int, before: Call | None = None
) -> dict[str, Timing]:
    """Time all `forms` once a round, for `repeats` rounds after one to warm up.

    Clocks and temperature drift: only ratios of times of one call of this function mean anything.
    A GPU's clock also depends on what it did just before: on one, the same products run before each
    form, as a model's layers do before its loss, and each round has an order of its own.  These
    products leave nothing of a form's inputs in the L2 cache.  The GPU is not waited for in
    between, so that launches hide behind them.  What a form compiles and tunes on first use is not
    timed.  `before` is called right before each form, untimed.
    """
    clock, layers = (_cpu_sample, None) if device == "cpu" else (_gpu_sample, _layers())
    for form in forms.values():
        form()
    samples: dict[str, list[Callable[[], float]]] = {name: [] for name in forms}
    order = random.Random(0)
    for _ in range(repeats):
        for name in order.sample(list(forms), len(forms)):
            if layers is not None:
                layers()
            if before is not None:
                before()
            samples[name].append(clock(forms[name]))
    if device != "cpu":
        torch.cuda.synchronize()
    return {name: Timing(tuple(sample() for sample in taken)) for name, taken in samples.items()}


def sustained(forms: dict[str, Call], device: str, seconds: float) -> dict[str, Timing]:
    """Time `forms` one after another, each alone for `seconds` after as long to repair_stored_exps.

    `STRETCHES` times, in an order of their own; a time is that of one run in a stretch.
    """

    def milliseconds(form: Call, runs: int) -> float:
        def stretch() -> None:
            for _ in range(runs):
                form()

        sample = (_cpu_sample if device == "cpu" else _gpu_sample)(stretch)
        if device != "cpu":
            torch.cuda.synchronize()
        return sample() / runs

    runs = {}
    for name, form in forms.items():
        form()
        runs[name] = max(1, round(seconds * 1e3 / milliseconds(form, 1)))
    samples: dict[str, list[float]] = {name: [] for name in forms}
    order = random.Random(0)
    for _ in range(STRETCHES):
        for name in order.sample(list(forms), len(forms)):
            milliseconds(forms[name], runs[name])
            samples[name].append(milliseconds(forms[name], runs[name]))
    return {name: Timing(tuple(taken)) for name, taken in samples.items()}


def _layers() -> Call:
    """Return products of random numbers that take an H200 some 60 ms."""
    a, b, out = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(3))

    def run() -> None:
        for _ in range(36):
            torch.mm(a, b, out=out)

    return run


def _cpu_sample(form: Call) -> Callable[[], float]:
    begin = time.perf_counter()
    form()
    milliseconds = (time.perf_counter() - begin) * 1e3
    return lambda: milliseconds


def _gpu_sample(form: Call) -> Callable[[], float]:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    form()
    end.record()
    return lambda: float(start.elapsed_time(end))


def peak_bytes(form: Call, device: str) -> int:
    """Return the most bytes that `form` holds at a time beyond what is allocated before it.

    Counts what is asked of torch's allocators; that of GPUs may give each tensor up to 1 MiB more.
    `form` should have run once before, so that nothing is allocated for good.
    """
    gc.collect()  # what others left in cycles could go meanwhile
    if device != "cpu":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_stats()["requested_bytes.all.current"]
        form()
        torch.cuda.synchronize()
        return int(torch.cuda.memory_stats()["requested_bytes.all.peak"] - before)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        form()
    results = profiler.profiler.kineto_results if profiler.profiler else None
    assert results is not None
    held = peak = 0
    for event in sorted(results.events(), key=lambda event: event.start_ns()):
        if event.name() == "[memory]" and event.device_type().name == "CPU":
            held += event.nbytes()
            peak = max(peak, held)
    return peak
