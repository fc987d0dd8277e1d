"""CPU time of eager calls on a GPU: until the call returns, with no wait for its kernels.

Each size has a no-grad forward and a training step (forward and backward), of cutefce and of
F.cross_entropy(F.linear(h, w), y).
"""

import functools
import statistics
import time
from dataclasses import dataclass

import click
import torch
import torch.nn.functional as F
from torch import Tensor

import cutefce
from bench.harness.cli import Output, gpu_only, per_shape
from bench.harness.problems import Loss, Shape, random_inputs
from bench.harness.timing import Call

SHAPES = (
    Shape(256, 512, 8192, "bfloat16"),
    Shape(1024, 4096, 32768, "bfloat16"),
    Shape(8192, 4096, 131072, "bfloat16"),
)
CALLS, SECONDS = 3000, 12.0
"""Limits of the measured calls of one row, each of which ends it."""
WARM_UP_SECONDS = 1.0
"""Calls before the measured ones, in which an idle CPU reaches its clock."""
BATCH = 20
"""Consecutive calls before the GPU is waited for; few enough not to fill its launch queue."""


@dataclass(frozen=True)
class Row:
    """Medians and quartiles of one kind of call, in microseconds."""

    tokens: int
    hidden: int
    vocab: int
    call: str
    """Either "forward", without gradients, or "training step"."""
    cutefce_us: float
    cutefce_quartiles_us: tuple[float, float]
    torch_us: float
    """Interleaved with cutefce's: CPUs differ."""
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
    for kind, evaluate in (("forward", _forward), ("training step", _step)):
        h, w = (x.requires_grad_(kind == "training step") for x in (h, w))
        losses: tuple[Loss, Loss] = cutefce.linear_cross_entropy, _torch_loss
        calls: list[Call] = [functools.partial(evaluate, loss, h, w, y) for loss in losses]
        fused, unfused = _interleaved_us(calls, device)
        rows.append(
            Row(shape.tokens, shape.hidden, shape.vocab, kind, *_summary(fused), *_summary(unfused))
        )
    return rows


def _torch_loss(h: Tensor, w: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(h, w), y)


def _forward(loss: Loss, h: Tensor, w: Tensor, y: Tensor) -> None:
    with torch.no_grad():
        loss(h, w, y)


def _step(loss: Loss, h: Tensor, w: Tensor, y: Tensor) -> None:
    torch.autograd.grad(loss(h, w, y), (h, w))


def _interleaved_us(calls: list[Call], device: str) -> list[list[float]]:
    """Return the microseconds of every call, batches of the calls taking turns."""
    end = time.perf_counter() + WARM_UP_SECONDS
    while time.perf_counter() < end:
        for call in calls:
            _batch_us(call, device)
    samples: list[list[float]] = [[] for _ in calls]
    end = time.perf_counter() + SECONDS
    while not samples[0] or (len(samples[0]) < CALLS and time.perf_counter() < end):
        for call, times in zip(calls, samples, strict=True):
            times += _batch_us(call, device)
    return samples


def _batch_us(call: Call, device: str) -> list[float]:
    """Time `BATCH` calls one by one, starting with an idle GPU."""
    if device != "cpu":
        torch.cuda.synchronize()
    times = []
    for _ in range(BATCH):
        begin = time.perf_counter()
        call()
        times.append((time.perf_counter() - begin) * 1e6)
    return times


def _summary(samples: list[float]) -> tuple[float, tuple[float, float]]:
    """Return median and quartiles."""
    low, median, high = statistics.quantiles(samples, n=4)
    return median, (low, high)
