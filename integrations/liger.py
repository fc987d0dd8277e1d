"""Liger: the loss of its patched forwards, and the JSD of ms-swift's and TRL's distillation.

The forwards are those of transformers, LLaMA-Factory, ms-swift and Axolotl.

import cutefce.integrations.liger

cutefce.integrations.liger.enable()  # then `use_liger_kernel=True` or `enable_liger_kernel`
"""

from typing import Any

import torch
from torch import Tensor

from cutefce.integrations.options import loss_options, workspace_options
from cutefce.integrations.support import hooks
from cutefce.ops.divergence.api import linear_divergence
from cutefce.ops.interface.api import linear_cross_entropy
from cutefce.ops.interface.arguments import check_arguments
from cutefce.ops.interface.log_probs import linear_log_probs

TESTED = "liger-kernel 0.8.5"
LOSS = "liger_kernel.transformers.functional:liger_fused_linear_cross_entropy"
JSD = "liger_kernel.chunked_loss.jsd_loss:LigerFusedLinearJSDFunction.apply"


def enable() -> None:
    """Replace the function of hidden states and weight that Liger's forwards call, and its JSD.

    Raises:
        ImportError: if Liger is not installed.
        RuntimeError: if a function of Liger has other parameters.
    """
    # sums are float32, and memory is planned
    unused = "accum_dtype", "chunk_mem_const"
    hooks.replace(LOSS, fused_linear_cross_entropy, tested=TESTED, unused=unused)
    hooks.replace(JSD, fused_linear_jsd, tested=TESTED, unused=("compiled", "chunk_size"))


def fused_linear_cross_entropy(
    input: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    ce_weight: Tensor | None = None,
    ignore_index: int = -100,
    lse_square_scale: float = 0.0,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
    softcap: float | None = None,
    return_z_loss: bool = False,
    use_token_scaling: bool = False,
    return_token_accuracy: bool = False,
    return_predicted_tokens: bool = False,
) -> Any:
    """Return the loss of input (N, D) and weight (V, D), or Liger's `CrossEntropyOutput` with it.

    More than eight parameters: they are Liger's, and mean what they mean there.

    Raises:
        NotImplementedError: for `use_token_scaling`, and for `label_smoothing` with accuracy,
            predicted tokens, a softcap, or class weights and a z-loss.
    """
    if use_token_scaling:
        raise NotImplementedError(
            "use_token_scaling: got True, which cutefce does not serve; expected False"
        )
    check_arguments({"reduction": reduction})
    outputs = ["lse"]
    outputs += ["is_top1"] if return_token_accuracy else []
    outputs += ["argmax"] if return_predicted_tokens else []
    is_active = target != ignore_index
    both: dict[str, Any] = {"linear_bias": bias, "softcap": softcap, "ignore_index": ignore_index}
    if len(outputs) == 1 and (ce_weight is None or not lse_square_scale):
        loss, lse = linear_cross_entropy(
            input,
            weight,
            target,
            weight=ce_weight,
            label_smoothing=label_smoothing,
            z_loss=lse_square_scale,
            reduction=reduction,
            return_lse=True,
            **both,
            **loss_options(),
        )
        assert lse is not None
        penalties = lse_square_scale * lse.square()
        is_top1 = argmax = None
    else:
        if label_smoothing:
            raise NotImplementedError(
                f"label_smoothing: got {label_smoothing} with token accuracy, predicted tokens, or "
                "class weights and a z-loss, which cutefce does not serve together; expected 0"
            )
        rows = linear_log_probs(input, weight, target, outputs=outputs, **both, **loss_options())
        factors = None if ce_weight is None else ce_weight[target.where(is_active, 0)]
        assert rows.lse is not None
        penalties = lse_square_scale * rows.lse.square()  # not times the class weights
        loss = _reduced(-rows.log_probs, is_active, reduction, factors)
        loss = loss + _reduced(penalties, is_active, reduction)
        is_top1, argmax = rows.is_top1, rows.argmax
    if not (return_z_loss or return_token_accuracy or return_predicted_tokens):
        return loss
    from liger_kernel.transformers.functional import CrossEntropyOutput

    z_loss = _reduced(penalties.detach(), is_active, reduction).to(input.dtype)
    accuracy = None if is_top1 is None else is_top1.float()
    if accuracy is not None and reduction != "none":
        accuracy = accuracy.sum() / is_active.sum()
    return CrossEntropyOutput(
        loss=loss,
        z_loss=z_loss if return_z_loss else None,
        token_accuracy=accuracy,
        predicted_tokens=None if argmax is None else argmax.where(is_active, -1),
    )


def _reduced(x: Tensor, is_active: Tensor, reduction: str, factors: Tensor | None = None) -> Tensor:
    """Return x (N,), 0 where a token is ignored, times `factors` (N,), or its sum or mean."""
    weighted = x if factors is None else x * factors
    if reduction == "none":
        return weighted
    if reduction == "sum":
        return weighted.sum()
    counts = is_active if factors is None else factors.where(is_active, 0)
    return weighted.sum() / counts.sum().where(is_active.any(), 1)


def fused_linear_jsd(
    student_input: Tensor,
    student_weight: Tensor,
    teacher_input: Tensor,
    teacher_weight: Tensor,
    true_labels: Tensor,
    student_bias: Tensor | None = None,
    teacher_bias: Tensor | None = None,
    weight_hard_loss: float = 0.5,
    weight_soft_loss: float = 0.5,
    beta: float = 0.5,
    ignore_index: int = -100,
    temperature: float = 1.0,
    return_soft_hard_loss: bool = False,
) -> Any:
    """Return the loss (), or with `return_soft_hard_loss` also its parts () without gradients.

    More than eight parameters: they are Liger's, whose own function serves a teacher of more
    classes.

    Args:
        student_input: (N, D_s) hidden states.
        student_weight: (V, D_s).
        teacher_input: (N, D_t) hidden states.
        teacher_weight: (V, D_t).
        true_labels: (N,) class indices, or `ignore_index`.
        student_bias: (V,) or None.
        teacher_bias: the same.
        weight_hard_loss: factor of the cross entropy, which has no temperature.
        weight_soft_loss: factor of the divergence.
        beta: the teacher's share of the mixture; 0 is the forward KL, 1 the reverse KL.
        ignore_index: label of a token that does not count.
        temperature: divisor of the logits of both sides in the divergence.
        return_soft_hard_loss: whether to return the divergence and the cross entropy too.
    """
    student = student_input, student_weight
    if len(student_weight) != len(teacher_weight):
        raise hooks.NotServedError
    soft = linear_divergence(
        *student,
        teacher_input.detach(),
        teacher_weight.detach(),
        true_labels,
        divergence="jsd",
        beta=beta,
        student_bias=student_bias,
        teacher_bias=None if teacher_bias is None else teacher_bias.detach(),
        temperature=temperature,
        ignore_index=ignore_index,
        **workspace_options(),
    )
    loss = weight_soft_loss * soft
    hard = torch.zeros_like(soft)
    if weight_hard_loss or return_soft_hard_loss:
        hard = linear_cross_entropy(
            *student,
            true_labels,
            linear_bias=student_bias,
            ignore_index=ignore_index,
            **loss_options(),
        )
        loss = loss + weight_hard_loss * hard
    return (loss, soft.detach(), hard.detach()) if return_soft_hard_loss else loss
