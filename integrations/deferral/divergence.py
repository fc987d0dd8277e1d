"""The divergence of a student's and a teacher's deferred logits, without the logits."""

from typing import Any

import torch
from torch import Tensor

from cutefce.integrations.deferral.head import is_whole
from cutefce.integrations.deferral.logits import DeferredLogits
from cutefce.integrations.deferral.loss import Transform, transform_of
from cutefce.ops.divergence.api import linear_divergence


def divergence_of(student: Any, teacher: Any, target: Tensor | None, **options: Any) -> Any:
    """Return `linear_divergence` of the logits (..., V) of both, None if it is not served.

    Args:
        student: what may be deferred logits; a teacher's that were made without gradients have
            none.
        teacher: the same, of the same tokens and classes.
        target: (...) as of `linear_divergence`.
        options: the arguments of `linear_divergence` that are not of a model.
    """
    sides = student, teacher
    if not all(isinstance(x, DeferredLogits) for x in sides):
        return None
    transforms = [transform_of(x.steps) for x in sides]
    obstacle = _obstacle(student, teacher, transforms)
    if obstacle:
        for x in sides:
            x.call.counts.add(obstacle)
        return None

    def fused(*operands: Tensor | None) -> Tensor:
        h_s, w_s, b_s, h_t, w_t, b_t = operands
        both = {"logit_scale": [x.scale for x in transforms], "softcap": [x.cap for x in transforms]}
        return linear_divergence(
            h_s, w_s, h_t, w_t, target, student_bias=b_s, teacher_bias=b_t, **both, **options
        )

    loss = student.call.evaluate(
        lambda *own: teacher.call.evaluate(
            lambda *others: fused(
                *_operands(student, transforms[0].scale, *own),
                *_operands(teacher, transforms[1].scale, *others),
            ),
            teacher.hidden,
        ),
        student.hidden,
    )
    for x in sides:
        x.call.counts.add()
    return loss


def _operands(
    logits: DeferredLogits, scale: float, hidden: Tensor, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return hidden states, weight and bias of one side, which only then require gradients."""
    w, b = logits.of_classes(weight), logits.of_classes(bias)
    w = w.to(hidden.dtype)
    b = b if b is None or scale == 1 else b * scale
    if logits.call.grad:
        return hidden, w, b
    return hidden.detach(), w.detach(), b if b is None else b.detach()


def _obstacle(
    student: DeferredLogits, teacher: DeferredLogits, transforms: list[Transform | None]
) -> str:
    """Return why the divergence needs logits, "" if it does not."""
    if None in transforms:
        return "linear_divergence: steps before it"
    if not torch.is_grad_enabled() and student.call.grad:
        return "linear_divergence: without gradients"
    if any(x.made is not None for x in (student, teacher)):
        return "linear_divergence: after the logits were made"
    if not all(is_whole(x.call.head) for x in (student, teacher)):
        return "linear_divergence: a weight that is not a whole, plain tensor"
    if any(x.class_dim != x.ndim - 1 for x in (student, teacher)):
        return "linear_divergence: classes not in the last dimension"
    if student.shape != teacher.shape or student.device != teacher.device:
        return "linear_divergence: logits of other shapes or devices"
    return ""
