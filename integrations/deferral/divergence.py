"""The divergence of a student's and a teacher's deferred logits, without the logits."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cutefce.integrations.deferral.head_call import is_here
from cutefce.integrations.deferral.logits import DeferredLogits
from cutefce.integrations.deferral.loss import Transform, transform_of
from cutefce.ops.divergence.api import linear_divergence


class Side(NamedTuple):
    """Deferred logits of a model, and what their steps make of the head's products."""

    logits: DeferredLogits
    transform: Transform

    def operands(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return hidden states, weight and bias, detached if the logits have no gradients."""
        w, b = self.logits.of_classes(weight), self.logits.of_classes(bias)
        w, b = w.to(hidden.dtype), self.transform.bias(b)
        if self.logits.call.grad:
            return hidden, w, b
        return hidden.detach(), w.detach(), b if b is None else b.detach()


def sides_of(name: str, *given: DeferredLogits, reason: str = "") -> list[Side] | None:
    """Return deferred logits with what their steps make of products, for the function `name`.

    None if it needs logits, which is counted: for `reason`, if that is given, or another one.  Of
    several, the first may have gradients.
    """
    found = ((x, transform_of(x.steps)) for x in given)
    sides = [Side(x, transform) for x, transform in found if transform is not None]
    obstacle = _obstacle(given) or reason or "steps before it" * (len(sides) < len(given))
    if not obstacle:
        return sides
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
    sides = sides_of("linear_divergence", student, teacher)
    if sides is None:
        return None
    own, other = sides
    of_own, of_other = (side.transform.options() for side in sides)
    pairs: Any = {name: (x, of_other[name]) for name, x in of_own.items()}

    def fused(*given: Any) -> Tensor:
        def of_both(*others: Any) -> Tensor:
            h_s, w_s, b_s = own.operands(*given)
            h_t, w_t, b_t = other.operands(*others)
            loss: Tensor = linear_divergence(
                h_s,
                w_s,
                h_t,
                w_t,
                target,
                student_bias=b_s,
                teacher_bias=b_t,
                **pairs,
                **options,
            )
            return loss

        return teacher.call.evaluate(of_both, teacher.states, teacher.memory)

    loss = student.call.evaluate(fused, student.states, student.memory)
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
