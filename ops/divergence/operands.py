"""What the steps of a divergence compute with: two sides, and buffers as matrices."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from cutefce.ops.divergence.options import STUDENT, Divergence
from cutefce.ops.divergence.plan import DivergencePlan
from cutefce.ops.divergence.row_kernel import RowKernel
from cutefce.ops.divergence.sides import Side
from cutefce.ops.dtypes import sum_dtype
from cutefce.ops.parallel.shard import VocabShard
from cutefce.ops.program.run import Interpreter
from cutefce.ops.rows.selection import RowSelection


@dataclass(frozen=True)
class Operands:
    """A divergence of two sides, as planned."""

    sides: Sequence[Side]
    """Student and teacher."""
    options: Divergence
    plan: DivergencePlan
    shard: VocabShard
    loss_scale: Tensor | None
    """() the factor of each token's divergence in a reduced one; None for one of each token."""
    selection: RowSelection | None
    """Which tokens these are; None for all."""

    @property
    def h(self) -> Tensor:
        """The student's hidden states."""
        return self.sides[STUDENT].h

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of sums."""
        return sum_dtype(self.h.dtype)

    @cached_property
    def scales(self) -> list[Tensor | None]:
        """() what the factors of each side are multiplied by before they are rounded."""
        return [side.factor_scale(self.loss_scale) for side in self.sides]

    @cached_property
    def row_kernel(self) -> RowKernel | None:
        """What makes whole rows of logits into statistics and factors; None for steps of torch."""
        return RowKernel.of(self.sides, self.options, self.scales)


Call = Interpreter[Operands]


def matrix(call: Call, name: str, dtype: torch.dtype, rows: int, columns: int) -> Tensor:
    """Return the beginning of a buffer as a matrix (rows, columns), which is contiguous."""
    b = call.program.buffers[name]
    assert b.home is not None and rows * columns * dtype.itemsize <= b.size
    memory = call.memory[b.home].view(-1).view(torch.uint8)
    last = b.offset + rows * columns * dtype.itemsize
    return memory[b.offset : last].view(dtype).view(rows, columns)
