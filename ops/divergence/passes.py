"""The passes of a divergence over tiles of both sides' logits.

    forward     log-sum-exps and divergences: one pass if a tile has all classes, else two
    backward    factors of each tile, and what they add to the gradients

The statistics of a token are a number near the largest logit of the student, its log-sum-exp less
that, the same of the teacher, and KL(student || x) and KL(teacher || x), where x is the other side
or the JSD's mixture; one that is not needed is 0.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from cutefce.ops.divergence.elementwise import (
    add_exps_,
    add_kl_,
    add_mixture_kl_,
    kl_factors_of_first_,
    kl_factors_of_second_,
    mixture_factors_,
)
from cutefce.ops.divergence.factors import Factors, SideFactors
from cutefce.ops.divergence.options import STUDENT, TEACHER, Divergence
from cutefce.ops.divergence.row_kernel import RowKernel
from cutefce.ops.divergence.sides import Side, SideGradients
from cutefce.ops.dtypes import sum_dtype
from cutefce.ops.parallel.shard import Unsharded, VocabShard
from cutefce.ops.planning.divergence.planner import (
    bytes_of_later,
    forward_blocks,
    kept_blocks,
)
from cutefce.ops.planning.divergence.problem import DivergencePlan
from cutefce.ops.primitives.portable_gradients import apply_rowwise
from cutefce.ops.rows.blocks import blocks

SUMS, STATS = 4, 6
"""Statistics of a token, of which the first ones make the log-sum-exps of both sides."""


@dataclass(frozen=True)
class Passes:
    """A divergence of two sides, as planned."""

    sides: Sequence[Side]
    """Student and teacher."""
    options: Divergence
    plan: DivergencePlan
    shard: Unsharded
    scales: Sequence[Tensor | None]
    """() what the factors of each side are multiplied by before they are rounded; None for 1."""

    @cached_property
    def row_kernel(self) -> RowKernel | None:
        """What makes whole rows of logits into statistics and factors; None for steps of torch."""
        return RowKernel.of(self.sides, self.options, self.scales)

    @property
    def tokens(self) -> int:
        """Tokens that are computed, M."""
        return len(self.sides[STUDENT].h)

    @property
    def vocab(self) -> int:
        """Classes of this rank."""
        return len(self.sides[STUDENT].w)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of sums."""
        return sum_dtype(self.sides[STUDENT].h.dtype)

    def forward(self) -> tuple[Tensor, Factors]:
        """Return the statistics (6, M), and the factors that are kept."""
        plan, sides = self.plan, self.sides
        stats = sides[STUDENT].h.new_empty(STATS, self.tokens, dtype=self.dtype)
        if not plan.is_one_pass or self.row_kernel is None:
            stats.zero_()
            for index in (STUDENT, TEACHER):
                stats[2 * index] = -torch.inf
        tiles = self._tiles(plan.forward_rows, plan.forward_columns)
        if not plan.is_one_pass:
            for rows, columns in self._places(plan.forward_rows, plan.forward_columns):
                self._add_exps(stats, self._project(tiles, rows, columns)[0], rows)
            self._finish_lses(stats)
            for rows, columns in self._places(plan.forward_rows, plan.forward_columns):
                self._add_divergences(stats, self._project(tiles, rows, columns)[0], rows)
            if isinstance(self.shard, VocabShard):
                stats[SUMS:] = self.shard.all_reduce_(stats[SUMS:].clone())
            return stats, Factors()
        kept = Factors(
            [self._empty_factors(side) for side in sides], plan.kept, plan.aliased, plan.columns
        )
        for rows, memory in self._forward_blocks(kept, tiles):
            logits, sums = self._project(memory, rows, slice(0, self.vocab))
            outs = [kept.of(index, rows) for index in (STUDENT, TEACHER)]
            if self.row_kernel is not None:
                self.row_kernel.run(stats[:, rows], logits, outs, sums)
                continue
            self._add_exps(stats, logits, rows)
            stats[1:SUMS:2, rows].log_()
            self._add_divergences(stats, logits, rows)
            for index, factors in enumerate(outs):
                for columns, out in factors.windows() if factors is not None else ():
                    tile = [x[:, columns] for x in logits]
                    self._write_factors(out, index, tile, stats, rows)
        return stats, kept

    def backward(self, stats: Tensor, kept: Factors, gradients: Sequence[SideGradients]) -> None:
        """Add all tiles to `gradients`, those of the sides that have some, in order."""
        if not self.tokens:
            return
        plan, trained = self.plan, [i for i in (STUDENT, TEACHER) if self.sides[i].is_trained]
        size = min(plan.rows, self.tokens) * min(plan.columns, self.vocab)
        rows_of_tile = self.tokens - kept.kept if kept.aliased else plan.rows
        tiles = self._tiles(rows_of_tile, plan.tile_columns) if kept.kept < self.tokens else []
        has_outs = kept.kept < self.tokens or kept.aliased
        outs = {i: self.sides[i].h.new_empty(size if has_outs else 0) for i in trained}
        for columns in blocks(self.vocab, plan.columns):
            for each in gradients:
                each.begin(columns)
            for rows in self._backward_blocks(kept):
                if rows.start < kept.kept and not kept.aliased:
                    found = [kept.sides[i] for i in trained]
                    factors = [x.rest[rows, columns] for x in found if x is not None]
                else:
                    factors = [_view(outs[i], rows, columns) for i in trained]
                    copied = kept.kept if kept.aliased else 0
                    for i, x in zip(trained, factors, strict=True):
                        if copied:
                            kept.copy_window(i, x, columns)
                    if rows.start + copied < rows.stop:
                        to_fill = {i: x[copied:] for i, x in zip(trained, factors, strict=True)}
                        left = slice(rows.start + copied, rows.stop)
                        self._fill(to_fill, tiles, stats, gradients, left, columns)
                for each, x in zip(gradients, factors, strict=True):
                    each.add(x, rows, columns)
            for each in gradients:
                each.end(columns)

    def _fill(
        self,
        outs: dict[int, Tensor],
        tiles: Sequence[Tensor],
        stats: Tensor,
        gradients: Sequence[SideGradients],
        rows: slice,
        columns: slice,
    ) -> None:
        """Write the factors (R, C) of the sides `outs`, tile by tile of logits."""
        for tile in blocks(columns.stop - columns.start, self.plan.tile_columns):
            place = slice(columns.start + tile.start, columns.start + tile.stop)
            logits, _ = self._project(tiles, rows, place)
            for (i, out), each in zip(outs.items(), gradients, strict=True):
                self._write_factors(out[:, tile], i, logits, stats, rows, each.relative)

    def has_one_row_block(self, kept: Factors) -> bool:
        """Whether a window of the backward has the factors of all tokens at once."""
        return len(list(self._backward_blocks(kept))) == 1

    def _tiles(self, rows: int, columns: int) -> list[Tensor]:
        """Return the memory of a tile of each side's logits."""
        size = min(rows, self.tokens) * min(columns, self.vocab)
        return [side.h.new_empty(size, dtype=self.dtype) for side in self.sides]

    def _empty_factors(self, side: Side) -> SideFactors | None:
        """Return memory for the kept factors of a side; None if there are none."""
        kept, aliased = self.plan.kept, self.plan.aliased
        if not side.is_trained or not kept:
            return None
        dw = side.w.new_empty(side.w.shape) if aliased else None
        return SideFactors(dw, side.h.new_empty(kept - aliased, self.vocab))

    def _backward_blocks(self, kept: Factors) -> Iterator[slice]:
        """Cut the tokens into the blocks of a backward, none of which is kept in part.

        One has all tokens if some of their factors are in the memory of dW.
        """
        if kept.aliased:
            yield slice(0, self.tokens)
            return
        yield from blocks(kept.kept, self.plan.rows)
        for block in blocks(self.tokens - kept.kept, self.plan.rows):
            yield slice(kept.kept + block.start, kept.kept + block.stop)

    def _forward_blocks(
        self, kept: Factors, tiles: list[Tensor]
    ) -> Iterator[tuple[slice, list[Tensor]]]:
        """Cut the tokens into the blocks of a forward of one pass; yield memory of tiles too.

        It is `tiles`, that of factors of later tokens, or that of dW.
        """
        plan, buffers = self.plan, [x.rest for x in kept.sides if x is not None]
        rows = plan.forward_rows
        if buffers and plan.kept == self.tokens and not plan.aliased:
            items = [x.element_size() for x in buffers]
            later = bytes_of_later(items, self.dtype.itemsize, self.vocab)
            for block in forward_blocks(self.tokens, rows, later):
                is_wide = block.stop - block.start > rows
                yield block, self._later_memory(buffers, block) if is_wide else tiles
            return
        in_dw = kept.tile_memory(self.dtype)
        most = min((len(x) // self.vocab for x in in_dw), default=0)
        for block, is_in_dw in kept_blocks(self.tokens, rows, plan.kept, plan.aliased, most):
            yield block, in_dw if is_in_dw else tiles

    def _later_memory(self, buffers: Sequence[Tensor], rows: slice) -> list[Tensor]:
        """Return the memory of tiles of `rows`, in that of the factors of the tokens after them."""
        size = (rows.stop - rows.start) * self.vocab
        later = [x[rows.stop :].view(-1).view(self.dtype) for x in buffers]
        return later if len(later) > 1 else [later[0][:size], later[0][size:]]

    def _places(self, rows: int, columns: int) -> Iterator[tuple[slice, slice]]:
        """Yield the tokens and classes of every tile."""
        for block in blocks(self.tokens, rows):
            for window in blocks(self.vocab, columns):
                yield block, window

    def _project(
        self, tiles: Sequence[Tensor], rows: slice, columns: slice
    ) -> tuple[list[Tensor], list[Tensor | None]]:
        """Return the logits of both sides, in the memory of `tiles`, and what `project` returns."""
        logits = [_view(tile, rows, columns) for tile in tiles]
        operands = zip(self.sides, logits, strict=True)
        return logits, [side.project(out, rows, columns) for side, out in operands]

    def _add_exps(self, stats: Tensor, logits: Sequence[Tensor], rows: slice) -> None:
        for index, x in enumerate(logits):
            apply_rowwise(add_exps_, *_lse(stats, index, rows), x)

    def _finish_lses(self, stats: Tensor) -> None:
        """Set the log-sum-exps from the sums of this rank's classes."""
        if isinstance(self.shard, VocabShard):
            parts = self.shard.all_gather(stats[:SUMS])
            for index in (STUDENT, TEACHER):
                tops, totals = parts[:, 2 * index], parts[:, 2 * index + 1]
                top, total = _lse(stats, index, slice(None))
                top.copy_(tops.amax(0))
                reference = torch.where(top == -torch.inf, 0, top)  # -inf - -inf is NaN
                total.copy_((totals * (tops - reference).exp()).sum(0))
        stats[1:SUMS:2].log_()

    def _add_divergences(self, stats: Tensor, logits: Sequence[Tensor], rows: slice) -> None:
        kind = self.options.divergence
        for a in (STUDENT, TEACHER):
            b = 1 - a
            out, sums = stats[SUMS + a, rows], (_lse(stats, a, rows), _lse(stats, b, rows))
            operands = out, logits[a], logits[b], *sums[0], *sums[1]
            if kind == "jsd":
                apply_rowwise(add_mixture_kl_, *operands, whole=self._shares(a))
            elif a == self.options.first:
                apply_rowwise(add_kl_, *operands)

    def _write_factors(
        self,
        out: Tensor,
        a: int,
        logits: Sequence[Tensor],
        stats: Tensor,
        rows: slice,
        scale: Tensor | None = None,
    ) -> None:
        """Write the factors (R, C) of the side `a` to `out`, times `scale` (M,) or the side's."""
        b, cap = 1 - a, self.sides[a].cap
        first = a if self.options.divergence == "jsd" else self.options.first
        own = self.scales[a]
        if scale is None and own is not None:
            scale = own.expand(self.tokens)
        more = (x if x is None else x[rows] for x in (stats[SUMS + first], cap, scale))
        sums = *_lse(stats, a, rows), *_lse(stats, b, rows)
        operands = logits[a], logits[b], *sums, *more
        if self.options.divergence == "jsd":
            apply_rowwise(mixture_factors_, out, *operands, whole=self._shares(a))
        elif a == first:
            apply_rowwise(kl_factors_of_first_, out, *operands)
        else:
            apply_rowwise(kl_factors_of_second_, out, *operands)

    def _shares(self, index: int) -> tuple[Tensor, Tensor]:
        """Return () the shares of a side and of the other one, on the device."""
        like = self.sides[STUDENT].h
        own, other = (
            like.new_full((), self.options.share(i), dtype=self.dtype) for i in (index, 1 - index)
        )
        return own, other


def _lse(stats: Tensor, index: int, rows: slice) -> tuple[Tensor, Tensor]:
    """Return a number near the largest logit (R,) of a side's tokens, and the lse less that."""
    return stats[2 * index, rows], stats[2 * index + 1, rows]


def _view(memory: Tensor, rows: slice, columns: slice) -> Tensor:
    """Return the first elements of `memory` as a matrix of these rows and columns."""
    height, width = rows.stop - rows.start, columns.stop - columns.start
    return memory[: height * width].view(height, width)
