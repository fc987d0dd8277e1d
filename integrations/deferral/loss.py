"""`torch.nn.functional.cross_entropy` of deferred logits, as the fused call where it can be."""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cutefce.integrations.deferral.record import LogitsRecord, Step
from cutefce.ops.interface.api import linear_cross_entropy
from cutefce.ops.interface.arguments import REDUCTIONS
from cutefce.ops.operators.context import is_autocasting, is_mixed


class Transform(NamedTuple):
    """The logits x of steps: x = scale * products + shift, or cap * tanh(x / cap)."""

    scale: float
    cap: float | None
    shift: Tensor | None
    """(V,) or None."""

    def options(self) -> dict[str, Any]:
        """Return scale and cap as arguments of `linear_cross_entropy`."""
        return {"logit_scale": self.scale, "softcap": self.cap}

    def bias(self, of_head: Tensor | None) -> Tensor | None:
        """Return what is added to scaled products: the shift, and the scaled bias of the head."""
        scaled = of_head if of_head is None or self.scale == 1 else of_head * self.scale
        given = [x for x in (scaled, self.shift) if x is not None]
        return sum(given[1:], given[0]) if given else None


def transform_of(steps: tuple[Step, ...]) -> Transform | None:
    """Return what steps make of products, None if it is not served."""
    factor, divisor, cap = 1.0, 1.0, None
    shift: Tensor | None = None
    for name, value in steps:
        if name == "to":
            continue
        if name == "tanh" and cap is None:
            cap = 1.0
        elif name in ("tanh", "add") and cap is not None:
            return None
        elif name == "add":
            shift = value if shift is None else shift + value
        elif cap is not None:
            cap = cap * value if name == "mul" else cap / value
        else:
            shift = None if shift is None else getattr(shift, name)(value)
            factor, divisor = (
                (factor * value, divisor) if name == "mul" else (factor, divisor * value)
            )
    scale = (factor if cap is None else factor * cap) / divisor
    if not math.isfinite(scale) or scale == 0 or (cap is not None and cap <= 0):
        return None
    return Transform(scale, cap, shift if shift is None or cap is None else shift * cap)


def operands(
    logits: LogitsRecord,
    transform: Transform,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    keeps_float32: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return hidden states, weight and bias of a fused call for logits, detached if these are.

    Args:
        logits: the logits.
        transform: what their steps make of products.
        hidden: (..., D), as `HeadCall.evaluate` gives it, and so are the next two.
        weight: (V, D).
        bias: (V,) or None.
        keeps_float32: whether the call serves a float32 weight beside 16-bit hidden states.
    """
    w, b = logits.of_classes(weight), transform.bias(logits.of_classes(bias))
    if not (keeps_float32 and is_mixed(hidden, w)):
        w = w.to(hidden.dtype)
    if logits.call.grad:
        return hidden, w, b
    return hidden.detach(), w.detach(), b if b is None else b.detach()


def cross_entropy(
    input: LogitsRecord,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor | None:
    """Return the loss of deferred logits, with the parameters, dtype and shape of torch's.

    None, with the logits made for the reason that is reported, for what is not served.
    """
    obstacle = _obstacle(input, target, label_smoothing)
    deprecated = size_average is not None or reduce is not None
    if deprecated or reduction not in REDUCTIONS or ignore_index is None:
        obstacle = "cross_entropy: size_average, reduce, another reduction or no ignore_index"
    if weight is not None and tuple(weight.shape) != (input.classes,):
        obstacle = "cross_entropy: another shape of weight"
    transform = transform_of(input.steps)
    if obstacle or transform is None:
        input.tensor(obstacle or "cross_entropy: steps before it")
        return None
    device = input.hidden.device

    def fused(*given: Any) -> Tensor:
        hidden, w, b = operands(input, transform, *given, keeps_float32=True)
        loss: Tensor = linear_cross_entropy(
            hidden,
            w,
            target.to(device),
            linear_bias=b,
            weight=None if weight is None else weight.to(device),
            reduction=reduction,
            ignore_index=ignore_index,
            label_smoothing=label_smoothing,
            **transform.options(),
            **input.call.loss_options,
        )
        return loss

    loss = input.evaluate(fused).to(input.device)
    input.call.note_fused()
    if reduction == "mean":  # of no tokens, it is 0 / 0 in torch
        loss = loss + torch.where((target != ignore_index).any(), 0.0, torch.nan)
    is_float32 = is_autocasting(input.device.type) and input.dtype != torch.float64
    return loss.to(torch.float32 if is_float32 else input.dtype)  # autocast computes losses in it


def _obstacle(input: LogitsRecord, target: Tensor, label_smoothing: float) -> str:
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
    if input.dtype == torch.float64 != input.call.dtype:
        return "cross_entropy: logits cast to float64"
    if label_smoothing and any(name == "tanh" for name, _ in input.steps):
        return "cross_entropy: label_smoothing with softcap"
    return ""
