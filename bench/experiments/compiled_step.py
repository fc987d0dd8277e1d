"""A compiled training step against the eager one, with another number of tokens in each step."""

import functools
import random
import statistics
from dataclasses import dataclass

import click
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from bench.harness.cli import DEVICE, Output
from bench.harness.problems import CPU_SHAPE, Shape, cutefce_loss, gradients, random_inputs
from bench.harness.records import Measurement
from bench.harness.timing import interleaved, preceding_gemms

SHAPE = Shape(8192, 4096, 131072, "bfloat16")
"""The most tokens of a step, and the head."""
WORKSPACES = (None, "min", 1 << 30, "max")
WARM_UP = 5
"""Steps before the first that is measured: those that compile."""
ROUNDS = 9
"""Samples of each step."""


@dataclass(frozen=True)
class Row:
    """All steps with one memory budget."""

    tokens: int
    """The most tokens of a step."""
    hidden: int
    vocab: int
    workspace: str
    steps: int
    graphs: int
    """Graphs that were compiled, also in the warm-up."""
    eager_ms: float
    """Sum over the steps."""
    compiled_ms: float
    compiled_to_eager: float
    """Ratio of the sums."""
    median_ratio: float
    """Over the steps."""
    largest_ratio: float


@click.command("compiled-step")
@click.option("--steps", type=click.IntRange(min=1), default=50, help="Measured steps.")
@click.pass_obj
def command(output: Output, /, steps: int) -> None:
    """A compiled step with random sizes, against the eager one."""
    shape = CPU_SHAPE if DEVICE == "cpu" else SHAPE
    measurements = [
        Measurement({"workspace": str(w)}, functools.partial(run, shape, w, steps))
        for w in WORKSPACES
    ]
    output.record("compiled_step", measurements)


def run(shape: Shape, workspace: str | int | None, steps: int) -> list[Row]:
    """Measure `steps` steps with as many random numbers of tokens."""
    torch.compiler.reset()
    counter = CompileCounterWithBackend("inductor")
    eager = cutefce_loss(workspace)
    compiled = torch.compile(eager, fullgraph=True, backend=counter)
    draw = random.Random(0)
    h, w, y = random_inputs(shape, DEVICE)
    before = preceding_gemms(DEVICE)
    pairs: list[tuple[float, float]] = []
    for step in range(WARM_UP + steps):
        tokens = int(shape.tokens ** draw.uniform(0.5, 1))
        part: tuple[Tensor, Tensor, Tensor] = h[:tokens], w, y[:tokens]
        calls = {
            "eager": functools.partial(gradients, eager, *part),
            "compiled": functools.partial(gradients, compiled, *part),
        }
        if step < WARM_UP:
            for call in calls.values():
                call()
            continue
        times = interleaved(calls, DEVICE, ROUNDS, before=before)
        pairs.append((times["eager"].median_ms, times["compiled"].median_ms))
    ratios = [b / a for a, b in pairs]
    eager_ms, compiled_ms = map(sum, zip(*pairs, strict=True))
    row = Row(
        tokens=shape.tokens,
        hidden=shape.hidden,
        vocab=shape.vocab,
        workspace=str(workspace),
        steps=steps,
        graphs=counter.frame_count,
        eager_ms=eager_ms,
        compiled_ms=compiled_ms,
        compiled_to_eager=compiled_ms / eager_ms,
        median_ratio=statistics.median(ratios),
        largest_ratio=max(ratios),
    )
    return [row]
