"""The CuTe kernels as a backend: what their steps need of memory."""

from cutefce.cute_kernels.integers import ceil_div
from cutefce.cute_kernels.schedule.order import PARTIAL_BYTES
from cutefce.ops.planning.step_memory import few_low_bits
from cutefce.ops.program.problem import Problem
from cutefce.ops.program.steps import Step

NARROWEST_TILE = 128
"""Columns of the narrowest tile, each of which gives one partial sum at most."""


class KernelBackend:
    """`ops.program.backend.Backend` of the kernels of one GPU."""

    block = 256
    places_values = True

    def partial_sums(self, p: Problem, rows: int, columns: int) -> int:
        """Return one number for each tile of columns, or as many as fit into the second cache."""
        affordable = PARTIAL_BYTES // (p.sums * max(rows, 1))
        return max(1, min(ceil_div(columns, NARROWEST_TILE), affordable))

    def few_low_bits(self, p: Problem) -> int:
        """Return 4, or 8 where two columns of a byte would be of two rows."""
        return few_low_bits(p.hidden)

    def listed_targets(self, p: Problem) -> int:
        """Return the bytes of each token's place and coefficient, and of the classes' ends."""
        return 12 * p.tokens + 4 * p.vocab

    def scratch(self, p: Problem, step: Step) -> int:
        """Return 0: kernels compute in registers and shared memory."""
        return 0
