"""Every causal LM of transformers with deferred logits, against its own loss."""

import functools
import logging
import math
from dataclasses import dataclass
from typing import Any

import click
import torch
from torch import Tensor, nn

import cutefce
from bench.harness.cli import Output
from bench.harness.records import Measurement
from bench.harness.tiny_models import batch, build, tiny_config

FLOOR = 1e-3
"""Added to a parameter's largest gradient: that of the bias of keys, say, is 0 but for rounding."""


@dataclass(frozen=True)
class Row:
    """One model type, tiny, in float32, with its own loss of one batch."""

    outcome: str
    """"fused", "fell back", "refused" by `defer`, or "not run" where the model itself could not be
    built or run."""
    reason: str
    """What made the logits, or the error of `defer` or of the model."""
    loss: float | None = None
    loss_error: float | None = None
    """Relative difference between the deferred and the plain loss."""
    gradient_error: float | None = None
    """Largest difference of a parameter's gradients, relative to its largest one + `FLOOR`."""


@click.command("causal-lms")
@click.pass_obj
def command(output: Output, /) -> None:
    """All causal LMs of transformers with deferred logits, against their own loss."""
    measurements = [
        Measurement({"model_type": name}, functools.partial(run, name)) for name in model_types()
    ]
    output.record("causal_lms", measurements)


def model_types() -> list[str]:
    """Return the types that transformers has a causal-LM class for."""
    from transformers.models.auto import modeling_auto

    return sorted(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def summary(error: Exception) -> str:
    """Return the type and the beginning of an error, in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"


def run(model_type: str) -> list[Row]:
    """Compare loss and gradients of a model with and without deferred logits."""
    from transformers.utils import logging as their_logging

    logging.captureWarnings(True)
    their_logging.set_verbosity_error()
    try:
        model = build(tiny_config(model_type)).train()
        loss, gradients = step(model)
    except Exception as error:  # of the configuration, which is not what is measured
        return [Row("not run", summary(error))]
    try:
        cutefce.defer(model)
    except TypeError as error:
        return [Row("refused", summary(error))]
    deferred_loss, deferred_gradients = step(model)
    report = cutefce.deferral_report(model)
    is_fused = report.fused > 0 and not report.fallbacks
    return [
        Row(
            "fused" if is_fused else "fell back",
            ", ".join(report.fallbacks),
            loss.item(),
            ((deferred_loss - loss).abs() / loss.abs()).item(),
            gradient_error(deferred_gradients, gradients),
        )
    ]


def step(model: nn.Module) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss of one batch and its gradients by the parameters' names."""
    torch.manual_seed(0)
    model.zero_grad()
    loss: Any = model(**batch()).loss
    loss.backward()
    named = model.named_parameters()
    return loss.detach(), {name: p.grad for name, p in named if p.grad is not None}


def gradient_error(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """Return `Row.gradient_error`, infinite if other parameters have gradients."""
    if ours.keys() != theirs.keys():
        return math.inf
    pairs = [(ours[name] - gradient, gradient) for name, gradient in theirs.items()]
    return max(largest(error) / (largest(gradient) + FLOOR) for error, gradient in pairs)


def largest(x: Tensor) -> float:
    """Return the largest absolute value of x."""
    return x.abs().max().item()
