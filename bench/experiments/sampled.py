"""Sampled gradients beside exact ones and the plain GEMMs.

random      random hidden states and weights, logits of deviation 1: as flat a softmax as there is,
            of which a token keeps `samples` entries
trained     eight features of the head hold the logarithms of Zipf's law, as a prior that all tokens
            share, and the others give logits of deviation 4; each target is drawn from its token's
            softmax.  The loss is 4.5 nats, and with its lse known a token keeps 105 entries of 256
            samples and 37 of 64; in a language model of 12 layers, trained to a loss of 2.6 nats,
            88 and 29

Times are over those of the three plain GEMMs, of the same inputs in the same run.
"""

import functools
from dataclasses import dataclass
from typing import Any

import click
import torch
from torch import Tensor

import cutefce
from bench.harness.accuracy import relative_errors
from bench.harness.cli import DEVICE, Output, chosen_shapes, repeats_option, shape_options
from bench.harness.problems import (
    CPU_SHAPE,
    Shape,
    cutefce_loss,
    gradients,
    plain_gemms,
    random_inputs,
    sizes_of,
)
from bench.harness.records import Measurement
from bench.harness.timing import Call, interleaved, peak_bytes, preceding_gemms

SHAPES = {
    "cpu": (CPU_SHAPE,),
    "cuda": (
        Shape(8192, 4096, 131072, "bfloat16"),
        Shape(8192, 2304, 256000, "bfloat16"),
        Shape(32768, 4096, 131072, "bfloat16"),
        Shape(4096, 2048, 128256, "bfloat16"),
    ),
}
DATA = "random", "trained"
IMPLEMENTATIONS: dict[str, dict[str, Any]] = {
    "exact max": {"workspace": "max"},
    "exact min": {"workspace": "min"},
    "sampled 256": {"gradient": "sampled", "samples": 256},
    "sampled 64": {"gradient": "sampled", "samples": 64},
}
"""Arguments of the loss by name."""
GEMMS = "GEMMs"
PRIOR_FEATURES, FIRST_RANK, TRAINED_STD = 8, 10, 4.0
BLOCK = 1024
"""Tokens whose targets are drawn together."""


@dataclass(frozen=True)
class Row:
    """One implementation at one shape; times are medians of interleaved runs."""

    implementation: str
    median_ms: float
    quartiles_ms: tuple[float, float]
    ratio_to_gemms: float
    peak_mib: float | None = None
    """Peak memory in MiB beyond the inputs and the gradients."""
    predicted_mib: float | None = None
    """The plan's prediction of `peak_mib`."""
    dx_error: float | None = None
    """Of one draw from the exact gradient, relative, in the Euclidean norm; so is the next."""
    dw_error: float | None = None


@click.command("sampled")
@shape_options
@repeats_option
@click.pass_obj
def command(output: Output, /, repeats: int | None, **sizes: Any) -> None:
    """Sampled gradients of random and trained-like inputs, beside exact ones."""
    name, shapes = chosen_shapes("sampled", SHAPES[DEVICE], sizes)
    measurements = [
        Measurement(
            {**sizes_of(s), "data": data},
            functools.partial(run, s, DEVICE, repeats, data),
        )
        for s in shapes
        for data in DATA
    ]
    output.record(name, measurements)


def run(shape: Shape, device: str, repeats: int | None, data: str) -> list[Row]:
    """Measure every implementation on inputs of a kind."""
    h, w, y = inputs(shape, device, data)
    losses = {name: cutefce_loss(**options) for name, options in IMPLEMENTATIONS.items()}
    calls: dict[str, Call] = {GEMMS: plain_gemms(h, w, y)}
    for name, loss in losses.items():
        calls[name] = functools.partial(gradients, loss, h, w, y)
    want = gradients(losses["exact max"], h, w, y)
    errors = {name: relative_errors(gradients(losses[name], h, w, y), want) for name in losses}
    del want
    times = interleaved(calls, device, repeats, before=preceding_gemms(device))
    rows, leaves = [], (h.detach().requires_grad_(), w.detach().requires_grad_())
    for name, time in times.items():
        ratio = time.median_ms / times[GEMMS].median_ms
        row = name, time.median_ms, time.quartiles_ms, ratio
        if name == GEMMS:
            rows.append(Row(*row))
            continue
        peak = (peak_bytes(calls[name], device) - h.nbytes - w.nbytes) / 2**20
        plan = cutefce.plan(*leaves, **IMPLEMENTATIONS[name])
        rows.append(Row(*row, peak, plan.workspace_bytes / 2**20, *errors[name][1:]))
    return rows


def inputs(shape: Shape, device: str, data: str) -> tuple[Tensor, Tensor, Tensor]:
    """Return h (N, D), w (V, D) and y (N,) of a kind."""
    if data == "random":
        return random_inputs(shape, device)
    h, w, _ = random_inputs(shape, device, TRAINED_STD)
    frequency = 1.0 / (torch.arange(shape.vocab, device=device) + FIRST_RANK)
    frequency /= frequency.sum()
    h[:, :PRIOR_FEATURES] = 1
    w[:, :PRIOR_FEATURES] = (frequency.log() / PRIOR_FEATURES).to(w.dtype)[:, None]
    return h, w, torch.cat([_drawn_targets(block, w) for block in h.split(BLOCK)])


def _drawn_targets(h: Tensor, w: Tensor) -> Tensor:
    """Return a target (N,) drawn from each token's softmax."""
    return torch.multinomial((h @ w.T).float().softmax(dim=-1), 1).squeeze(1)
