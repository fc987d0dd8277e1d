"""What lowering must know of those who will run the steps: how many bytes, and in which blocks."""

from typing import Protocol

from cutefce.ops.program.problem import Problem
from cutefce.ops.program.steps import Step


class Backend(Protocol):
    """A table of functions that run steps, seen from its needs of memory."""

    @property
    def block(self) -> int:
        """Columns of which windows of classes are multiples."""

    @property
    def places_values(self) -> bool:
        """Whether places, logits and factors of tokens have buffers, not tensors of their own."""

    def partial_sums(self, p: Problem, rows: int, columns: int) -> int:
        """Return how many numbers PROJECT writes for a row, of so many rows and columns."""

    def few_low_bits(self, p: Problem) -> int:
        """Return the bits beside the larger piece of a sum that is rounded once."""

    def listed_targets(self, p: Problem) -> int:
        """Return the bytes that LIST_TARGETS writes."""

    def scratch(self, p: Problem, step: Step) -> int:
        """Return the bytes that a step takes while it runs, beside its buffers."""
