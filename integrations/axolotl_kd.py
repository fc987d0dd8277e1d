"""Axolotl: the loss of its `kd` plugin, from soft targets of the teacher's stored top k."""

import torch
from torch import Tensor
from torch.nn import functional as F

from cutefce.integrations.options import loss_options
from cutefce.integrations.support import hooks
from cutefce.ops.interface.api import linear_cross_entropy
from cutefce.ops.interface.soft_targets import MAX_CLASSES

PATH = "axolotl.integrations.kd.kernels.liger:LigerFusedLinearKLTopKLogprobFunction.apply"


def fused_linear_topk_kl(
    student_input: Tensor,
    student_lm_head_weight: Tensor,
    target_token_ids: Tensor,
    target_logprobs: Tensor,
    target_mask: Tensor,
    true_labels: Tensor,
    student_lm_head_bias: Tensor | None = None,
    weight_hard_loss: float = 0.5,
    weight_soft_loss: float = 0.5,
    ignore_index: int = -100,
    temperature: float = 1.0,
    beta: float = 0.0,
    compute_ce_loss: bool = True,
    normalize_topk: bool | None = True,
) -> Tensor:
    """Return the sum () of tokens' forward KL over stored classes, and of their cross entropy.

    More than eight parameters: they are Axolotl's, whose own function serves another `beta` than
    0, `normalize_topk`, and more classes than soft targets may have.  The divergence's value, not
    its gradient, is times the square of the temperature, as Axolotl has it.

    Args:
        student_input: (B, T, D) hidden states.
        student_lm_head_weight: (V, D).
        target_token_ids: (B, T, K) classes of the teacher, for the token's position.
        target_logprobs: (B, T, K) their log-probabilities.
        target_mask: (B, T, K), 0 where there is none.
        true_labels: (B, T) token ids of the same positions, which are shifted here.
        student_lm_head_bias: (V,) or None.
        weight_hard_loss: factor of the cross entropy, which has no temperature.
        weight_soft_loss: factor of the divergence.
        ignore_index: label of a token without cross entropy.
        temperature: divisor of the student's logits in the divergence.
        beta: 0, the forward KL.
        compute_ce_loss: whether there is a cross entropy.
        normalize_topk: whether the student's probabilities are normalized over the K classes.
    """
    operands = student_input, student_lm_head_weight
    if beta != 0 or normalize_topk or target_token_ids.shape[-1] > MAX_CLASSES:
        raise hooks.NotServedError
    options = {"linear_bias": student_lm_head_bias, "reduction": "sum", **loss_options()}
    loss = student_input.new_zeros((), dtype=torch.float32)
    if weight_soft_loss > 0:
        q = target_logprobs.float().exp().masked_fill(target_mask == 0, 0)
        soft = linear_cross_entropy(
            *operands,
            target_indices=target_token_ids,
            target_probs=q,
            temperature=temperature,
            **options,
        )
        soft = soft + torch.xlogy(q, q).sum()
        soft = soft + (temperature**2 - 1) * soft.detach()
        loss = loss + weight_soft_loss * soft
    if compute_ce_loss and weight_hard_loss > 0:
        labels = F.pad(true_labels, (0, 1), value=ignore_index)[:, 1:]
        hard = linear_cross_entropy(*operands, labels, ignore_index=ignore_index, **options)
        loss = loss + weight_hard_loss * hard
    return loss
