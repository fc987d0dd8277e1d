"""The divergence of a student's and a teacher's deferred logits, without the logits."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from cutefce.integrations.deferral.head_call import is_here
from cutefce.integrations.deferral.logits import DeferredLogits
from cutefce.integrations.deferral.loss import Transform, operands, transform_of
from cutefce.ops.divergence.api import linear_divergence


def transforms_of(name: str, *given: DeferredLogits, reason: str = "") -> list[Transform] | None:
    """Return what the steps of deferred logits make of products, for the function `name`.

    None if it needs logits, which is counted: for `reason`, if that is given, or another one.  Of
    several, the first may have gradients.
    """
    found = [transform_of(x.steps) for x in given]
    transforms = [x for x in found if x is not None]
    obstacle = _obstacle(given) or reason or "steps before it" * (None in found)
    if not obstacle:
        return transforms
    for x in given:
        x.call.counts.add(f"{name}: {obstacle}")
    return None


def divergence_of(
    student: Any, teacher: Any, target: Tensor | None, **options: Any
) -> Tensor | None:
    """Return `linear_divergence` of the logits (..., V) of both, None if it is not served.

    Args:
        student: what may be deferred logits.
        teacher: the same, of the same tokens and classes; without gradients if they were made so.
        target: (...) as of `linear_divergence`.
        options: the arguments of `linear_divergence` that are not of a model.
    """
    if not isinstance(student, DeferredLogits) or not isinstance(teacher, DeferredLogits):
        return None
    transforms = transforms_of("linear_divergence", student, teacher)
    if transforms is None:
        return None
    own, other = transforms
    of_other = other.options()
    pairs: Any = {name: (x, of_other[name]) for name, x in own.options().items()}

    def fused(*given: Any) -> Tensor:
        def of_both(*others: Any) -> Tensor:
            h_s, w_s, b_s = operands(student, own, *given)
            h_t, w_t, b_t = operands(teacher, other, *others)
            loss: Tensor = linear_divergence(
                h_s,
                w_s,
                h_t,
                w_t,
                target,
                student_bias=b_s,
                teacher_bias=b_t,
                workspace=student.call.loss_options["workspace"],
                **pairs,
                **options,
            )
            return loss

        return teacher.evaluate(of_both)

    loss = student.evaluate(fused)
    for x in (student, teacher):
        x.call.note_fused()
    return loss


def _obstacle(sides: Sequence[DeferredLogits]) -> str:
    """Return why a function of these needs logits, "" if it does not."""
    first, *others = sides
    if not first.is_deferred or not all(x.is_recorded for x in others):
        return "after the logits were made, or in another mode of gradients"
    if not all(is_here(x.call.head.weight) for x in sides):
        return "a weight that is not a whole, plain tensor"
    if any(x.class_dim != x.ndim - 1 for x in sides):
        return "classes not in the last dimension"
    devices = {x.device for x in sides} | {x.hidden.device for x in sides}
    if any(x.shape != first.shape for x in others) or len(devices) > 1:
        return "logits of other shapes or devices"
    if any(x.dtype == torch.float64 != x.call.dtype for x in sides):
        return "logits cast to float64"
    return ""
