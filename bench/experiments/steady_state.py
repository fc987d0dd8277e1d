"""Forward and backward in steady state: each implementation runs alone, back to back.

A GPU adapts its clock to the power drawn over the last moments.  Interleaved runs, as in `step`,
share one clock; here each implementation settles at the clock of its own power draw.
"""

import functools
from dataclasses import dataclass

import click

from bench.experiments.step import FEW_WORKSPACES, WORKSPACES, distinct_plans, tflops_of
from bench.harness.cli import DEVICE, Output, per_shape
from bench.harness.problems import (
    CPU_SHAPE,
    MODELS,
    Loss,
    Shape,
    cutefce_loss,
    gradients,
    plain_gemms,
    random_inputs,
)
from bench.harness.reference import unfused
from bench.harness.timing import Call, steady_state

SHAPES = {"cpu": (CPU_SHAPE,), "cuda": tuple(MODELS)}


@dataclass(frozen=True)
class Row:
    """One implementation at one shape; times are medians of stretches of runs."""

    tokens: int
    hidden: int
    vocab: int
    implementation: str
    median_ms: float
    quartiles_ms: tuple[float, float]
    ratio_to_gemms: float
    tflops: float
    """Operations of the three GEMMs, without recomputation, over the time."""


@click.command("steady-state")
@click.option(
    "--seconds", type=float, default=0.25, help="Length of a stretch, and of its warm-up."
)
@click.pass_obj
def command(output: Output, /, seconds: float) -> None:
    """Forward and backward at models' shapes, each implementation alone."""
    measure = functools.partial(run, device=DEVICE, seconds=seconds)
    output.record("steady_state", per_shape(SHAPES[DEVICE], measure))


def run(shape: Shape, device: str, seconds: float) -> list[Row]:
    """Measure every implementation on random inputs, in stretches of `seconds`."""
    h, w, y = random_inputs(shape, device)
    losses: dict[str, Loss] = {"unfused": unfused}
    for name in distinct_plans(h, w, FEW_WORKSPACES):
        losses[f"cutefce {name}"] = cutefce_loss(WORKSPACES[name])
    calls: dict[str, Call] = {"GEMMs": plain_gemms(h, w, y)}
    for name, loss in losses.items():
        calls[name] = functools.partial(gradients, loss, h, w, y)
    times = steady_state(calls, device, seconds)
    return [
        Row(
            shape.tokens,
            shape.hidden,
            shape.vocab,
            name,
            median_ms=time.median_ms,
            quartiles_ms=time.quartiles_ms,
            ratio_to_gemms=time.median_ms / times["GEMMs"].median_ms,
            tflops=tflops_of(shape, time),
        )
        for name, time in times.items()
    ]
