"""Unsloth: its fused cross entropy, log-probabilities and JSD, of SFT and of its RL trainers.

import unsloth
import cutefce.integrations.unsloth

cutefce.integrations.unsloth.enable()  # before the training

Unsloth's own function still runs for what cutefce does not have: heads that are not plain tensors,
such as quantized ones, or not in 16 bits or float32; a softcap with label smoothing, with mean
logits, or with the gradient of an entropy; a teacher on another device.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from cutefce.integrations.options import loss_options, workspace_options
from cutefce.integrations.support import hooks
from cutefce.ops.divergence.api import linear_divergence
from cutefce.ops.interface.api import linear_cross_entropy
from cutefce.ops.interface.log_probs import linear_log_probs

TESTED = "unsloth-zoo 2026.10.9"
MODULE = "unsloth_zoo.fused_losses.fused_linear"
DTYPES = torch.bfloat16, torch.float16, torch.float32
IGNORED = -100


def enable() -> None:
    """Replace Unsloth's three functions of hidden states and the weight of the head.

    Its trainers for DPO, KTO and GKD, which `import unsloth` generates, hold two of them by names
    of their own; these are replaced too.

    Raises:
        ImportError: if Unsloth is not installed, or not imported before.
        RuntimeError: if a function of Unsloth has other parameters.
    """
    for function, unused in UNUSED.items():
        path = f"{MODULE}:{function.__name__}"
        hooks.replace(path, function, tested=TESTED, importers="unsloth", unused=unused)


def fused_linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    *,
    divisor: Tensor | float,
    ignore_index: int = IGNORED,
    logit_scale_multiply: float = 0.0,
    logit_scale_divide: float = 0.0,
    logit_softcapping: float = 0.0,
    label_smoothing: float = 0.0,
    logits_bias: Tensor | None = None,
) -> Tensor:
    """Return the sum of the losses over `divisor`, () in float32.

    More than eight parameters: they are Unsloth's.

    Args:
        hidden: (..., D) hidden states.
        weight: (V, D).
        bias: (V,) or None, added before the scale.
        targets: (...) class indices, or `ignore_index`.
        divisor: a number or a tensor of one element; 0 counts as 1.
        ignore_index: target of a token that does not count.
        logit_scale_multiply: factor of the logits, 0 for none.
        logit_scale_divide: their divisor, 0 for none.
        logit_softcapping: their bound, 0 for none.
        label_smoothing: share of the target's probability that all classes get.
        logits_bias: a constant with V elements that is added to the bias.
    """
    if label_smoothing and logit_softcapping:
        raise hooks.NotServedError
    _check(weight)
    scale = _scale(logit_scale_multiply, logit_scale_divide)
    h, w, offset = _operands(hidden, weight, bias, scale)
    if logits_bias is not None:
        constant = logits_bias.detach().to(w.device, torch.float32).reshape(-1) * scale
        offset = constant if offset is None else offset + constant
    loss: Tensor = linear_cross_entropy(
        h,
        w,
        targets.reshape(-1).to(w.device),
        linear_bias=offset,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing or 0.0,
        logit_scale=scale,
        softcap=logit_softcapping or None,
        denominator=_divisor(divisor, w),
        **loss_options(),
    )
    return loss


def fused_linear_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    temperature: float = 1.0,
    logit_scale_multiply: float = 0.0,
    logit_scale_divide: float = 0.0,
    logit_softcapping: float = 0.0,
    return_entropy: bool = False,
    return_mean_logits: bool = False,
    return_log_sum_sq_probs: bool = False,
    return_is_top1: bool = False,
    entropy_requires_grad: bool | None = True,
) -> Any:
    """Return log-probabilities (...), or a tuple of them and of the values asked for, as (...).

    More than eight parameters: they are Unsloth's.

    Args:
        hidden: (..., D) hidden states.
        weight: (V, D).
        targets: (...) class indices; a token whose target is outside [0, V) has values 0.
        bias: (V,) or None, added before the scale.
        mask: (...) not 0 where a token counts; None if all do.
        temperature: divisor of the logits, but for their mean.
        logit_scale_multiply: as of `fused_linear_cross_entropy`, and so are the next two.
        logit_scale_divide: the same.
        logit_softcapping: the same.
        return_entropy: whether to return entropies, in nats.
        return_mean_logits: the same of Σ_v x_v / V.
        return_log_sum_sq_probs: the same of log Σ_v p_v².
        return_is_top1: the same of whether no logit is above the target's.
        entropy_requires_grad: False if the entropies need no gradient.
    """
    is_lazy = entropy_requires_grad is None
    needs_entropy = return_entropy and (is_lazy or bool(entropy_requires_grad))
    if logit_softcapping and (return_mean_logits or (needs_entropy and torch.is_grad_enabled())):
        raise hooks.NotServedError
    _check(weight)
    scale = _scale(logit_scale_multiply, logit_scale_divide)
    h, w, offset = _operands(hidden, weight, bias, scale)
    y = targets.reshape(-1).to(w.device)
    counts = (y >= 0) & (y < len(w))
    if mask is not None:
        counts = counts & (mask.reshape(-1).to(w.device) != 0)
    asked = {
        "entropy": return_entropy,
        "mean_logit": return_mean_logits,
        "sum_p_squared": return_log_sum_sq_probs,
        "is_top1": return_is_top1,
    }
    found: Any = linear_log_probs(
        h,
        w,
        y.where(counts, IGNORED),
        outputs=[name for name, is_asked in asked.items() if is_asked],
        linear_bias=offset,
        logit_scale=scale,
        softcap=logit_softcapping or None,
        temperature=temperature,
        **loss_options(),
    )
    values = [found.log_probs]
    if return_entropy:
        values.append(found.entropy if needs_entropy else found.entropy.detach())
    if return_mean_logits:
        values.append(found.mean_logit * temperature)
    if return_log_sum_sq_probs:
        values.append(found.sum_p_squared.where(counts, 1).log())
    if return_is_top1:
        values.append(found.is_top1)
    values = [x.reshape(targets.shape).to(hidden.device) for x in values]
    return values[0] if len(values) == 1 else (*values,)


def fused_linear_jsd(
    student_hidden: Tensor,
    student_weight: Tensor,
    teacher_hidden: Tensor,
    teacher_weight: Tensor,
    *,
    mask: Tensor | None = None,
    labels: Tensor | None = None,
    ignore_index: int = IGNORED,
    beta: float = 0.5,
    temperature: float = 1.0,
    student_bias: Tensor | None = None,
    teacher_bias: Tensor | None = None,
    student_logit_scale: float = 1.0,
    student_logit_softcapping: float = 0.0,
    teacher_logit_scale: float = 1.0,
    teacher_logit_softcapping: float = 0.0,
    num_items_in_batch: Tensor | float | None = None,
) -> Tensor:
    """Return the mean divergence of a student from a frozen teacher, () in float32.

    More than eight parameters: they are Unsloth's.

    Args:
        student_hidden: (..., D_s) hidden states.
        student_weight: (V, D_s).
        teacher_hidden: (..., D_t) of the same tokens.
        teacher_weight: (V, D_t).
        mask: (...) not 0 where a token counts; None if all do.
        labels: (...) `ignore_index` where a token does not count, either; None if all do.
        ignore_index: that label.
        beta: the teacher's share of the mixture; 0 is the forward KL, 1 the reverse KL.
        temperature: divisor of the logits of both.
        student_bias: (V,) or None, added before the scale.
        teacher_bias: the same.
        student_logit_scale: factor of the logits, 0 for none.
        student_logit_softcapping: their bound, 0 for none.
        teacher_logit_scale: the same.
        teacher_logit_softcapping: the same.
        num_items_in_batch: divisor of the sum, None for the number of tokens that count.
    """
    _check(student_weight, teacher_weight)
    scales = student_logit_scale or 1.0, teacher_logit_scale or 1.0
    h, w, offset = _operands(student_hidden, student_weight, student_bias, scales[0])
    with torch.no_grad():
        teacher_rows, _, teacher_offset = _operands(
            teacher_hidden.detach(), teacher_weight, teacher_bias, scales[1]
        )
    counts = torch.ones(len(h), dtype=torch.bool, device=w.device)
    for given, ignored in ((mask, 0), (labels, ignore_index)):
        if given is not None:
            counts = counts & (given.reshape(-1).to(w.device) != ignored)
    divisor = None if num_items_in_batch is None else _divisor(num_items_in_batch, w)
    loss: Tensor = linear_divergence(
        h,
        w,
        teacher_rows,
        teacher_weight.detach(),
        counts,
        divergence="jsd",
        beta=beta,
        student_bias=offset,
        teacher_bias=teacher_offset,
        logit_scale=scales,
        softcap=(student_logit_softcapping or None, teacher_logit_softcapping or None),
        temperature=temperature,
        denominator=divisor,
        **workspace_options(),
    )
    return loss


def _scale(multiply: float | None, divide: float | None) -> float:
    """Return the factor of the logits."""
    return (multiply or 1.0) / (divide or 1.0)


def _divisor(given: Tensor | float, weight: Tensor) -> Tensor:
    """Return the divisor () of a sum of losses, 1 for one of 0, on the weight's device."""
    divisor = torch.as_tensor(given, device=weight.device).reshape(-1)[0]
    return divisor.where(divisor != 0, 1)


def _check(*weights: Tensor) -> None:
    """Raise NotServedError unless these are plain tensors in a dtype of DTYPES on one device."""
    for weight in weights:
        is_plain = type(weight) in (Tensor, nn.Parameter) and not hasattr(weight, "ds_id")
        if not is_plain or weight.dtype not in DTYPES or weight.device != weights[0].device:
            raise hooks.NotServedError


def _operands(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, scale: float
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return hidden states (N, D), the weight and the scaled bias, as Unsloth takes them."""
    rows = hidden.reshape(-1, hidden.shape[-1]).to(weight.device)
    if not torch.is_autocast_enabled(weight.device.type):
        rows = rows.to(weight.dtype)
    if bias is not None:
        bias = bias.reshape(-1).to(weight.device, torch.float32) * scale
    return rows, weight, bias


UNUSED: dict[Callable[..., Any], list[str]] = {
    fused_linear_cross_entropy: ["scaling", "fp32_head_grad", "rows_per_chunk"],
    fused_linear_logprobs: ["rows_per_chunk", "max_rows_per_chunk"],
    fused_linear_jsd: ["scaling", "rows_per_chunk"],
}
"""Functions, and parameters of Unsloth's that change no result.

Memory is planned, sums are float32, and gradients are multiplied by what `backward` gets, as of a
GradScaler, before they are rounded to 16 bits.
"""
