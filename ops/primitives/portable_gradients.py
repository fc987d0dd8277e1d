"""From exponentials to dX and dW in plain torch: the two GEMMs and what is done to their results.

The symbols are those of `portable_projection`.  `CutePrimitives` and `CublasPrimitives` launch
kernels for the same functions.  These GEMMs run over all rows that they are given, whatever the
selection.  They accumulate in the dtype of sums; the targets' part of dW is added in a fixed order.
"""

from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import torch
from torch import Tensor

from cutefce.cute_kernels.config import PortableTiles
from cutefce.ops.dtypes import sum_dtype
from cutefce.ops.primitives.block_sizes import finished_rows, soft_block_rows
from cutefce.ops.primitives.elementwise import (
    can_fuse,
    combine_,
    fused,
    scale_by_log_,
)
from cutefce.ops.primitives.products import matmul_into
from cutefce.ops.primitives.select_rows import row_range
from cutefce.ops.rows.blocks import blocks, row_block_size
from cutefce.ops.rows.coefficients import RankOne, RowCoefficients
from cutefce.ops.rows.packed_sums import Sums
from cutefce.ops.rows.scaling import Scaling, scaling_of
from cutefce.ops.rows.selection import CountedRows, RowSelection
from cutefce.ops.rows.statistics import RowStats
from cutefce.ops.rows.target_rows import TargetRows
from cutefce.ops.rows.targets import Targets

TargetGrad: TypeAlias = Any


class PortableGradients:
    """The steps of the backward; `TargetGrad` is the targets' part of dW in one class' form."""

    lists_targets = False
    """Whether a `target_grad` of all tokens takes little memory: lists of the tokens of each class,
    not sums of their terms.  The last chunk then adds those of all chunks."""

    counted: CountedRows | None = None
    """How many rows count, where products are of these alone."""
    tiles: PortableTiles
    """Of which a window has as many columns as there are rows of dW whose sums exist at a time."""

    def scaling(
        self,
        dtype: torch.dtype,
        targets: Targets,
        stats: RowStats,
        upstream: Tensor,
        *,
        in_reference: bool,
    ) -> Scaling:
        """Return where tokens' factors are applied; see `rows.scaling.scaling_of`."""
        return scaling_of(dtype, targets, stats, upstream, in_reference=in_reference)

    def combine(
        self,
        out: Sums,
        x: Tensor | None = None,
        *,
        joined: Sums | None = None,
        scale: Tensor | None = None,
        table: Tensor | None = None,
        index: Tensor | None = None,
        coefficient: Tensor | None = None,
        rank_one: RankOne | None = None,
        last: Tensor | None = None,
    ) -> None:
        """Write ((x_r + joined_r) scale_r + b_r table_index_r + rank_one_r) last to `out` (R, D).

        All rows are rounded once.  More than eight parameters: the parts of a sum, of which most
        calls have few.

        Args:
            out: of any dtype, or packed sums.
            x: (R, D) of any dtype, may be `out`.
            joined: packed sums, which may be, or begin in, `out` of 16 bits.
            scale: (R,) in the dtype of sums.
            table: (L, D) of any dtype.
            index: (R,) int64 in [0, L).
            coefficient: (R,) in the dtype of sums: b, None for 1.  With one, a row is 0 whose
                scale, coefficient and factor are, whatever x and the table hold.
            rank_one: (R, D), beside a table.
            last: () in the dtype of sums, beside a table.
        """
        to, low = out
        packed = packed_low = factor = row = None
        if joined is not None:
            packed_low, is_same = joined.low, joined.upper is to
            to = Sums(to, packed_low if low is None else low).words
            packed = to if is_same else joined.words
        elif low is not None:
            to = out.words
        if rank_one is not None:
            factor, row = rank_one.factor, rank_one.row[None]
        rows = low, x, packed, packed_low, scale, index, coefficient, factor
        apply_rowwise(combine_, to, *rows, whole=(table, row, last))

    def add_hidden(
        self,
        sums: Sums,
        exps: Tensor,
        w: Tensor,
        *,
        accumulate: bool,
        in_windows: bool = False,
        selection: RowSelection | None = None,
    ) -> None:
        """Write `exps` (N, K) @ w (K, D) to `sums` (N, D), or add it if `accumulate`.

        `in_windows` says that these are some columns of a step, whose products kernels add without
        cuBLAS.  With `selection`, rows of tokens that do not count are undefined.
        """
        exps = row_range(exps, 0, self.rows_of_products(exps))
        if sums.low is None:
            matmul_into(row_range(sums.upper, 0, len(exps)), exps, w, accumulate=accumulate)
            return
        size = finished_rows(w.shape[1], sum_dtype(w.dtype).itemsize, w.device.type)
        for _, own, product in self.products(sums, exps, w, size):
            self.combine(own, product, joined=own if accumulate else None)

    def rows_of_products(self, exps: Tensor) -> int:
        """Return how many of the first rows of `exps` (N, K) are operands of products."""
        return len(exps) if self.counted is None else self.counted.of_products(len(exps))

    def products(
        self, out: Sums, a: Tensor, b: Tensor, size: int
    ) -> Iterator[tuple[slice, Sums, Tensor]]:
        """Yield `size` rows of a (M, K) at a time: which, those of `out` (M, D), and of a @ b.

        A product has the dtype of sums.  If `out` has it, too, that is where it is: a compiled
        function sees that one tensor is given twice, but not that two tensors share memory.
        """
        dtype = sum_dtype(a.dtype)
        in_place = out.upper.dtype == dtype
        buffer = b.new_empty(0 if in_place else min(size, len(out.upper)), b.shape[1], dtype=dtype)
        for rows in blocks(len(a), size):
            own = out.rows(rows)
            product = own.upper if in_place else buffer[: rows.stop - rows.start]
            matmul_into(product, a[rows], b, accumulate=False)
            yield rows, own, product

    def scale_rows(self, out: Tensor, x: Tensor, scale: Tensor) -> None:
        """Write scale_i x_i to `out` (M, D), rounded once; `out` may be `x`."""
        self.combine(Sums(out), x, scale=scale)

    def scale_packed_rows(self, sums: Sums, scale: Tensor) -> None:
        """Multiply the packed sums (N, D) by `scale` (N,)."""
        self.combine(sums, joined=sums, scale=scale)

    def finish_dx(
        self,
        out: Sums,
        sums: Sums,
        w: Tensor,
        targets: Targets,
        coefficients: RowCoefficients,
        rank_one: RankOne | None = None,
        order: Tensor | None = None,
    ) -> None:
        """Write scale_i sums_i + target_i W_y to `out` (N, D), rounded once; sums may be there.

        With `order` (N,), that is row order_i of `out`.  If packed sums are there, too, they are in
        the places that it says; others must not be.  `rank_one` (N, D) is added.  A row whose
        coefficients and factor are all 0 is 0, whatever `sums` and w hold.
        """
        assert order is None, "these steps run over all rows that they are given"
        self.combine(
            out,
            sums.upper if sums.low is None else None,
            joined=None if sums.low is None else sums,
            scale=coefficients.scale,
            table=w,
            index=targets.safe_index,
            coefficient=coefficients.target,
            rank_one=rank_one,
        )

    def pack_sums(
        self,
        packed: Sums,
        sums: Tensor,
        w: Tensor,
        targets: Targets,
        stats: RowStats,
        order: Tensor | None = None,
    ) -> None:
        """Pack sums_i - S_i W_y (N, D); may overwrite `sums`.

        It is 0 for ignored tokens.  With `order`, that of row i is row order_i.
        """
        coefficients = RowCoefficients.of_sums(stats, targets)
        self.finish_dx(packed, Sums(sums), w, targets, coefficients, order=order)

    def target_grad(self, h: Tensor, coefficient: Tensor | None, targets: Targets) -> TargetGrad:
        """Return Σ_{i: y_i = v} c_i h_i for all v; `coefficient` is c (N,).

        None stands for 0: exponentials contain the targets' terms.
        """
        if coefficient is None:
            none = h.new_empty(0, dtype=sum_dtype(h.dtype))
            return TargetRows(h[:0], targets.index[:0], none, targets.vocab)
        return TargetRows(h, targets.safe_index, coefficient, targets.vocab)

    def add_weight(
        self,
        out: Sums,
        exps: Tensor,
        scaled: Tensor,
        target_grad: TargetGrad,
        first: int,
        *,
        grad_scale: Tensor | None = None,
        rank_one: RankOne | None = None,
        selection: RowSelection | None = None,
        accumulate: bool = False,
    ) -> None:
        """Write expsᵀ @ scaled + target_grad + rank_one (K, D) to `out`, or add if `accumulate`.

        `exps` (N, K) are the columns from `first` on.  With `selection`, tokens that do not count
        add nothing.  `out` are sums; with `grad_scale` (), that is multiplied by it, and rounded
        once, and `out` has any dtype.  More than eight parameters: operands, and what is added.
        """
        counted = self.rows_of_products(exps)
        columns, scaled = row_range(exps, 0, counted).t(), row_range(scaled, 0, counted)
        if out.low is None and grad_scale is None:
            matmul_into(out.upper, columns, scaled, accumulate=accumulate)
            target_grad.add_to(out.upper, first)
            if rank_one is not None:
                out.upper.addr_(rank_one.factor, rank_one.row)
            return
        totals, slots = target_grad.totals(first, first + len(columns))
        for rows, own, sums in self.products(out, columns, scaled, self.tiles.window):
            more: Any = {"joined": own if accumulate else None, "last": grad_scale}
            more["rank_one"] = rank_one and rank_one.rows(rows)
            self.combine(own, sums, table=totals, index=slots[rows], **more)
            del more  # freed before the next product

    def finish_packed_dw(self, sums: Sums, factor: Tensor) -> None:
        """Write `factor` () times the packed sums of dW (V, D), rounded once, to their `upper`."""
        self.combine(Sums(sums.upper), joined=sums, scale=factor.expand(len(sums.upper)))


def scale_rows(x: Tensor, scale: Tensor) -> None:
    """Multiply each row of `x` (M, D) by its `scale` (M,)."""
    apply_rowwise(combine_, x, None, x, None, None, scale, *[None] * 3, whole=(None,) * 3)


def scale_by_log(exps: Tensor, a: Tensor, b: Tensor) -> None:
    """Multiply exponentials e (N, K) by a_i + b_i log e_iv, with a and b (N,); 0 stays 0."""
    apply_rowwise(scale_by_log_, exps, a, b)


def apply_rowwise(
    function: Callable[..., None],
    out: Tensor,
    *rowwise: Tensor | None,
    whole: tuple[Tensor | None, ...] = (),
    gathered: int = 0,
) -> None:
    """Call `function` fused, or on blocks of the rows of all but `whole`.

    A row takes as many elements as the first matrix has columns, or as many as it `gathered`.
    """
    if can_fuse(out):
        fused(function)(out, *rowwise, *whole)
        return
    operands = out, *rowwise
    if gathered:
        size = soft_block_rows(gathered, out.element_size(), out.device.type)
    else:
        size = row_block_size(next(x for x in operands if x is not None and x.ndim == 2))
    for rows in blocks(len(out), size):
        function(*(None if x is None else x[rows] for x in operands), *whole)
