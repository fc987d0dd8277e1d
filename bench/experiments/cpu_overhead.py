"""CPU time of eager calls on a GPU: until the call returns, with no wait for its kernels.

Each size has a no-grad forward and training steps (forward and backward) at three budgets, of
cutefce and of the two stages F.cross_entropy(F.linear(h, w), y).  Of small steps there is also the
time until the GPU is done: of each step alone, and of steps in a row, as in a training.
"""

import functools
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import click
import torch
import torch.nn.functional as F
from torch import Tensor

import cutefce
from bench.harness.cli import Output, gpu_only, per_shape
from bench.harness.problems import Loss, Shape, cutefce_loss, random_inputs
from bench.harness.timing import Call
from cutefce.ops.primitives.cute_gradients import is_small

SHAPES = (
    Shape(256, 512, 8192, "bfloat16"),
    Shape(2048, 896, 151936, "bfloat16"),
    Shape(4096, 2048, 128256, "bfloat16"),
    Shape(8192, 4096, 131072, "bfloat16"),
)
CALLS, SECONDS = 3000, 2.0
"""Limits of the measured calls of one row, each of which ends it."""
WARM_UP_SECONDS = 0.5
"""Calls before the measured ones, in which an idle CPU reaches its clock."""
FORWARD: dict[str, Loss] = {"": cutefce.linear_cross_entropy}
BUDGETS = FORWARD | {f", {name}": cutefce_loss(workspace=name) for name in ("max", "min")}
"""Losses of training steps, by what their budgets add to the name."""
BATCH = 10
"""Consecutive calls before the GPU is waited for; few enough not to fill its launch queue."""


Measure = Callable[[Call, str], list[float]]
"""Takes samples of a call on a device, a batch of calls."""


@dataclass(frozen=True)
class Row:
    """Medians and quartiles of one kind of call, or of means in a row, in microseconds."""

    call: str
    """"forward", without gradients, or "training step", followed by a budget if not the default, or
    by what else is waited for."""
    cutefce_us: float
    cutefce_quartiles_us: tuple[float, float]
    torch_us: float
    """Interleaved with cutefce's, all budgets of a step in turns: CPUs differ."""
    torch_quartiles_us: tuple[float, float]


@click.command("cpu-overhead")
@click.pass_obj
@gpu_only
def command(output: Output, /) -> None:
    """CPU time of an eager forward and of a training step on a GPU."""
    output.record("cpu_overhead", per_shape(SHAPES, functools.partial(run, device="cuda")))


def run(shape: Shape, device: str) -> list[Row]:
    """Measure both kinds of call on random inputs."""
    h, w, y = random_inputs(shape, device)
    rows = []
    kinds = [
        ("forward", _forward, FORWARD, _calls_us),
        ("training step", _step, BUDGETS, _calls_us),
    ]
    if is_small(shape.tokens, shape.hidden, shape.vocab):
        until = "training step until the GPU is done"
        kinds.append((until, _step, FORWARD, _waits_us))
        kinds.append((f"{until}, {BATCH} in a row", _step, FORWARD, _row_us))
    for kind, evaluate, fused, measure in kinds:
        h, w = (x.requires_grad_(kind != "forward") for x in (h, w))
        losses = *fused.values(), _torch_loss
        calls: list[Call] = [functools.partial(evaluate, loss, h, w, y) for loss in losses]
        *samples, unfused = _interleaved_us(calls, device, measure)
        rows += [
            Row(kind + budget, *_summary(times), *_summary(unfused))
            for budget, times in zip(fused, samples, strict=True)
        ]
    return rows


def _torch_loss(h: Tensor, w: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(h, w), y)


def _forward(loss: Loss, h: Tensor, w: Tensor, y: Tensor) -> None:
    with torch.no_grad():
        loss(h, w, y)


def _step(loss: Loss, h: Tensor, w: Tensor, y: Tensor) -> None:
    torch.autograd.grad(loss(h, w, y), (h, w))


def _interleaved_us(calls: list[Call], device: str, measure: Measure) -> list[list[float]]:
    """Return the samples of every call, batches taking turns in a random order each round."""
    end = time.perf_counter() + WARM_UP_SECONDS
    while time.perf_counter() < end:
        for call in calls:
            measure(call, device)
    samples: list[list[float]] = [[] for _ in calls]
    end, order = time.perf_counter() + SECONDS, random.Random(0)
    while not samples[0] or (len(samples[0]) < CALLS and time.perf_counter() < end):
        # what a call finds in the allocator depends on the one before
        for i in order.sample(range(len(calls)), len(calls)):
            samples[i] += measure(calls[i], device)
    return samples


def _calls_us(call: Call, device: str) -> list[float]:
    """Return the microseconds until each of `BATCH` calls returns; the GPU is idle at first."""
    _synchronize(device)
    return [_elapsed_us(call) for _ in range(BATCH)]


def _waits_us(call: Call, device: str) -> list[float]:
    """Return the microseconds until the GPU is done with each of `BATCH` calls alone."""

    def waited() -> None:
        call()
        _synchronize(device)

    _synchronize(device)
    return [_elapsed_us(waited) for _ in range(BATCH)]


def _row_us(call: Call, device: str) -> list[float]:
    """Return the microseconds a call until the GPU is done with `BATCH` calls in a row."""

    def row() -> None:
        for _ in range(BATCH):
            call()
        _synchronize(device)

    _synchronize(device)
    return [_elapsed_us(row) / BATCH]


def _elapsed_us(call: Call) -> float:
    begin = time.perf_counter()
    call()
    return (time.perf_counter() - begin) * 1e6


def _synchronize(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


def _summary(samples: list[float]) -> tuple[float, tuple[float, float]]:
    """Return median and quartiles."""
    low, median, high = statistics.quantiles(samples, n=4)
    return median, (low, high)
