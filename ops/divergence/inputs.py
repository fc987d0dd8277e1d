"""What the steps of a divergence compute with: two sides, and buffers as matrices."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from cutefce.ops.divergence.options import STUDENT, TEACHER, Divergence
from cutefce.ops.divergence.plan import DivergencePlan
from cutefce.ops.divergence.steps import side_of
from cutefce.ops.dtypes import sum_dtype
from cutefce.ops.parallel.shard import VocabShard
from cutefce.ops.program.run import Interpreter
from cutefce.ops.rows.logit_map import LogitMap
from cutefce.ops.rows.scaling import largest_of
from cutefce.ops.rows.selection import RowSelection


@dataclass(frozen=True)
class Side:
    """The tokens that are computed, M of N, and the classes of this rank, of one side."""

    h: Tensor
    """(M, D) hidden states."""
    w: Tensor
    """(V, D)"""
    logits: LogitMap | None
    """From products to the model's logits; None for the identity."""
    boost: float = 1.0
    """Power of 2 that factors are multiplied by, for float16's range."""

    @property
    def cap(self) -> Tensor | None:
        """(M,) the bound of the logits; None without a softcap."""
        return None if self.logits is None else self.logits.cap

    def scales(self, scale: Tensor) -> tuple[Tensor, Tensor]:
        """Return () what gradients are multiplied by in the end, and () or (M,) what factors are.

        `scale`, () or (M,), is what multiplies divergences; the derivative of a softcap is left
        out.  What 16 bits may not hold is relative to the largest of the tokens: products in
        float16, and those of tokens that differ.
        """
        if self.logits is not None and self.logits.factor is not None:
            scale = scale * self.logits.factor
        if not scale.ndim and self.h.dtype != torch.float16:
            return torch.ones_like(scale), scale
        common = largest_of(scale)
        return common / self.boost, scale / common * self.boost


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
    upstream: Tensor | None
    """() the gradient of the reduced divergence, or (M,) those of each token's; None in a forward.
    """
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
    def scales(self) -> list[tuple[Tensor, Tensor]]:
        """Of each side () what its gradients are multiplied by in the end, and what factors are.

        The latter, () or (M,), are known before the backward where factors are kept.
        """
        upstream = None if self.upstream is None else self.upstream.to(self.dtype)
        given = upstream if self.loss_scale is None else self.loss_scale
        if given is None:
            given = self.h.new_ones((), dtype=self.dtype)
        scales = [side.scales(given) for side in self.sides]
        if upstream is None or self.loss_scale is None:
            return scales
        return [(common * upstream, own) for common, own in scales]

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
