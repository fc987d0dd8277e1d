"""What a divergence asks for beside its two heads, as a record of the operators' arguments."""

import math
from dataclasses import dataclass

from torch import Tensor

from cutefce.ops.interface.arguments import LossOptions, Sharding, TensorOptions
from cutefce.ops.interface.checks import (
    BOOLS,
    INTEGER,
    NUMBER,
    NUMBER_OR_NONE,
    STRING,
    TENSOR_OR_NONE,
)
from cutefce.ops.schema import OperatorRecord, argument

SIDES = "student", "teacher"
"""The first words of names of arguments and of buffers."""
STUDENT, TEACHER = 0, 1
"""Indices of the sides."""
FIRST = {"forward_kl": TEACHER, "reverse_kl": STUDENT}
"""The side whose probabilities a KL divergence averages over."""


@dataclass(frozen=True)
class Divergence(OperatorRecord):
    """What a call asks for beside its tensors and its group."""

    divergence: str = argument(STRING)
    """One of `DIVERGENCES`; a JSD whose beta is 0 or 1 is one of the others by now."""
    beta: float = argument(NUMBER)
    """β, the teacher's share of the JSD's mixture; unread of the others."""
    reduction: str = argument(STRING)
    """"mean", "sum" or "none"."""
    ignore_index: int = argument(INTEGER)
    """Tokens with this target do not count."""
    workspace: int = argument(INTEGER)
    """Bytes that the call may take beyond inputs and gradients."""
    student_logit_scale: float = argument(NUMBER)
    teacher_logit_scale: float = argument(NUMBER)
    """a: factors of the products of hidden states and weight."""
    student_softcap: float | None = argument(NUMBER_OR_NONE)
    teacher_softcap: float | None = argument(NUMBER_OR_NONE)
    """c: bounds of the logits, c tanh(x / c); None for none."""
    trained: list[bool] = argument(BOOLS)
    """Whether hidden states, weight and bias of the student, then of the teacher, require grad."""
    student_bias: Tensor | None = argument(TENSOR_OR_NONE, None)
    teacher_bias: Tensor | None = argument(TENSOR_OR_NONE, None)
    """(V,) addends of the logits, before the softcap."""
    student_temperature: Tensor | None = argument(TENSOR_OR_NONE, None)
    teacher_temperature: Tensor | None = argument(TENSOR_OR_NONE, None)
    """() or (N,) divisors of the logits, after the softcap."""
    denominator: Tensor | None = argument(TENSOR_OR_NONE, None)
    """() divisor of "mean"; None for the number of tokens that count."""

    @property
    def is_scalar(self) -> bool:
        """Whether the loss is a scalar, so that every token's has one upstream gradient."""
        return self.reduction != "none"

    @property
    def is_mixture(self) -> bool:
        """Whether it is of both sides from their mixture."""
        return self.divergence == "jsd"

    @property
    def first(self) -> int | None:
        """The side whose probabilities a KL averages over; None if each side has a statistic."""
        return FIRST.get(self.divergence)

    def share(self, index: int) -> float:
        """Return a side's share in the JSD's mixture, the factor 1/2 of tv's derivative, or 1."""
        if not self.is_mixture:
            return 0.5 if self.divergence == "tv" else 1.0
        return self.beta if index == TEACHER else 1 - self.beta

    def values(self, stats: Tensor) -> Tensor:
        """Return the divergences (M,) of the statistics (7, M) of a divergence's passes."""
        of_student, of_teacher, variation = stats[-3], stats[-2], stats[-1]
        if self.divergence == "tv":
            return variation
        if self.is_mixture:
            return (1 - self.beta) * of_student + self.beta * of_teacher
        return of_teacher if self.first == TEACHER else of_student

    def boost(self, index: int) -> float:
        """Return the power of 2 that a side's factors in float16 are multiplied by.

        Those of a JSD are at most twice the share of the side times the share's logarithm; those of
        total variation, 1/4 at most, are below this for 1/2.  Those that hold a difference of
        logits are not bounded, and the others are 1 at most.
        """
        if self.first is None:
            share = self.share(index)
            return 2.0 ** (12 - math.ceil(math.log2(max(-share * math.log(share), 2.0**-10))))
        return 2.0**4 if index == self.first else 2.0**12

    @property
    def scales_rows(self) -> bool:
        """Whether tokens differ in the factors of their gradients."""
        given = self.student_temperature, self.teacher_temperature
        return not self.is_scalar or any(x is not None and x.ndim > 0 for x in given)

    def of_logits(self, index: int) -> tuple[LossOptions, TensorOptions]:
        """Return the logit options of the student (0) or the teacher (1)."""
        side, names = SIDES[index], ("logit_scale", "softcap", "bias", "temperature")
        scale, softcap, bias, temperature = (getattr(self, f"{side}_{name}") for name in names)
        own = LossOptions(logit_scale=scale, softcap=softcap)
        return own, TensorOptions(bias, temperature=temperature)

    def gradients(self, index: int) -> tuple[bool, bool, bool]:
        """Return which gradients of the student (0) or the teacher (1) are computed."""
        hidden, weight, bias = self.trained[3 * index : 3 * index + 3]
        return hidden, weight, bias

    @property
    def trained_sides(self) -> list[int]:
        """The sides that have gradients."""
        return [i for i in (STUDENT, TEACHER) if any(self.gradients(i))]


OPERANDS = 5
"""Operators' first arguments: hidden states and weight of the student, of the teacher; target."""
RECORDS = Divergence, Sharding
"""The others, in their order."""
