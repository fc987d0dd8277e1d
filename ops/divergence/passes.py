"""The passes of a divergence over tiles of both sides' logits.

    forward     log-sum-exps and divergences: one pass if a tile has all classes, else two
    backward    factors of each tile, and what they add to the gradients

The statistics of a token are the largest logit of the student, its log-sum-exp less that, the same
of the teacher, and KL(student || x) and KL(teacher || x), where x is the other side or the JSD's
mixture; one that is not needed is 0.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

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
from cutefce.ops.divergence.options import Divergence
from cutefce.ops.divergence.sides import Side, SideGradients
from cutefce.ops.parallel.shard import Unsharded, VocabShard
from cutefce.ops.planning.divergence_planner import DivergencePlan
from cutefce.ops.primitives.portable_gradients import apply_rowwise
from cutefce.ops.rows.blocks import blocks
from cutefce.ops.rows.targets import sum_dtype

STUDENT, TEACHER = 0, 1
SUMS, STATS = 4, 6
"""Statistics of a token, of which the first ones make the log-sum-exps of both sides."""


@dataclass
class Factors:
    """The factors of the first tokens, kept from the forward: (K, V) for each side or None."""

    sides: list[Tensor | None] = field(default_factory=lambda: [None, None])


@dataclass(frozen=True)
class Passes:
    """A divergence of two sides, as planned."""

    sides: Sequence[Side]
    """Student and teacher."""
    options: Divergence
    plan: DivergencePlan
    shard: Unsharded

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
        stats = sides[STUDENT].h.new_zeros(STATS, self.tokens, dtype=self.dtype)
        for index in (STUDENT, TEACHER):
            stats[2 * index] = -torch.inf
        tiles = self._tiles(plan.forward_rows, plan.forward_columns)
        if not plan.is_one_pass or isinstance(self.shard, VocabShard):
            for rows, columns in self._places(plan.forward_rows, plan.forward_columns):
                self._add_exps(stats, self._project(tiles, rows, columns), rows)
            self._finish_lses(stats)
            for rows, columns in self._places(plan.forward_rows, plan.forward_columns):
                self._add_divergences(stats, self._project(tiles, rows, columns), rows)
            if isinstance(self.shard, VocabShard):
                stats[SUMS:] = self.shard.all_reduce_(stats[SUMS:].clone())
            return stats, Factors()
        kept = Factors([self._empty_factors(side, plan.kept) for side in sides])
        for rows, columns in self._places(plan.forward_rows, self.vocab, plan.kept):
            logits = self._project(tiles, rows, columns)
            self._add_exps(stats, logits, rows)
            stats[1:SUMS:2, rows].log_()
            self._add_divergences(stats, logits, rows)
            if rows.start < plan.kept:
                for index, factors in enumerate(kept.sides):
                    if factors is not None:
                        self._write_factors(factors[rows], index, logits, stats, rows)
        return stats, kept

    def backward(self, stats: Tensor, kept: Factors, gradients: Sequence[SideGradients]) -> None:
        """Add all tiles to `gradients`, those of the sides that have some, in order."""
        if not self.tokens:
            return
        plan, trained = self.plan, [i for i in (STUDENT, TEACHER) if self.sides[i].is_trained]
        count = max((len(x) for x in kept.sides if x is not None), default=0)
        size = min(plan.rows, self.tokens) * min(plan.columns, self.vocab)
        computes = count < self.tokens
        tiles = self._tiles(plan.rows, plan.columns) if computes else []
        outs = {i: self.sides[i].h.new_empty(size if computes else 0) for i in trained}
        for columns in blocks(self.vocab, plan.columns):
            for each in gradients:
                each.begin(columns)
            for rows in self._row_blocks(plan.rows, count):
                logits = []
                if rows.start >= count:
                    logits = self._project(tiles, rows, columns)
                for i, each in zip(trained, gradients, strict=True):
                    found = kept.sides[i]
                    if rows.start < count and found is not None:
                        factors = found[rows, columns]
                    else:
                        factors = _view(outs[i], rows, columns)
                        self._write_factors(factors, i, logits, stats, rows, each.relative)
                    each.add(factors, rows, columns)
            for each in gradients:
                each.end(columns)

    def values(self, stats: Tensor) -> Tensor:
        """Return the divergences (M,) of statistics (6, M)."""
        of_student, of_teacher = stats[SUMS], stats[SUMS + 1]
        if self.options.divergence == "forward_kl":
            return of_teacher.clone()
        if self.options.divergence == "reverse_kl":
            return of_student.clone()
        return (1 - self.options.beta) * of_student + self.options.beta * of_teacher

    def _tiles(self, rows: int, columns: int) -> list[Tensor]:
        """Return the memory of a tile of each side's logits."""
        size = min(rows, self.tokens) * min(columns, self.vocab)
        return [side.h.new_empty(size, dtype=self.dtype) for side in self.sides]

    def _empty_factors(self, side: Side, kept: int) -> Tensor | None:
        """Return memory for the factors of the first `kept` tokens, None if there are none."""
        return side.h.new_empty(kept, self.vocab) if side.is_trained and kept else None

    def _row_blocks(self, rows: int, kept: int) -> Iterator[slice]:
        """Cut the tokens into blocks, none of which is kept in part."""
        yield from blocks(kept, rows)
        for block in blocks(self.tokens - kept, rows):
            yield slice(kept + block.start, kept + block.stop)

    def _places(self, rows: int, columns: int, kept: int = 0) -> Iterator[tuple[slice, slice]]:
        """Yield the tokens and classes of every tile."""
        for block in self._row_blocks(rows, kept):
            for window in blocks(self.vocab, columns):
                yield block, window

    def _project(self, tiles: Sequence[Tensor], rows: slice, columns: slice) -> list[Tensor]:
        """Return the logits of both sides, in the memory of `tiles`."""
        logits = [_view(tile, rows, columns) for tile in tiles]
        for side, out in zip(self.sides, logits, strict=True):
            side.project(out, rows, columns)
        return logits

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
            elif a == self._first:
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
        """Write the factors (R, C) of the side `a` to `out`, times `scale` (M,) or the boost."""
        b, cap = 1 - a, self.sides[a].cap
        first = a if self.options.divergence == "jsd" else self._first
        if scale is None and self.boost(a) != 1:
            scale = stats.new_full(stats.shape[1:], self.boost(a))
        more = (x if x is None else x[rows] for x in (stats[SUMS + first], cap, scale))
        sums = *_lse(stats, a, rows), *_lse(stats, b, rows)
        operands = logits[a], logits[b], *sums, *more
        if self.options.divergence == "jsd":
            apply_rowwise(mixture_factors_, out, *operands, whole=self._shares(a))
        elif a == first:
            apply_rowwise(kl_factors_of_first_, out, *operands)
        else:
            apply_rowwise(kl_factors_of_second_, out, *operands)

    def boost(self, index: int) -> float:
        """Return the power of 2 that a side's factors are multiplied by, for float16's range.

        Those of a JSD are at most twice the share of the side times the share's logarithm, those
        that hold a difference of logits are not bounded, and the others are 1 at most.
        """
        if self.sides[index].h.dtype != torch.float16:
            return 1.0
        if self.options.divergence == "jsd":
            share = self.share(index)
            return 2.0 ** (12 - math.ceil(math.log2(max(-share * math.log(share), 2.0**-10))))
        return 2.0**4 if index == self._first else 2.0**12

    @property
    def _first(self) -> int:
        """The side whose probabilities a KL divergence averages over."""
        return TEACHER if self.options.divergence == "forward_kl" else STUDENT

    def share(self, index: int) -> float:
        """Return the share of a side in the JSD's mixture."""
        return self.options.beta if index == TEACHER else 1 - self.options.beta

    def _shares(self, index: int) -> tuple[Tensor, Tensor]:
        """Return () the shares of a side and of the other one, on the device."""
        like = self.sides[STUDENT].h
        own, other = (
            like.new_full((), self.share(i), dtype=self.dtype) for i in (index, 1 - index)
        )
        return own, other


def _lse(stats: Tensor, index: int, rows: slice) -> tuple[Tensor, Tensor]:
    """Return the largest logit (R,) of a side's tokens, and the log-sum-exp less that."""
    return stats[2 * index, rows], stats[2 * index + 1, rows]


def _view(memory: Tensor, rows: slice, columns: slice) -> Tensor:
    """Return the first elements of `memory` as a matrix of these rows and columns."""
    height, width = rows.stop - rows.start, columns.stop - columns.start
    return memory[: height * width].view(height, width)
