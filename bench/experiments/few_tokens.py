"""Few tokens: forward and step against plain GEMMs, where numbers of tokens do not fill a tile.

GEMM       h wᵀ, which writes all logits
forward    torch.ops.cutefce.loss without gradients
GEMMs      the three GEMMs of a step
step       forward and backward with workspace="max"
"""

import functools
from dataclasses import dataclass

import click
import torch

import cutefce
from bench.harness.cli import Output, gpu_only, per_shape, repeats_option
from bench.harness.problems import Shape, cutefce_loss, gradients, plain_gemms, random_inputs
from bench.harness.timing import Call, interleaved, preceding_gemms

SHAPES = tuple(Shape(n, 4096, 131072, "bfloat16") for n in (65, 100, 130, 200, 300, 383))


@dataclass(frozen=True)
class Row:
    """One number of tokens; times are medians of interleaved runs."""

    tokens: int
    hidden: int
    vocab: int
    gemm_ms: float
    forward_ms: float
    forward_to_gemm: float
    gemms_ms: float
    step_ms: float
    step_to_gemms: float


@click.command("few-tokens")
@repeats_option(15)
@click.pass_obj
@gpu_only
def command(output: Output, /, repeats: int) -> None:
    """Forward and step of a few tokens on a GPU, against the plain GEMMs."""
    cutefce.set_strict(True)
    measure = functools.partial(run, device="cuda", repeats=repeats)
    output.record("few_tokens", per_shape(SHAPES, measure))


def run(shape: Shape, device: str, repeats: int) -> list[Row]:
    """Measure forward and step at `shape` on random inputs."""
    h, w, y = random_inputs(shape, device)
    z = h.new_empty(shape.tokens, shape.vocab)

    @torch.no_grad()
    def forward() -> None:
        torch.ops.cutefce.loss(h, w, y)

    calls: dict[str, Call] = {
        "gemm": lambda: torch.mm(h, w.t(), out=z),
        "forward": forward,
        "gemms": plain_gemms(h, w, y),
        "step": functools.partial(gradients, cutefce_loss("max"), h, w, y),
    }
    times = interleaved(calls, device, repeats, before=preceding_gemms(device))
    gemm, forward_ms, gemms, step = (times[name].median_ms for name in calls)
    sizes = shape.tokens, shape.hidden, shape.vocab
    return [Row(*sizes, gemm, forward_ms, forward_ms / gemm, gemms, step, step / gemms)]
