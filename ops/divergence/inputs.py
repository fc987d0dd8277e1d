"""What the steps of a divergence compute with: two sides, and buffers as matrices."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from cutefce.ops.divergence.options import STUDENT, TEACHER, Divergence
from cutefce.ops.divergence.plan import DivergencePlan
from cutefce.ops.divergence.row_kernel import RowKernel
from cutefce.ops.divergence.sides import Side
from cutefce.ops.divergence.steps import side_of
from cutefce.ops.dtypes import sum_dtype
from cutefce.ops.parallel.shard import VocabShard
from cutefce.ops.program.run import Interpreter
from cutefce.ops.rows.selection import RowSelection


@dataclass(frozen=True)
class DivergenceInputs:
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
    def shares(self) -> list[tuple[Tensor | None, Tensor | None]]:
        """() the shares of each side and of the other in a mixture; None for what is none.

        That of total variation is the factor of its derivative.
        """
        if self.options.first is not None:
            return [(None, None)] * 2
        shares = (self.options.share(i) for i in (STUDENT, TEACHER))
        student, teacher = (self.h.new_full((), share, dtype=self.dtype) for share in shares)
        if not self.options.is_mixture:
            return [(student, None), (teacher, None)]
        return [(student, teacher), (teacher, student)]

    @cached_property
    def row_kernel(self) -> RowKernel | None:
        """What makes whole rows of logits into statistics and factors; None for steps of torch."""
        return RowKernel.of(self.sides, self.options, self.scales)


Call = Interpreter[DivergenceInputs]


def matrix(call: Call, name: str, rows: int | None = None, columns: int | None = None) -> Tensor:
    """Return a buffer as a matrix, or its beginning as one of other sizes, which is contiguous."""
    b, h = call.program.buffers[name], call.inputs.sides[side_of(name)].h
    dtype = h.dtype if b.item == h.itemsize else call.inputs.dtype
    shape = b.rows if rows is None else rows, b.columns if columns is None else columns
    end = b.offset + shape[0] * shape[1] * b.item
    assert b.home is not None and end <= b.end
    memory = call.memory[b.home].view(-1).view(torch.uint8)
    return memory[b.offset : end].view(dtype).view(shape)
