"""Liger: `LigerFusedLinearJSDLoss`, the distillation of ms-swift's and TRL's trainers."""

from typing import Any

import torch
from torch import Tensor

from cutefce.integrations.gradients import loss_options
from cutefce.integrations.support import hooks
from cutefce.ops.divergence.api import linear_divergence
from cutefce.ops.interface.api import linear_cross_entropy

PATH = "liger_kernel.chunked_loss.jsd_loss:LigerFusedLinearJSDFunction.apply"


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
    compiled: bool = True,
    chunk_size: int = 1024,
    return_soft_hard_loss: bool = False,
) -> Any:
    """Return the loss (), or with `return_soft_hard_loss` also its parts () without gradients.

    More than eight parameters: they are Liger's, of which `compiled` and `chunk_size` change
    nothing.  Liger's own function serves a teacher of more classes.

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
        compiled: not used.
        chunk_size: not used.
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
