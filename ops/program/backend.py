"""What lowering asks of those who run its steps: their needs of memory."""

from typing import Protocol

from cutefce.ops.program.layout import Layout
from cutefce.ops.program.problem import Problem
from cutefce.ops.program.steps import Step


class Backend(Protocol):
    """Those who run steps, seen from their needs of memory."""

    @property
    def block(self) -> int:
        """Columns of which windows of classes are multiples."""

    @property
    def places_values(self) -> bool:
        """Whether places, logits, factors and partial sums have buffers, not their own tensors."""

    def partial_sums(self, p: Problem, rows: int, columns: int) -> int:
        """Return how many numbers PROJECT writes for a row, of so many rows and columns."""

    def few_low_bits(self, p: Problem) -> int:
        """Return the bits beside the larger piece of a sum that is rounded once."""

    def listed_targets(self, p: Problem, in_chunks: bool) -> int:
        """Return the bytes that LIST_TARGETS writes."""

    def scratch(self, p: Problem, x: Layout, step: Step) -> int:
        """Return the bytes that a step takes while it runs, beside its buffers."""
