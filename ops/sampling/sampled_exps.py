"""Exponentials of which few are not 0, as products on a CPU take them."""

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from cutefce.ops.primitives.portable_gradients import matmul_into
from cutefce.ops.rows.blocks import blocks, row_blocks
from cutefce.ops.sampling.sample_sizes import GATHERED_COLUMNS


@dataclass(frozen=True)
class SampledExps:
    """A matrix (N, K) of exponentials of which few are not 0: sampled ones, and whole rows.

    Products take it for a tensor.
    """

    tokens: Tensor
    """(E,) int64: rows of the entries, ascending."""
    columns: Tensor
    """(E,) int64: their columns."""
    values: Tensor
    """(E,) in the dtype of sums."""
    whole: Tensor
    """(F,) int64: rows that are done exactly."""
    exps: Tensor
    """(F, K): these rows."""
    is_transposed: bool = False

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of stored exponentials."""
        return self.exps.dtype

    def t(self) -> "SampledExps":
        """Return the transposed matrix."""
        return replace(self, is_transposed=not self.is_transposed)

    def __getitem__(self, index: tuple[slice, slice]) -> "SampledExps":
        """Return a slice of the columns; the first slice is that of all rows."""
        _, columns = index
        exps = self.exps[:, columns]
        if exps.shape == self.exps.shape:
            return self
        inside = (self.columns >= columns.start) & (self.columns < columns.stop)
        own = self.tokens[inside], self.columns[inside] - columns.start, self.values[inside]
        return SampledExps(*own, self.whole, exps)

    def multiply_into(self, out: Tensor, b: Tensor) -> None:
        """`out += self @ b`; sums have the dtype of `out`, and entries are added in their order."""
        rows, index, values = self.tokens, self.columns, self.values
        if self.is_transposed:
            rows, order = self.columns.sort(stable=True)
            index, values = self.tokens[order], values[order]
            del order
        starts = torch.searchsorted(rows, torch.arange(len(out)))
        for part in blocks(out.shape[1], GATHERED_COLUMNS):
            of = b[:, part].to(out.dtype).contiguous()
            out[:, part] += F.embedding_bag(
                index, of, starts, mode="sum", per_sample_weights=values
            )
            del of  # freed before the next ones are allocated
        if self.is_transposed and len(self.whole):
            own = b if len(self.whole) == len(b) else b[self.whole]
            matmul_into(out, self.exps.t(), own, accumulate=True)
        elif len(self.whole):
            for part in row_blocks(out.new_empty(()).expand(len(self.whole), out.shape[1])):
                products = out.new_empty(part.stop - part.start, out.shape[1])
                matmul_into(products, self.exps[part], b, accumulate=False)
                out.index_add_(0, self.whole[part], products)

    def weighted_sum(self, factor: Tensor) -> Tensor:
        """Return Σ_i factor_i e_i (K,) in the dtype of sums."""
        factor = factor.to(self.values.dtype)
        terms = self.values * factor[self.tokens]
        total = terms.new_zeros(self.exps.shape[1]).index_add_(0, self.columns, terms)
        return total + factor[self.whole] @ self.exps.to(factor.dtype)
