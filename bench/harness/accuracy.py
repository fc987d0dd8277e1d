"""Relative errors of losses and gradients."""

from torch import Tensor

from bench.harness.reference import Gradients

Errors = tuple[float, ...]
"""Relative errors of loss, dX and, unless the weight is frozen, dW, in the Euclidean norm."""


def relative_errors(got: tuple[Tensor, ...], want: Gradients) -> Errors:
    """Return the errors of loss, dX and, if `got` has it, dW."""
    return tuple(relative_error(a, b) for a, b in zip(got, want[: len(got)], strict=True))


def relative_error(got: Tensor, want: Tensor) -> float:
    """Return |got - want| / |want| in float64, or |got| where `want` is zero."""
    size = float(want.norm())
    distance = float((got.double() - want).norm())
    return distance / size if size else distance
