"""Errors of loss and gradients against float64: cutefce's and the unfused loss's.

Over vocabulary, deviation of the logits, and placement of the targets; relative to the norm of the
float64 result.
"""

import functools
from collections.abc import Iterator
from dataclasses import dataclass

import click
import torch
from torch import Tensor

from bench.harness.accuracy import relative_errors
from bench.harness.cli import DEVICE, Output
from bench.harness.problems import Loss, Shape, cutefce_loss, random_inputs
from bench.harness.records import Measurement
from bench.harness.reference import Gradients, float64_reference, unfused

TOKENS, HIDDEN = 256, 64
VOCABS = {"cpu": (1024, 8192), "cuda": (1024, 50257, 262144)}
SCALES = (1e-3, 1e-1, 1.0, 10.0, 1e2, 1e3)
"""Standard deviations of the logits."""
DTYPES = ("float32", "bfloat16")
LOSSES: tuple[Loss, Loss] = (
    cutefce_loss(reduction="none"),
    functools.partial(unfused, reduction="none"),
)


@dataclass(frozen=True)
class Row:
    """Relative errors of one quantity of one case."""

    logit_std: float
    targets: str
    dtype: str
    quantity: str
    cutefce: float
    unfused: float


@click.command("stability")
@click.pass_obj
def command(output: Output, /) -> None:
    """Errors against float64 over vocabularies, scales of logits and placements of targets."""
    measurements = [
        Measurement({"vocab": vocab}, functools.partial(run, vocab, DEVICE))
        for vocab in VOCABS[DEVICE]
    ]
    output.record("stability", measurements)


def run(vocab: int, device: str) -> list[Row]:
    """Evaluate every case of one vocabulary; per-token losses, random upstream gradients."""
    rows = []
    for scale in SCALES:
        for dtype in DTYPES:
            torch.manual_seed(0)
            h, w, y = random_inputs(Shape(TOKENS, HIDDEN, vocab, dtype), device, scale)
            upstream = torch.randn(TOKENS, device=device)
            for placement, targets in _placements(h, w, y):
                want = float64_reference(h, w, targets, upstream)
                errors = [
                    relative_errors(_evaluate(loss, h, w, targets, upstream), want)
                    for loss in LOSSES
                ]
                names = "loss", "dx", "dw"
                for name, *of_both in zip(names, *errors, strict=True):
                    rows.append(Row(scale, placement, dtype, name, *of_both))
    return rows


def _placements(h: Tensor, w: Tensor, y: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield targets (N,) and what they are called."""
    vocab, tokens = len(w), len(y)
    logits = h.float() @ w.float().t()
    yield "random", y
    yield "same for every token", torch.full_like(y, vocab // 2)
    yield "all different", torch.arange(tokens, device=y.device) * (vocab // tokens)
    yield "argmax of the logits", logits.argmax(1)
    yield "argmin of the logits", logits.argmin(1)


def _evaluate(loss: Loss, h: Tensor, w: Tensor, y: Tensor, upstream: Tensor) -> Gradients:
    """Return the losses (N,), dX and dW for the upstream gradients (N,) of the losses."""
    h, w = h.detach().requires_grad_(), w.detach().requires_grad_()
    losses = loss(h, w, y)
    dx, dw = torch.autograd.grad(losses, (h, w), upstream)
    return losses.detach(), dx, dw
