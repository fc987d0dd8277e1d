"""From exponentials to dX and dW in plain torch: the two GEMMs and what is done to their results.

The symbols are those of `portable_projection`.  `CuteGradients` and `CublasGradients` launch
kernels for the same functions.  These GEMMs run over all rows that they are given, whatever the
selection.  They accumulate in the dtype of sums; the targets' part of dW is added in a fixed order.
"""

from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import torch
from torch import Tensor

from cutefce.ops.costs.step_memory import UPCAST_BLOCK, finished_rows
from cutefce.ops.dtypes import sum_dtype
from cutefce.ops.primitives.elementwise import (
    can_fuse,
    finish_dw_,
    finish_dx_,
    fused,
    scale_by_log_,
    scale_rows_to_,
)
from cutefce.ops.primitives.select_rows import row_range
from cutefce.ops.rows.blocks import blocks, row_blocks
from cutefce.ops.rows.coefficients import RankOne, RowCoefficients
from cutefce.ops.rows.kept_sums import (
    add_to_kept_,
    add_to_kept_dw_,
    joined_sums,
    keep_dw_,
    scale_kept_,
    scale_kept_rows_,
    split_,
    words_of,
)
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

    def __init__(self, window: int) -> None:
        self.window = window
        """Rows of dW whose sums exist at a time."""

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

    def add_grad_hidden(
        self,
        sums: Tensor,
        exps: Tensor,
        w: Tensor,
        *,
        accumulate: bool,
        in_windows: bool = False,
        selection: RowSelection | None = None,
        factor: Tensor | None = None,
    ) -> bool:
        """Write `exps` (N, K) @ w (K, D) to `sums` (N, D), or add it if `accumulate`.

        `in_windows` says that these are some columns of a step, whose products kernels add without
        cuBLAS.  With `selection`, rows of tokens that do not count are undefined.

        Return whether `exps` are multiplied by `factor` (N,) afterwards, as they are where the
        kernel of the product can do so.
        """
        rows = self.rows_of_products(exps)
        matmul_into(row_range(sums, 0, rows), row_range(exps, 0, rows), w, accumulate=accumulate)
        return False

    def keep_dx(
        self,
        kept: Tensor,
        low: Tensor,
        exps: Tensor,
        w: Tensor,
        *,
        accumulate: bool,
        selection: RowSelection | None = None,
    ) -> None:
        """Keep `exps` (N, K) @ w (K, D) in `kept` (N, D) and `low`, or add it if `accumulate`.

        These are as in `keep_sums`.  With `selection`, rows of tokens that do not count are
        undefined.
        """
        words, keep = words_of(kept, low), add_to_kept_ if accumulate else split_
        for rows, sums in self.hidden_products(kept, exps, w):
            apply_rowwise(keep, words[rows], low[rows], sums)

    def rows_of_products(self, exps: Tensor) -> int:
        """Return how many of the first rows of `exps` (N, K) are operands of products."""
        return len(exps) if self.counted is None else self.counted.of_products(len(exps))

    def hidden_products(
        self, kept: Tensor, exps: Tensor, w: Tensor
    ) -> Iterator[tuple[slice, Tensor]]:
        """Yield some rows of `kept` (N, D) at a time: which, and those of exps @ w as sums."""
        size, dtype = self.finished_rows(kept), sum_dtype(kept.dtype)
        buffer = kept.new_empty(min(size, len(kept)), kept.shape[1], dtype=dtype)
        for rows in blocks(self.rows_of_products(exps), size):
            product = buffer[: rows.stop - rows.start]
            matmul_into(product, exps[rows], w, accumulate=False)
            yield rows, product

    def finished_rows(self, kept: Tensor) -> int:
        """Return how many rows of sums exist at a time beside `kept` (N, D)."""
        sum_bytes = sum_dtype(kept.dtype).itemsize
        return finished_rows(kept.shape[1], sum_bytes, kept.device.type)

    def scale_kept_rows(self, kept: Tensor, low: Tensor, scale: Tensor) -> None:
        """Multiply the sums of `keep_dx` by `scale` (N,)."""
        apply_rowwise(scale_kept_rows_, words_of(kept, low), low, scale)

    def scale_rows(self, out: Tensor, x: Tensor, scale: Tensor) -> None:
        """Write scale_i x_i to `out` (M, D), rounded once; `out` may be `x`."""
        scale_rows(out, x, scale)

    def finish_dx(
        self,
        out: Tensor,
        sums: Tensor,
        w: Tensor,
        targets: Targets,
        coefficients: RowCoefficients,
        rank_one: RankOne | None = None,
        order: Tensor | None = None,
    ) -> None:
        """Write scale_i sums_i + target_i W_y to `out` (N, D), rounded once; may be `sums`.

        With `order` (N,), that is row order_i of `out`, which is not `sums` then.
        `rank_one` (N, D) is added.  A row whose coefficients and factor are all 0 is 0, whatever
        `sums` and w hold.
        """
        assert order is None, "these steps run over all rows that they are given"
        factor, row = _operands(rank_one)
        rows = out, sums, targets.safe_index, coefficients.scale, coefficients.target, factor
        apply_rowwise(finish_dx_, *rows, whole=(w, row))

    def keep_sums(
        self,
        kept: Tensor,
        low: Tensor,
        sums: Tensor,
        w: Tensor,
        targets: Targets,
        stats: RowStats,
        order: Tensor | None = None,
    ) -> None:
        """Keep sums_i - S_i W_y in `kept` (N, D) and `low`; may overwrite `sums`.

        It is 0 for ignored tokens.  `low` is (N, D) or (N, D / 2) uint8, see
        `rows.kept_sums.split_` for what is kept.  With `order`, that of row i is row
        order_i.
        """
        assert order is None, "these steps run over all rows that they are given"
        self.finish_dx(sums, sums, w, targets, RowCoefficients.of_sums(stats, targets))
        apply_rowwise(split_, words_of(kept, low), low, sums)

    def finish_kept(
        self,
        out: Tensor,
        kept: Tensor,
        low: Tensor,
        w: Tensor,
        targets: Targets,
        coefficients: RowCoefficients,
        rank_one: RankOne | None = None,
        order: Tensor | None = None,
    ) -> None:
        """Do what `finish_dx` does with the sums of `keep_sums` or `keep_dx`.

        `out` (N, D) may be `kept`: then the sums, too, are in the places that `order` says.
        """
        assert order is None, "these steps run over all rows that they are given"
        for rows in blocks(len(kept), self.finished_rows(kept)):
            sums, term = joined_sums(kept[rows], low[rows]), rank_one and rank_one.rows(rows)
            own = targets.per_token(rows), coefficients.rows(rows)
            self.finish_dx(out[rows], sums, w, *own, term)
            del sums  # freed before the next ones are allocated

    def target_grad(self, h: Tensor, coefficient: Tensor, targets: Targets) -> TargetGrad:
        """Return Σ_{i: y_i = v} c_i h_i for all v; `coefficient` is c (N,)."""
        return TargetRows(h, targets.safe_index, coefficient, targets.vocab)

    def no_target_grad(self, h: Tensor, targets: Targets) -> TargetGrad:
        """Return what `target_grad` returns for coefficients of 0.

        It is for exponentials that contain the targets' terms.
        """
        none = h.new_empty(0, dtype=sum_dtype(h.dtype))
        return TargetRows(h[:0], targets.index[:0], none, targets.vocab)

    def finish_dw(
        self,
        out: Tensor,
        exps: Tensor,
        scaled: Tensor,
        target_grad: TargetGrad,
        first: int,
        grad_scale: Tensor,
        rank_one: RankOne | None = None,
        selection: RowSelection | None = None,
    ) -> None:
        """Write (expsᵀ @ scaled + target_grad) * grad_scale to `out` (K, D), rounded once.

        `exps` (N, K) are the columns from `first` on; `grad_scale` is ().  `rank_one` (K, D) is
        added before the product with `grad_scale`.  With `selection`, tokens that do not count add
        nothing.
        """
        target_grad.prepare()
        factor, row = _operands(rank_one)
        for rows, to, sums in self.products(out, exps, scaled):
            totals, slot = target_grad.totals(first + rows.start, first + rows.stop)
            operands = to, sums, slot, None if factor is None else factor[rows]
            apply_rowwise(finish_dw_, *operands, whole=(totals, grad_scale, row))
            del totals, slot, operands  # freed before the next product

    def keep_dw(
        self,
        kept: Tensor,
        low: Tensor | None,
        exps: Tensor,
        scaled: Tensor,
        target_grad: TargetGrad,
        first: int,
        rank_one: RankOne | None = None,
        selection: RowSelection | None = None,
        *,
        accumulate: bool,
    ) -> None:
        """Keep what `finish_dw` rounds, of a `grad_scale` of 1, in `kept` (K, D) and `low`.

        It is added to what they hold if `accumulate`.  `low` is (K, D) or (K, D / 2) uint8, see
        `rows.kept_sums.split_` for what is kept; or None if `kept` has the dtype of sums.
        More than eight parameters: operands, and what the last step adds.
        """
        if low is None:
            self.add_product(kept, exps, scaled, accumulate=accumulate)
            target_grad.add_to(kept, first)
            if rank_one is not None:
                kept.addr_(rank_one.factor, rank_one.row)
            return
        target_grad.prepare()
        (factor, row), words = _operands(rank_one), words_of(kept, low)
        keep = add_to_kept_dw_ if accumulate else keep_dw_
        for rows, _, sums in self.products(kept, exps, scaled):
            totals, slot = target_grad.totals(first + rows.start, first + rows.stop)
            operands = sums, slot, None if factor is None else factor[rows]
            apply_rowwise(keep, words[rows], low[rows], *operands, whole=(totals, row))
            del totals, slot, operands

    def add_product(self, out: Tensor, exps: Tensor, scaled: Tensor, *, accumulate: bool) -> None:
        """Write expsᵀ @ scaled to `out` (K, D), of the dtype of sums, or add it."""
        rows = self.rows_of_products(exps)
        operands = row_range(exps, 0, rows).t(), row_range(scaled, 0, rows)
        matmul_into(out, *operands, accumulate=accumulate)

    def products(
        self, out: Tensor, exps: Tensor, scaled: Tensor
    ) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Yield some rows at a time: which, those of `out` (K, D), and of expsᵀ @ scaled.

        A product has the dtype of sums.  If `out` has it, too, the last two are one tensor: a
        compiled function sees that, but not that two tensors share memory.
        """
        dtype, size = sum_dtype(exps.dtype), min(self.window, len(out))
        in_place, counted = out.dtype == dtype, self.rows_of_products(exps)
        columns, scaled = row_range(exps, 0, counted).t(), row_range(scaled, 0, counted)
        buffer = out.new_empty(0 if in_place else size, out.shape[1], dtype=dtype)
        for rows in blocks(len(out), self.window):
            to = out[rows]
            product = to if in_place else buffer[: len(to)]
            matmul_into(product, columns[rows], scaled, accumulate=False)
            yield rows, to, product

    def finish_kept_dw(self, kept: Tensor, low: Tensor, factor: Tensor) -> None:
        """Write `factor` () times the sums of `keep_dw` to `kept` (V, D), rounded once."""
        apply_rowwise(scale_kept_, words_of(kept, low), low, factor.expand(len(kept)))


def _operands(rank_one: RankOne | None) -> tuple[Tensor | None, Tensor | None]:
    """Return factor (R,) and row (1, D) of `rank_one`; None for each without it."""
    return (None, None) if rank_one is None else (rank_one.factor, rank_one.row[None])


def scale_rows(out: Tensor, x: Tensor, scale: Tensor) -> None:
    """Write scale_i x_i to `out` (M, D), rounded once; `out` may be `x`."""
    apply_rowwise(scale_rows_to_, out, x, scale)


def scale_by_log(exps: Tensor, a: Tensor, b: Tensor) -> None:
    """Multiply exponentials e (N, K) by a_i + b_i log e_iv, with a and b (N,); 0 stays 0."""
    apply_rowwise(scale_by_log_, exps, a, b)


def matmul_into(out: Tensor, a: Tensor, b: Tensor, *, accumulate: bool) -> None:
    """`out = a @ b`, or `out += a @ b` if `accumulate`; sums have the dtype of `out`."""
    if a.dtype == out.dtype:
        torch.addmm(out, a, b, beta=int(accumulate), out=out)
    elif not a.is_cuda:
        _matmul_upcast(out if accumulate else out.zero_(), a, b)
    elif accumulate:
        torch.addmm(out, a, b, out_dtype=out.dtype, out=out)
    else:
        torch.mm(a, b, out_dtype=out.dtype, out=out)


def _matmul_upcast(out: Tensor, a: Tensor, b: Tensor) -> None:
    """`out += a @ b` by blocks converted to out's dtype: a CPU's 16-bit GEMM sums in 16 bits."""
    for rows in blocks(a.shape[0], UPCAST_BLOCK):
        for inner in blocks(a.shape[1], UPCAST_BLOCK):
            out[rows].addmm_(a[rows, inner].to(out.dtype), b[inner].to(out.dtype))


def apply_rowwise(
    function: Callable[..., None],
    out: Tensor,
    *rowwise: Tensor | None,
    whole: tuple[Tensor | None, ...] = (),
) -> None:
    """Call `function` fused, or on blocks of the rows of all but `whole`."""
    if can_fuse(out):
        fused(function)(out, *rowwise, *whole)
        return
    operands = out, *rowwise
    for rows in row_blocks(next(x for x in operands if x is not None and x.ndim == 2)):
        function(*(None if x is None else x[rows] for x in operands), *whole)
