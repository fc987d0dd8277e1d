"""TRL: the losses of `DistillationTrainer` and `GKDTrainer`, from `linear_divergence`."""

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from cutefce.integrations.deferral.divergence import divergence_of
from cutefce.integrations.support import hooks
from cutefce.ops.divergence.api import linear_divergence
from cutefce.ops.interface.log_probs import linear_log_probs

PATH = "trl.trainer.distillation_trainer:_chunked_divergence_loss"
GKD_PATH = "trl.experimental.gkd.gkd_trainer:GKDTrainer.generalized_jsd_loss"


def divergence_loss(
    student_hidden_states: Tensor,
    teacher_hidden_states: Tensor,
    student_lm_head_weight: Tensor,
    teacher_lm_head_weight: Tensor,
    completion_mask: Tensor,
    beta: float,
    num_items_in_batch: Tensor | float | None = None,
    student_lm_head_bias: Tensor | None = None,
    teacher_lm_head_bias: Tensor | None = None,
    student_logit_scale: float = 1.0,
    teacher_logit_scale: float = 1.0,
    student_final_logit_softcapping: float | None = None,
    teacher_final_logit_softcapping: float | None = None,
    temperature: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the loss (), the sum () of the student's entropies and the number () of tokens.

    More than eight parameters: they are TRL's, whose own function still serves weights that ZeRO-3
    partitions.

    Args:
        student_hidden_states: (B, T, D_s).
        teacher_hidden_states: (B, T, D_t).
        student_lm_head_weight: (V, D_s), plain or a DTensor.
        teacher_lm_head_weight: (V, D_t), the same.
        completion_mask: (B, T), not 0 where a token counts.
        beta: the teacher's share of the mixture; 0 is the forward KL, 1 the reverse KL.
        num_items_in_batch: divisor of the sum, None for the number of tokens that count.
        student_lm_head_bias: (V,) or None.
        teacher_lm_head_bias: the same.
        student_logit_scale: factor of the products and of the bias.
        teacher_logit_scale: the same.
        student_final_logit_softcapping: bound of the logits, or None.
        teacher_final_logit_softcapping: the same.
        temperature: divisor of the logits of both.
    """
    states = student_hidden_states, teacher_hidden_states
    weights = student_lm_head_weight, teacher_lm_head_weight
    biases = student_lm_head_bias, teacher_lm_head_bias
    scales = student_logit_scale, teacher_logit_scale
    caps = student_final_logit_softcapping, teacher_final_logit_softcapping
    if any(hasattr(w, "ds_id") for w in weights):
        raise hooks.NotServedError
    student, teacher = zip(states, weights, biases, scales, strict=True)
    h, w, bias = _operands(*student)
    with torch.no_grad():
        teacher_operands = _operands(*teacher)
    counts = completion_mask != 0
    loss = linear_divergence(
        h,
        w,
        *teacher_operands[:2],
        counts,
        divergence="jsd",
        beta=beta,
        student_bias=bias,
        teacher_bias=teacher_operands[2],
        logit_scale=scales,
        softcap=caps,
        temperature=temperature,
        denominator=num_items_in_batch,
    )
    with torch.no_grad():
        entropy = linear_log_probs(
            h,
            w,
            counts.long() - 1,
            outputs=("entropy",),
            linear_bias=bias,
            logit_scale=scales[0],
            softcap=caps[0],
            temperature=temperature,
            ignore_index=-1,
        ).entropy
    assert entropy is not None
    return loss, entropy.sum(), counts.sum()


def _operands(
    h: Tensor, w: Tensor, bias: Tensor | None, scale: float
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return hidden states, whole weight and scaled bias, as TRL takes them."""
    w = w.full_tensor() if isinstance(w, DTensor) else w
    bias = bias.full_tensor() if isinstance(bias, DTensor) else bias
    if not torch.is_autocast_enabled(h.device.type):
        w = w.to(h.dtype)
    return h, w, None if bias is None else bias * scale


def generalized_jsd_loss(
    student_logits: Any,
    teacher_logits: Any,
    labels: Tensor | None = None,
    beta: float = 0.5,
    temperature: float = 1.0,
    reduction: str = "batchmean",
    num_items_in_batch: Tensor | float | None = None,
) -> Tensor:
    """Return the loss () of deferred logits (B, T, V), of the tokens whose label is not -100.

    The parameters are TRL's, whose own function serves logits that are not deferred on both sides,
    and other reductions than "batchmean" and "sum".
    """
    options: dict[str, Any] = {"reduction": "mean", "denominator": num_items_in_batch}
    if num_items_in_batch is None and reduction == "sum":
        options = {"reduction": "sum"}
    is_served = num_items_in_batch is not None or reduction == "sum"
    if is_served or (reduction == "batchmean" and labels is not None):
        given = {"divergence": "jsd", "beta": beta, "temperature": temperature, **options}
        loss = divergence_of(student_logits, teacher_logits, labels, **given)
        if loss is not None:
            return loss
    raise hooks.NotServedError
