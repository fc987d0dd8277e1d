"""The tokens that count: those whose target is not ignored and whose weight is not 0.

All steps between `RowSelection.take` and `RowSelection.restore` see these tokens first, in their
order; on a CPU no others.  A GPU without kernels of ours computes products of them and few others.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from cutefce.cute_kernels.integers import ceil_div, round_up
from cutefce.ops.interface.arguments import TensorOptions

ROW_BLOCK = 128
"""Rows of which those of products are a multiple."""


@dataclass(frozen=True)
class CountedRows:
    """How many tokens count, of an order in which they come first.

    A GPU knows it first.  The host waits for it as late as it can.
    """

    count: Tensor
    """(1,) int32 on the device of the tokens."""
    copied: Tensor
    """(1,) int32 that the host can read, after `event`."""
    event: "torch.cuda.Event | None"
    first: int = 0
    """The first token of a chunk, from which on rows are numbered."""

    @staticmethod
    def of(is_counted: Tensor) -> "CountedRows":
        """Return how many tokens count; `is_counted` (N,) says which do."""
        count = is_counted.sum(0, keepdim=True, dtype=torch.int32)
        if not count.is_cuda:
            return CountedRows(count, count, None)
        copied, event = torch.empty(1, dtype=torch.int32, pin_memory=True), torch.cuda.Event()
        copied.copy_(count, non_blocking=True)
        event.record()
        return CountedRows(count, copied, event)

    def behind(self, first: int) -> "CountedRows":
        """Return the same of the tokens from `first` on."""
        return replace(self, first=self.first + first)

    def of_products(self, rows: int) -> int:
        """Return how many of so many rows products need: a multiple of `ROW_BLOCK`, or all.

        It waits until the GPU has counted.  In the capture of a graph it need not: the GPU has
        counted before.
        """
        if self.event is not None and not torch.cuda.is_current_stream_capturing():
            self.event.synchronize()
        needed = round_up(max(int(self.copied) - self.first, 1), ROW_BLOCK)
        return min(needed, rows)


@dataclass(frozen=True)
class RowSelection:
    """The order of tokens in which those that count come first."""

    order: Tensor
    """(M,) int64: the tokens that count; on a GPU then the others, M = N."""
    targets: Tensor
    """(M,) int64: their targets."""
    counts: Tensor | None
    """(C,) int32: how many tokens of each chunk of that order count, if kernels select.

    It is on the GPU, which is not synchronized."""
    chunk: int
    """Tokens of a chunk."""
    tokens: int
    """N"""
    arch: str | None = None
    """Architecture of the kernels that leave out the other tokens."""
    may_skip: bool = False
    """Whether launches write nothing where no token counts, instead of a row block of zeros."""
    must_skip: bool = False
    """Whether, for this reason, products must be kernels' and not cuBLAS's."""
    counted: CountedRows | None = None
    """How many count, where M does not tell and no kernels leave out the others."""

    @property
    def is_on_device(self) -> bool:
        """Whether only the GPU knows how many tokens count, and kernels leave out the others."""
        return self.arch is not None

    @property
    def count(self) -> Tensor:
        """(1,) int32: how many tokens count, if it is on the device."""
        assert self.counts is not None
        counts = self.counts
        return counts if counts.shape[0] == 1 else counts.sum(0, keepdim=True, dtype=counts.dtype)

    def skipping(self) -> "RowSelection":
        """Return the same for launches of which nothing is read where no token counts."""
        return replace(self, may_skip=True)

    def take(self, x: Tensor) -> Tensor:
        """Return the elements x (..., M) of the tokens, of x (..., N)."""
        return x.index_select(-1, self.order)

    def take_options(self, tensors: TensorOptions) -> TensorOptions:
        """Return options with the values of the tokens, but for soft targets."""
        given = {name: getattr(tensors, name) for name in tensors.OF_TOKENS}
        taken = {name: self.take(x) for name, x in given.items() if x is not None and x.ndim}
        return replace(tensors, **taken) if taken else tensors

    def take_soft_targets(self, tensors: TensorOptions) -> TensorOptions:
        """Return options with the soft targets of the tokens."""
        soft = {name: x.index_select(0, self.order) for name, x in tensors.soft_targets.items()}
        return replace(tensors, **soft)

    def restore(self, x: Tensor, dim: int = -1) -> Tensor:
        """Return x, whose dimension `dim` is M, in the order of all tokens; 0 of those left out."""
        is_complete = self.tokens == self.order.shape[0]
        if is_complete and dim == 0:  # long rows are gathered faster than they are scattered
            places = torch.empty_like(self.order)
            places[self.order] = torch.arange(self.tokens, device=x.device)
            return x.index_select(0, places)
        shape = [*x.shape]
        shape[dim] = self.tokens
        result = x.new_empty(shape) if is_complete else x.new_zeros(shape)
        return result.index_copy_(dim, self.order, x)

    def rows(self, rows: slice) -> "RowSelection":
        """Return the selection of one chunk or several, `rows` of the order."""
        index, offset = divmod(rows.start, self.chunk)
        assert self.counts is not None and not offset, "whole chunks, of kernels"
        counts = self.counts[index : ceil_div(rows.stop, self.chunk)]
        if counts.shape[0] > 1:
            counts = counts.sum(0, keepdim=True, dtype=counts.dtype)
        own = self.order[rows], self.targets[rows]
        return replace(self, order=own[0], targets=own[1], counts=counts)
