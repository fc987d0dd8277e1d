"""`torch.nn.functional.cross_entropy` of deferred logits, as the fused call where it can be."""

import math
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from cutefce.integrations.gradients import fitting
from cutefce.ops.interface.api import linear_cross_entropy
from cutefce.ops.interface.checks import REDUCTIONS
from cutefce.ops.operators.context import is_autocasting, is_mixed

if TYPE_CHECKING:
    from cutefce.integrations.deferral.logits import DeferredLogits
    from cutefce.integrations.deferral.record import Step


class Transform(NamedTuple):
    """The logits of steps: scale * products, or cap * tanh(scale * products / cap)."""

    scale: float
    cap: float | None


def transform_of(steps: "tuple[Step, ...]") -> Transform | None:
    """Return what steps make of products, None if it is not served."""
    factor, divisor, cap = 1.0, 1.0, None
    for name, value in steps:
        if name == "tanh":
            if cap is not None:
                return None
            cap = 1.0
        elif name == "to":
            continue
        elif cap is not None:
            cap = cap * value if name == "mul" else cap / value
        elif name == "mul":
            factor *= value
        else:
            divisor *= value
    scale = (factor if cap is None else factor * cap) / divisor
    served = math.isfinite(scale) and scale != 0 and (cap is None or cap > 0)
    return Transform(scale, cap) if served else None


def cross_entropy(
    input: "DeferredLogits",
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """Return the loss of deferred logits, with the parameters, dtype and shape of torch's.

    Falls back to torch's function for what is not served.
    """
    obstacle = _obstacle(input, target, label_smoothing)
    deprecated = size_average is not None or reduce is not None
    if deprecated or reduction not in REDUCTIONS:
        obstacle = "cross_entropy: size_average, reduce or another reduction"
    if weight is not None and tuple(weight.shape) != (input.classes,):
        obstacle = "cross_entropy: another shape of weight"
    transform = transform_of(input.steps)
    if obstacle or transform is None:
        logits = input.tensor(obstacle or "cross_entropy: steps before it")
        return F.cross_entropy(
            logits,
            target,
            weight,
            size_average,
            ignore_index,
            reduce,
            reduction,
            label_smoothing,
        )
    scale, cap = transform

    def fused(hidden: Tensor, head_weight: Tensor, bias: Tensor | None) -> Tensor:
        w, b = input.of_classes(head_weight), input.of_classes(bias)
        if w.dtype != hidden.dtype and not is_mixed(hidden, w):
            w = w.to(hidden.dtype)
        loss: Tensor = linear_cross_entropy(
            hidden,
            w,
            target,
            linear_bias=b if b is None or scale == 1 else b * scale,
            weight=weight,
            reduction=reduction,
            ignore_index=ignore_index,
            label_smoothing=label_smoothing,
            logit_scale=scale,
            softcap=cap,
            **fitting(input.call.loss_options, hidden, w),
        )
        return loss

    hidden = input.hidden.movedim(input.class_dim, -1)
    loss = input.call.evaluate(fused, hidden, input.memory)
    input.call.note_fused()
    if reduction == "mean":  # of no tokens, it is 0 / 0 in torch
        loss = loss + torch.where((target != ignore_index).any(), 0.0, torch.nan)
    return loss.to(_dtype_of_loss(input))


def _obstacle(input: "DeferredLogits", target: Tensor, label_smoothing: float) -> str:
    """Return why the loss needs logits, "" if it does not."""
    if not input.is_deferred:
        return "cross_entropy: after the logits were made"
    if input.class_dim != min(input.ndim - 1, 1):
        return "cross_entropy: classes not in dimension 1"
    rows = [size for dim, size in enumerate(input.shape) if dim != input.class_dim]
    if not isinstance(target, Tensor) or target.dtype != torch.int64:
        return "cross_entropy: targets that are not int64 class indices"
    if list(target.shape) != rows or target.device != input.device:
        return "cross_entropy: targets of another shape or device"
    if input.dtype == torch.float64 != input.hidden.dtype:
        return "cross_entropy: logits cast to float64"
    if label_smoothing and any(name == "tanh" for name, _ in input.steps):
        return "cross_entropy: label_smoothing with softcap"
    return ""


def _dtype_of_loss(input: "DeferredLogits") -> torch.dtype:
    """Return the dtype of torch's loss: autocast computes losses in float32."""
    if is_autocasting(input.device.type) and input.dtype != torch.float64:
        return torch.float32
    return input.dtype
