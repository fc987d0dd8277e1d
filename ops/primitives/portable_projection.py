"""`Projection` in plain torch, for a CPU and any GPU; the reference that the kernels are tested on.

Logits exist one tile at a time.  Where a row's logits are far above its target's, each reference
block of that row uses its own maximum as the reference (Algorithm 1 of the paper, block by block),
and the blocks are reduced afterwards: no step synchronizes a GPU.  Every GEMM accumulates in
float32, or float64 for float64 inputs.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cutefce.cute_kernels.config import PortableTiles
from cutefce.cute_kernels.integers import ceil_div
from cutefce.ops.primitives.elementwise import (
    exponentials,
    exponentials_,
    scale_rows_in_place_,
    target_logit_,
)
from cutefce.ops.primitives.inductor import can_fuse, fused
from cutefce.ops.primitives.interface import forward_unfused
from cutefce.ops.primitives.portable_gradients import apply_rowwise, blocks, matmul_into
from cutefce.ops.primitives.rows import RowStats, Targets, reduce_losses, sum_dtype


@dataclass(frozen=True)
class PartialSums:
    """Row sums of exponentials (N, P), each relative to its own reference (N, P)."""

    sums: Tensor
    references: Tensor


class PortableProjection:
    """`cutefce.ops.primitives.interface.Projection` for any device."""

    def __init__(self, tiles: PortableTiles) -> None:
        self.tiles = tiles

    def prepare(self, h: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        return _dense(h), _dense(w)

    def target_logit(self, h: Tensor, w: Tensor, targets: Targets) -> Tensor:
        logit = h.new_empty(h.shape[0], dtype=sum_dtype(h.dtype))
        rows = targets.index, targets.safe_index, targets.active
        apply_rowwise(target_logit_, logit, h, *rows, whole=(w,))
        return logit

    def project_exp(
        self,
        h: Tensor,
        w: Tensor,
        window: tuple[int, int],
        reference: Tensor,
        target: Tensor,
        exps: Tensor | None = None,
    ) -> PartialSums:
        (first, last), block = window, self.tiles.reference_block
        middle = first if exps is None else min(first + exps.shape[1], last)
        count = ceil_div(last - first, block)
        partial = PartialSums(*reference.new_empty((2, h.shape[0], count)))
        if first < middle:
            self._project_tiles(h, w, (first, middle), reference, target, exps, partial)
        if middle < last:
            done = (middle - first) // block
            rest = PartialSums(partial.sums[:, done:], partial.references[:, done:])
            self._project_tiles(h, w, (middle, last), reference, target, None, rest)
        return partial

    def concat_partials(self, partials: Sequence[PartialSums]) -> PartialSums:
        if len(partials) == 1:
            return partials[0]
        return PartialSums(
            torch.cat([partial.sums for partial in partials], 1),
            torch.cat([partial.references for partial in partials], 1),
        )

    def gather_partials(
        self, partial: PartialSums, gather: Callable[[Tensor], Tensor]
    ) -> PartialSums:
        references = partial.references.amax(1)
        sums = (partial.sums * _exp_difference(partial.references, references[:, None])).sum(1)
        shards = gather(torch.stack([sums, references]))
        return PartialSums(shards[:, 0].t(), shards[:, 1].t())

    def forward(self, h: Tensor, w: Tensor, targets: Targets) -> tuple[RowStats, Tensor]:
        return forward_unfused(self, h, w, targets)

    def recompute_exp(
        self,
        h: Tensor,
        w: Tensor,
        window: tuple[int, int],
        reference: Tensor,
        target: Tensor,
        exps: Tensor,
    ) -> None:
        self._project_tiles(h, w, window, reference, target, exps, None)

    def reduce_partials(
        self, partial: PartialSums, target_logit: Tensor, targets: Targets
    ) -> tuple[RowStats, Tensor]:
        references, sums, active = partial.references, partial.sums, targets.active
        reference = references.amax(1)
        row_sum = (sums * _exp_difference(references, reference[:, None])).sum(1)
        row_sum = torch.where(active, row_sum, 0)  # that of an ignored row may be NaN
        distance = torch.where(active, reference - target_logit, 0)
        # exp(r - ρ) - 1, which is exactly 0 where the target's logit is the reference
        excess = row_sum + torch.expm1(-distance)
        losses = distance + torch.log1p(excess)
        stats = RowStats(torch.stack([reference, row_sum, excess + 1, losses]))
        return stats, reduce_losses(stats, targets)

    def repair_stored_exps(
        self,
        exps: Tensor,
        h: Tensor,
        w: Tensor,
        first: int,
        target: Tensor,
        partial: PartialSums,
        stats: RowStats,
    ) -> None:
        block = self.tiles.reference_block
        start, count = first // block, exps.shape[1] // block
        references = partial.references[:, start : start + count]
        factor = _exp_difference(references, stats.reference[:, None])
        if exps.is_cuda or bool((factor != 1).any()):
            apply_rowwise(scale_rows_in_place_, exps.view(-1, block), factor.flatten())

    def _project_tiles(
        self,
        h: Tensor,
        w: Tensor,
        window: tuple[int, int],
        reference: Tensor,
        target: Tensor,
        exps: Tensor | None,
        out: PartialSums | None,
    ) -> None:
        (first, last), tokens, block = window, h.shape[0], self.tiles.reference_block
        width = self.tiles.columns(tokens)
        run = fused(exponentials) if can_fuse(h) else exponentials_
        in_place = run is exponentials_ and exps is not None and exps.dtype == reference.dtype
        scratch = reference.new_empty(0 if in_place else min(tokens, self.tiles.tile_rows), width)
        # one more than there are tiles: a graph compiler specializes on a single element
        starts = torch.arange(first, last + width, width, device=h.device)
        for rows in blocks(tokens, self.tiles.tile_rows):
            for start, tile in zip(starts, blocks(last - first, width), strict=False):
                valid = tile.stop - tile.start
                parts = slice(tile.start // block, ceil_div(tile.stop, block))
                columns = slice(parts.start * block, parts.stop * block)
                copy = None if exps is None else exps[rows, columns]
                logits = scratch[: rows.stop - rows.start, : columns.stop - columns.start]
                if in_place and copy is not None:
                    logits, copy = copy, None
                entries = w[first + tile.start : first + tile.stop]
                matmul_into(logits[:, :valid], h[rows], entries.t(), accumulate=False)
                logits[:, valid:].fill_(-torch.inf)
                run(
                    logits.unflatten(1, (-1, block)),
                    start,
                    reference[rows],
                    target[rows],
                    None if out is None else out.sums[rows, parts],
                    None if out is None else out.references[rows, parts],
                    None if copy is None else copy.unflatten(1, (-1, block)),
                )


def _dense(x: Tensor) -> Tensor:
    """Return x (M, K) in a layout that a GEMM can address, copied if necessary."""
    return x if is_dense(x) else x.contiguous()


def is_dense(x: Tensor) -> bool:
    """Whether a GEMM can address x (M, K): its rows or its columns are contiguous."""
    (rows, columns), (pitch, unit) = x.shape, x.stride()
    return (unit == 1 and pitch >= columns) or (pitch == 1 and unit >= rows)


def _exp_difference(a: Tensor, b: Tensor) -> Tensor:
    """Return exp(a - b), 1 where both are the same infinity."""
    return torch.where(a == b, 1, torch.exp(a - b))
