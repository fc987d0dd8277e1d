"""The portable primitives: torch operations alone, on a CPU and on any GPU.

They are the reference that kernels are tested against.  They never wait for a GPU: where a row's
logits lie far above its target's, each tile of that row uses its own maximum as the reference
(Algorithm 1 of the paper, tile by tile), and the pieces are joined afterwards.  Every product
accumulates in float32, or float64 for float64 inputs.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from cutefce.cute_kernels.config import PortableTiles
from cutefce.ops.planning.memory_model import UPCAST_BLOCK, row_block_bytes
from cutefce.ops.primitives.elementwise import (
    exponentials,
    exponentials_,
    finish_dw_,
    finish_dx_,
    scale_rows_,
    scaled_rows_,
    target_logit_,
)
from cutefce.ops.primitives.inductor import can_fuse, fused
from cutefce.ops.primitives.interface import Partial, TargetGrad, forward_unfused
from cutefce.ops.primitives.rows import RowStats, Targets, sum_dtype


@dataclass(frozen=True)
class PartialSums:
    """Row sums of exponentials, each piece relative to its own reference; both (N, pieces)."""

    sums: Tensor
    references: Tensor


class TorchPrimitives:
    """`cutefce.ops.primitives.interface.Primitives` for any device."""

    def __init__(self, config: PortableTiles) -> None:
        self.config = config

    def prepare(self, h: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        return _dense(h), _dense(w)

    def target_logit(self, h: Tensor, w: Tensor, targets: Targets) -> Tensor:
        logit = h.new_empty(h.shape[0], dtype=sum_dtype(h.dtype))
        parts = targets.index, targets.safe_index, targets.active
        apply_rowwise(target_logit_, logit, h, *parts, whole=(w,))
        return logit

    def project_exp(
        self,
        h: Tensor,
        w: Tensor,
        window: tuple[int, int],
        reference: Tensor,
        target: Tensor,
        exps: Tensor | None = None,
    ) -> Partial:
        (first, last), piece = window, self.config.reference_block
        middle = first if exps is None else min(first + exps.shape[1], last)
        pieces = PartialSums(
            *reference.new_empty((2, h.shape[0], math.ceil((last - first) / piece)))
        )
        if first < middle:
            self._walk_tiles(h, w, (first, middle), reference, target, exps, pieces)
        if middle < last:
            done = (middle - first) // piece
            rest = PartialSums(pieces.sums[:, done:], pieces.references[:, done:])
            self._walk_tiles(h, w, (middle, last), reference, target, None, rest)
        return pieces

    forward = forward_unfused

    def concat_partials(self, partials: Sequence[Partial]) -> Partial:
        if len(partials) == 1:
            return partials[0]
        sums, references = ([getattr(p, x) for p in partials] for x in ("sums", "references"))
        return PartialSums(torch.cat(sums, 1), torch.cat(references, 1))

    def gather_partials(self, partial: Partial, gather: Callable[[Tensor], Tensor]) -> Partial:
        references = partial.references.amax(1)
        sums = (partial.sums * _exp_difference(partial.references, references[:, None])).sum(1)
        shards = gather(torch.stack([sums, references]))
        return PartialSums(shards[:, 0].t(), shards[:, 1].t())

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
        out: PartialSums | None,
    ) -> None:
        (first, last), tokens, piece = window, h.shape[0], self.config.reference_block
        width = self.config.columns(tokens)
        run = fused(exponentials) if can_fuse(h) else exponentials_
        in_place = run is exponentials_ and exps is not None and exps.dtype == reference.dtype
        scratch = reference.new_empty(0 if in_place else min(tokens, self.config.tile_rows), width)
        # one more than there are tiles: a lone element would be compiled as a case of its own
        starts = torch.arange(first, last + width, width, device=h.device)
        for rows in _blocks(tokens, self.config.tile_rows):
            for start, tile in zip(starts, _blocks(last - first, width), strict=False):
                valid = tile.stop - tile.start
                pieces = slice(tile.start // piece, math.ceil(tile.stop / piece))
                columns = slice(pieces.start * piece, pieces.stop * piece)
                copy = None if exps is None else exps[rows, columns]
                logits = scratch[: rows.stop - rows.start, : columns.stop - columns.start]
                if in_place and copy is not None:
                    logits, copy = copy, None
                entries = w[first + tile.start : first + tile.stop]
                matmul_into(logits[:, :valid], h[rows], entries.t(), add=False)
                logits[:, valid:].fill_(-torch.inf)
                run(
                    logits.unflatten(1, (-1, piece)),
                    start,
                    reference[rows],
                    target[rows],
                    None if out is None else out.sums[rows, pieces],
                    None if out is None else out.references[rows, pieces],
                    None if copy is None else copy.unflatten(1, (-1, piece)),
                )

    def reduce_partials(
        self, partial: Partial, target_logit: Tensor, targets: Targets, reduction: str
    ) -> tuple[RowStats, Tensor]:
        references, sums = partial.references, partial.sums
        reference = references.amax(1)
        row_sum = (sums * _exp_difference(references, reference[:, None])).sum(1)
        above = reference != target_logit
        distance = torch.where(above, reference - target_logit, 0)
        # exp(r - ρ) - 1, which is exactly 0 where the target's logit is the reference
        excess = row_sum + torch.expm1(-distance)
        losses = distance + torch.log1p(excess)
        stats = RowStats(torch.stack([reference, row_sum, excess + 1, losses]))
        return stats, targets.reduce(losses, reduction)

    def repair_stored_exps(
        self,
        exps: Tensor,
        h: Tensor,
        w: Tensor,
        first: int,
        target: Tensor,
        partial: Partial,
        stats: RowStats,
    ) -> None:
        start, count = (
            first // self.config.reference_block,
            exps.shape[1] // self.config.reference_block,
        )
        references = partial.references[:, start : start + count]
        factor = _exp_difference(references, stats.reference[:, None])
        if exps.is_cuda or bool((factor != 1).any()):
            apply_rowwise(scale_rows_, exps.view(-1, self.config.reference_block), factor.flatten())

    def add_grad_hidden(self, sums: Tensor, exps: Tensor, w: Tensor, *, fresh: bool) -> None:
        matmul_into(sums, exps, w, add=not fresh)

    def add_grad_weight(self, sums: Tensor, exps: Tensor, scaled: Tensor, *, fresh: bool) -> None:
        matmul_into(sums, exps.t(), scaled, add=not fresh)

    def dx_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return dtype

    def finish_dx(
        self, out: Tensor, sums: Tensor, w: Tensor, targets: Targets, scale: Tensor, weight: Tensor
    ) -> None:
        apply_rowwise(finish_dx_, out, sums, targets.safe_index, scale, weight, whole=(w,))

    def scale_rows(self, out: Tensor, x: Tensor, scale: Tensor) -> None:
        apply_rowwise(scaled_rows_, out, x, scale)

    def target_grad(self, h: Tensor, coefficient: Tensor, targets: Targets) -> TargetGrad:
        return TargetRows(h, coefficient, targets)

    def finish_dw(
        self,
        out: Tensor,
        exps: Tensor,
        scaled: Tensor,
        part: TargetGrad,
        first: int,
        unit: Tensor,
    ) -> None:
        totals, lines = part.lines
        for rows in _blocks(out.shape[0], self.config.window):
            to = out[rows]
            sums = to if out.dtype == totals.dtype else totals.new_empty(to.shape)
            matmul_into(sums, exps[:, rows].t(), scaled, add=False)
            line = lines[first + rows.start : first + rows.stop]
            apply_rowwise(finish_dw_, to, sums, line, whole=(totals, unit))

    def add_target_grad(self, sums: Tensor, part: TargetGrad, first: int) -> None:
        part.add_to(sums, part.targets.safe_index - first)


class TargetRows:
    """The targets' part of dW: c_i h_i, summed by target when it is asked for."""

    def __init__(self, h: Tensor, coefficient: Tensor, targets: Targets) -> None:
        self.h, self.coefficient, self.targets = h, coefficient, targets

    @cached_property
    def lines(self) -> tuple[Tensor, Tensor]:
        """GradAccumulator (L, D) in the dtype of sums, one line for each target that occurs, and line (V,).

        Vocabulary entries that are no target share a line of 0.
        """
        (tokens, hidden), vocab = self.h.shape, self.targets.vocab
        if tokens < vocab:
            # a target's line is the number of its first row
            order = torch.arange(tokens, device=self.h.device)
            line = torch.full((vocab,), tokens, device=self.h.device)
            line.scatter_reduce_(0, self.targets.safe_index, order, "amin")
        else:
            line = torch.arange(vocab, device=self.h.device)
        sums = self.coefficient.new_zeros(min(tokens + 1, vocab), hidden)
        self.add_to(sums, line[self.targets.safe_index])
        return sums, line

    def add_to(self, out: Tensor, line: Tensor) -> None:
        """Add c_i h_i to line_i (N,) of `out`, if it has that, in the dtype of sums.

        The order is fixed.
        """
        there = (line >= 0) & (line < len(out))
        line = torch.where(there, line, 0)
        for rows in _row_blocks(self.h):
            part = self.h[rows] * self.coefficient[rows, None]
            part.masked_fill_(~there[rows, None], 0)
            if out.is_cuda:  # the one of the two that has a fixed order there
                out.index_put_((line[rows],), part, accumulate=True)
            else:
                out.index_add_(0, line[rows], part)


def _dense(x: Tensor) -> Tensor:
    """Return x (M, K) in a layout that a GEMM can address, copied if need be."""
    if (x.stride(1) == 1 and x.stride(0) >= x.shape[1]) or (
        x.stride(0) == 1 and x.stride(1) >= x.shape[0]
    ):
        return x
    return x.contiguous()


def matmul_into(out: Tensor, a: Tensor, b: Tensor, *, add: bool) -> None:
    """`out = a @ b`, or `out += a @ b`, accumulating in out's dtype."""
    if a.dtype == out.dtype:
        torch.addmm(out, a, b, beta=int(add), out=out)
    elif not a.is_cuda:
        _matmul_upcast(out if add else out.zero_(), a, b)
    elif add:
        torch.addmm(out, a, b, out_dtype=out.dtype, out=out)
    else:
        torch.mm(a, b, out_dtype=out.dtype, out=out)


def _matmul_upcast(out: Tensor, a: Tensor, b: Tensor) -> None:
    """`out += a @ b` where no product of 16-bit operands has float32 results: on a CPU."""
    for rows in _blocks(a.shape[0], UPCAST_BLOCK):
        for inner in _blocks(a.shape[1], UPCAST_BLOCK):
            out[rows].addmm_(a[rows, inner].to(out.dtype), b[inner].to(out.dtype))


def _exp_difference(a: Tensor, b: Tensor) -> Tensor:
    """Return exp(a - b), 1 where both are the same infinity."""
    return torch.where(a == b, 1, torch.exp(a - b))


def _blocks(count: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, count)) for start in range(0, count, size))


def apply_rowwise(
    function: Callable[..., None], *rowwise: Tensor, whole: tuple[Tensor | None, ...] = ()
) -> None:
    """Call `function` fused, or on blocks of the rows of `rowwise` with all of `whole`."""
    if can_fuse(rowwise[0]):
        fused(function)(*rowwise, *whole)
        return
    for rows in _row_blocks(next(x for x in rowwise if x.ndim == 2)):
        function(*(x[rows] for x in rowwise), *whole)


def _row_blocks(x: Tensor) -> Iterator[slice]:
    """Cut the rows of `x` into blocks of `row_block_bytes`."""
    row_bytes = x.shape[1] * sum_dtype(x.dtype).itemsize
    return _blocks(x.shape[0], max(1, row_block_bytes(x.device.type) // row_bytes))
