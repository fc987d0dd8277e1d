"""The portable primitives: torch operations alone, on a CPU and on any GPU.

They are the reference that kernels are tested against.  They never wait for a GPU: where a row's
logits lie far above its target's, each tile of that row uses its own maximum as the reference
(Algorithm 1 of the paper, tile by tile), and the pieces are joined afterwards.  Every product
accumulates in float32, or float64 for float64 inputs.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from cutefce.cute_kernels.problem import TileConfig
from cutefce.ops.footprint import ROW_BLOCK_BYTES, WIDENED_BLOCK
from cutefce.ops.primitives import Partial, Stats, TargetRows, Targets, sum_dtype
from cutefce.ops.tile import (
    PADDING,
    can_fuse,
    exponentials_,
    fused,
    padded_exponentials,
    scale_tiles_,
)


class TorchPrimitives:
    """`cutefce.ops.primitives.Primitives` for any device."""

    def __init__(self, config: TileConfig) -> None:
        self.config = config

    def target_logit(self, h: Tensor, w: Tensor, targets: Targets) -> Tensor:
        logit = h.new_empty(h.shape[0], dtype=sum_dtype(h.dtype))
        for rows in _row_blocks(h):
            product = w[targets.address[rows]].to(logit.dtype).mul_(h[rows])
            torch.sum(product, 1, out=logit[rows])
        logit.masked_fill_(targets.address != targets.index, torch.nan)
        return logit.masked_fill_(~targets.active, torch.inf)

    def project_exp(
        self,
        h: Tensor,
        w: Tensor,
        window: tuple[int, int],
        reference: Tensor,
        target: Tensor,
        exps: Tensor | None = None,
    ) -> Partial:
        pieces = math.ceil((window[1] - window[0]) / self.config.tile)
        partial = Partial(*reference.new_empty((2, pieces, h.shape[0])))
        self._walk_tiles(h, w, window, reference, target, exps, partial)
        return partial

    def recompute_exp(
        self,
        h: Tensor,
        w: Tensor,
        window: tuple[int, int],
        reference: Tensor,
        target: Tensor,
        exps: Tensor,
    ) -> None:
        self._walk_tiles(h, w, window, reference, target, exps, None)

    def _walk_tiles(
        self,
        h: Tensor,
        w: Tensor,
        window: tuple[int, int],
        reference: Tensor,
        target: Tensor,
        exps: Tensor | None,
        partial: Partial | None,
    ) -> None:
        first, last = window
        width = self.config.tile
        tile = _fused_tile if h.is_cuda and h.shape[0] > 1 and can_fuse() else _eager_tile
        padded = math.ceil((last - first) / width) * width
        columns = torch.arange(first, first + padded, device=h.device)
        columns[last - first :] = PADDING
        for rows in _blocks(h.shape[0], self.config.rows):
            for piece, tile_columns in enumerate(columns.split(width)):
                start = piece * width
                tile(
                    h[rows],
                    w[first + start : min(first + start + width, last)],
                    tile_columns,
                    reference[rows],
                    target[rows],
                    None if partial is None else partial.sums[piece, rows],
                    None if partial is None else partial.references[piece, rows],
                    None if exps is None else exps[rows, start : start + width],
                )

    def finish(self, partials: list[Partial], target_logit: Tensor) -> tuple[Stats, Tensor]:
        references = torch.cat([p.references for p in partials])
        sums = torch.cat([p.sums for p in partials])
        reference = references.amax(0)
        row_sum = sums.mul_(_exp_difference(references, reference)).sum(0)
        above = reference != target_logit
        distance = torch.where(above, reference - target_logit, 0)
        # exp(r - ρ) - 1, which is exactly 0 where the target's logit is the reference
        excess = row_sum + torch.expm1(-distance)
        return Stats(reference, row_sum, excess + 1), distance + torch.log1p(excess)

    def settle(self, exps: Tensor, partials: list[Partial], stats: Stats) -> None:
        tiles = exps.unflatten(1, (-1, self.config.tile))
        references = torch.cat([p.references for p in partials])[: tiles.shape[1]]
        factor = _exp_difference(references, stats.reference).t()
        if not exps.is_cuda and bool((factor == 1).all()):
            return
        scale = fused(scale_tiles_) if exps.is_cuda and can_fuse() else scale_tiles_
        scale(tiles, factor)

    def add_product(self, out: Tensor, a: Tensor, b: Tensor) -> None:
        _multiply(out, a, b, add=True)

    def finish_dx(
        self, out: Tensor, sums: Tensor, w: Tensor, targets: Targets, stats: Stats, scale: Tensor
    ) -> None:
        for rows in _row_blocks(out):
            target_part = w[targets.address[rows]].to(sums.dtype).mul_(stats.sum[rows, None])
            torch.mul(target_part.sub_(sums[rows]).neg_(), scale[rows, None], out=out[rows])

    def scale_rows(self, h: Tensor, scale: Tensor) -> Tensor:
        scaled = h.new_empty(h.shape)
        for rows in _row_blocks(h):
            torch.mul(h[rows], scale[rows, None], out=scaled[rows])
        return scaled

    def add_target_rows(self, out: Tensor, h: Tensor, scale: Tensor, line: Tensor) -> None:
        for rows in _row_blocks(h):
            part = h[rows] * scale[rows, None]
            if out.is_cuda:  # the one of the two that has a fixed order there
                out.index_put_((line[rows],), part, accumulate=True)
            else:
                out.index_add_(0, line[rows], part)

    def collect_target_rows(
        self, h: Tensor, scale: Tensor, targets: Targets, vocab: int
    ) -> TargetRows:
        tokens, hidden = h.shape
        if tokens < vocab:
            # a target's line is the number of its first row
            order = torch.arange(tokens, device=h.device)
            line = torch.full((vocab,), tokens, device=h.device)
            line.scatter_reduce_(0, targets.address, order, "amin")
        else:
            line = torch.arange(vocab, device=h.device)
        sums = scale.new_zeros(min(tokens + 1, vocab), hidden)
        self.add_target_rows(sums, h, scale, line[targets.address])
        return TargetRows(sums, line)

    def finish_dw(
        self,
        out: Tensor,
        exps: Tensor,
        scaled: Tensor,
        target_rows: TargetRows,
        first: int,
        unit: Tensor | None,
    ) -> None:
        part = target_rows.sums
        sums = out if out.dtype == part.dtype else part.new_empty(out.shape)
        torch.index_select(part, 0, target_rows.line[first : first + out.shape[0]], out=sums)
        _multiply(sums, exps.t(), scaled, add=True)
        if unit is not None:
            torch.mul(sums, unit, out=out)
        elif sums is not out:
            out.copy_(sums)


def _eager_tile(
    h: Tensor,
    w: Tensor,
    columns: Tensor,
    reference: Tensor,
    target: Tensor,
    sums: Tensor | None,
    references: Tensor | None,
    exps: Tensor | None,
) -> None:
    rows, width = h.shape[0], w.shape[0]
    exps = None if exps is None else exps[:, :width]
    if exps is not None and exps.dtype == reference.dtype:
        logits, exps = exps, None
    else:
        logits = reference.new_empty(rows, width)
    _multiply(logits, h, w.t(), add=False)
    exponentials_(logits, columns[:width], reference, target, sums, references, exps)


def _fused_tile(h: Tensor, w: Tensor, columns: Tensor, *rest: Tensor | None) -> None:
    reference, *_, exps = rest
    assert reference is not None
    logits = reference.new_empty(h.shape[0], columns.shape[0])
    _multiply(logits[:, : w.shape[0]], h, w.t(), add=False)
    for tensor, dim in ((logits, 1), (columns, 0), (exps, 1)):
        if tensor is not None:
            torch._dynamo.mark_static(tensor, dim)
    fused(padded_exponentials)(logits, columns, *rest)


def _multiply(out: Tensor, a: Tensor, b: Tensor, *, add: bool) -> None:
    """`out = a @ b`, or `out += a @ b`, accumulating in out's dtype."""
    if a.dtype == out.dtype:
        torch.addmm(out, a, b, beta=int(add), out=out)
    elif not a.is_cuda:
        _multiply_widened(out if add else out.zero_(), a, b)
    elif add:
        torch.addmm(out, a, b, out_dtype=out.dtype, out=out)
    else:
        torch.mm(a, b, out_dtype=out.dtype, out=out)


def _multiply_widened(out: Tensor, a: Tensor, b: Tensor) -> None:
    """`out += a @ b` where no product of 16-bit operands has float32 results: on a CPU."""
    for rows in _blocks(a.shape[0], WIDENED_BLOCK):
        for inner in _blocks(a.shape[1], WIDENED_BLOCK):
            out[rows].addmm_(a[rows, inner].to(out.dtype), b[inner].to(out.dtype))


def _exp_difference(a: Tensor, b: Tensor) -> Tensor:
    """Return exp(a - b), 1 where both are the same infinity."""
    return torch.where(a == b, 1, torch.exp(a - b))


def _blocks(count: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, count)) for start in range(0, count, size))


def _row_blocks(x: Tensor) -> Iterator[slice]:
    """Cut the rows of `x` so that a block in the dtype of sums takes ROW_BLOCK_BYTES."""
    row_bytes = x.shape[1] * sum_dtype(x.dtype).itemsize
    return _blocks(x.shape[0], max(1, ROW_BLOCK_BYTES // row_bytes))
