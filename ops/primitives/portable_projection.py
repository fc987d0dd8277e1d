"""From hidden states and weight to exponentials, their row sums and the loss, in plain torch.

This is what a CPU and any GPU run, and what the kernels are tested on: `CuteProjection` launches
kernels for the same functions.  With target y_i, logits z = h wᵀ and a reference ρ_i that is known
before the projection (the target's own logit r_i = z_iy, unless a row has a far larger one):

    e_iv = exp(z_iv - ρ_i), and 0 at v = y_i      S_i = Σ_v e_iv      T_i = exp(r_i - ρ_i) + S_i
    loss_i = ρ_i - r_i + log T_i                  s_i = g_i / T_i
    dX_i = s_i Σ_v e_iv W_v + c_i W_y             c_i = -s_i S_i
    dW_v = Σ_i e_iv s_i h_i + Σ_{i: y_i = v} c_i h_i

s and c are `RowCoefficients`.  A loss that adds γ_i κ_v to dL/dz_iv, as label smoothing does, adds
a `RankOne` to dX and to dW.  In the shapes below N is tokens, D hidden, V vocab.  The dtype of sums
is float32, or float64 for float64 inputs; exponentials and gradients have the inputs' dtype.

Logits exist one tile at a time.  Where a row's logits are far above its target's, each reference
block of that row uses its own maximum as the reference (Algorithm 1 of the paper, block by block),
and the blocks are reduced afterwards: no step synchronizes a GPU.  Every GEMM accumulates in
float32, or float64 for float64 inputs.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from cutefce.cute_kernels.config import PortableTiles
from cutefce.cute_kernels.integers import ceil_div
from cutefce.cute_kernels.workspace import NUM_STATS
from cutefce.ops.dtypes import sum_dtype
from cutefce.ops.outputs.steps import OutputSteps
from cutefce.ops.primitives.elementwise import (
    can_fuse,
    exp_difference,
    exponentials,
    exponentials_,
    fused,
    gathered_dot_,
    joined,
    statistics_,
)
from cutefce.ops.primitives.portable_gradients import apply_rowwise, scale_rows
from cutefce.ops.primitives.products import dense, logits_into
from cutefce.ops.primitives.weighted_sum import SoftTargetSteps, weighted_sum
from cutefce.ops.rows.blocks import blocks
from cutefce.ops.rows.partial_sums import PartialSums
from cutefce.ops.rows.selection import CountedRows, RowSelection
from cutefce.ops.rows.statistics import RowStats, reduce_losses
from cutefce.ops.rows.targets import Targets


class Logits(NamedTuple):
    """The logits of a window of classes, and what their exponentials are relative to."""

    h: Tensor
    """(N, D)"""
    w: Tensor
    """(V, D)"""
    window: tuple[int, int]
    """The classes [first, last); in plain torch from a whole reference block on."""
    reference: Tensor
    """(N,)"""
    targets: Targets


Partials: TypeAlias = Any


class PortableProjection(SoftTargetSteps, OutputSteps):
    """The steps of the forward; `Partials` are row sums in the form of one class of steps."""

    tiles: PortableTiles
    counted: CountedRows | None
    """How many rows count, where others' exponentials and row sums may be undefined."""

    def prepare(self, h: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        """Return h and w in a layout that the other steps accept, copied if necessary."""
        return dense(h), dense(w)

    def select(self, h: Tensor, selection: RowSelection, scale: Tensor | None, out: Tensor) -> None:
        """Write the rows of h (N, D) in the order of `selection`, times `scale` (M,), to `out`.

        Rows of tokens that do not count are 0.  Kernels alone select rows: plain torch computes all
        that it is given.
        """
        raise NotImplementedError("selection: got one of kernels, expected None in plain torch")

    def target_logit(self, h: Tensor, w: Tensor, targets: Targets) -> Tensor:
        """Return r (N,): +inf for ignored tokens alone, NaN for targets outside [0, V).

        With `targets.selection`, h has the rows of all tokens, in the order of the call.  With
        `targets.class_row`, the class logits of the targets are set too.
        A logit of +inf becomes NaN: no value of a logit makes its token an ignored one.
        """
        if targets.class_row is not None:
            targets.set_class_logits(weighted_sum(h.t(), targets.class_row.row))
        logit = h.new_empty(h.shape[0], dtype=sum_dtype(h.dtype))
        apply_rowwise(gathered_dot_, logit, h, targets.safe_index, whole=(w,))
        if targets.logits is not None:
            logit = targets.logits.apply_at(logit, targets.safe_index)
        logit = torch.where(targets.owned & (logit != torch.inf), logit, torch.nan)
        return torch.where(targets.active, logit, torch.inf)

    def project_exp(self, x: Logits, exps: Tensor | None = None) -> Partials:
        """Return the row sums of e over the columns of the window.

        `exps` (N, K), if given, receives e over the first K columns; those beyond the vocabulary
        are undefined.  In plain torch K is of whole reference blocks.  Where logits are far above
        the reference, sums and `exps` may be relative to another reference, which the result tells
        `repair_stored_exps`.
        """
        (first, last), block = x.window, self.tiles.reference_block
        middle = first if exps is None else min(first + exps.shape[1], last)
        count = ceil_div(last - first, block)
        partial = PartialSums.empty(x.reference, count, x.targets)
        if first < middle:
            self._project_tiles(x._replace(window=(first, middle)), exps, partial)
        if middle < last:
            rest = partial.part(slice(None), slice((middle - first) // block, count))
            self._project_tiles(x._replace(window=(middle, last)), None, rest)
        return partial

    def concat_partials(self, partials: Sequence[Partials]) -> Partials:
        """Return the row sums of all columns from those of consecutive windows."""
        if len(partials) == 1:
            return partials[0]
        every: Any = (
            None if x[0] is None else torch.cat(x, -1) for x in zip(*partials, strict=True)
        )
        return PartialSums(*every)

    def gather_partials(self, partial: Partials, gather: Callable[[Tensor], Tensor]) -> Partials:
        """Return the row sums of all vocabulary shards.

        `gather` maps a tensor (...) to those of all ranks (R, ...).
        """
        shards = gather(torch.stack(joined(partial.sums, partial.references, 1)))
        return PartialSums(shards[:, 0].t(), shards[:, 1].t())

    def recompute_exp(self, x: Logits, exps: Tensor) -> None:
        """Write e over the columns of the window, relative to the reference, to `exps` (N, K)."""
        self._project_tiles(x, exps, None)

    def reduce_partials(
        self, partial: Partials, target_logit: Tensor, targets: Targets
    ) -> tuple[RowStats, Tensor]:
        """Reduce the partial sums of every token; also return the reduced loss."""
        stats = RowStats(target_logit.new_empty(NUM_STATS, len(target_logit)))
        # the sum of an ignored row may be NaN, or not written at all
        given = target_logit, targets.active, partial.sums, partial.references
        apply_rowwise(statistics_, *stats.rows, *given)
        return stats, reduce_losses(stats, targets)

    def repair_stored_exps(self, x: Logits, exps: Tensor, partial: Partials) -> None:
        """Make `exps` (N, K), which `project_exp` stored, relative to the reference of `x`.

        `partial` is of all columns.
        """
        block = self.tiles.reference_block
        start, count = x.window[0] // block, exps.shape[1] // block
        references = partial.references[:, start : start + count]
        factor = exp_difference(references, x.reference[:, None])
        if exps.is_cuda or bool((factor != 1).any()):
            scale_rows(exps.view(-1, block), factor.flatten())

    def far_rows(self, partial: Partials, targets: Targets) -> RowSelection | None:
        """Return the tokens to compute again: all if a reference was moved, else none.

        Only the device knows their number, N or 0.  None: all are computed.
        """
        return targets.selection

    def _project_tiles(self, x: Logits, exps: Tensor | None, out: PartialSums | None) -> None:
        """Compute tiles."""
        h, w, (first, last), reference, targets = x
        tokens, block = h.shape[0], self.tiles.reference_block
        width = self.tiles.columns(tokens)
        run = fused(exponentials) if can_fuse(h) else exponentials_
        in_place = run is exponentials_ and exps is not None and exps.dtype == reference.dtype
        scratch = reference.new_empty(0 if in_place else min(tokens, self.tiles.tile_rows), width)
        cap = None if targets.logits is None else targets.logits.cap
        floor = None if targets.logits is None else targets.logits.floor
        # one more than there are tiles: a graph compiler specializes on a single element
        starts = torch.arange(first, last + width, width, device=h.device)
        for rows in blocks(tokens, self.tiles.tile_rows):
            for start, tile in zip(starts, blocks(last - first, width), strict=False):
                valid = tile.stop - tile.start
                parts = slice(tile.start // block, ceil_div(tile.stop, block))
                columns = slice(parts.start * block, parts.stop * block)
                here = slice(rows.stop - rows.start), slice(columns.stop - columns.start)
                copy = None if exps is None else exps[rows, columns]
                logits = scratch[here]
                if in_place and copy is not None:
                    logits, copy = copy, None
                classes = slice(first + tile.start, first + tile.stop)
                own = None if targets.logits is None else targets.logits.part(rows, classes)
                logits_into(logits[:, :valid], h[rows], w[classes], own)
                logits[:, valid:].fill_(-torch.inf)
                run(
                    logits.unflatten(1, (-1, block)),
                    start,
                    reference[rows],
                    targets.index[rows],
                    None if copy is None else copy.unflatten(1, (-1, block)),
                    None if cap is None or exps is None else cap[rows],
                    None if floor is None else floor[rows],
                    *(() if out is None else out.part(rows, parts)),
                )
