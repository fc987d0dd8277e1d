"""Sampled gradients on the CuTe DSL kernels: what their launches are given.

A token whose estimate of lse is too low to have room for its entries is sampled once more, with its
lse as the estimate: a launch that exits at once where there is no such token.  Which ones these are
depends on the estimate and on lse, not on what was kept, so that expectations stay as they are.
"""

import copy
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from cutefce.cute_kernels.arch import arch_named
from cutefce.cute_kernels.jit.cache import compiled
from cutefce.cute_kernels.sampling_set import SamplingKernels, sampling_kernels
from cutefce.cute_kernels.spec import SparseRowsSpec
from cutefce.ops.planning.sample_sizes import expected_limit, slots
from cutefce.ops.planning.step_memory import added_rows
from cutefce.ops.primitives.row_selection import (
    gather_rows,
    has_aligned_rows,
    select_on_device,
)
from cutefce.ops.rows.blocks import blocks
from cutefce.ops.rows.coefficients import RankOne, RowCoefficients
from cutefce.ops.rows.selection import RowSelection
from cutefce.ops.rows.statistics import RowStats
from cutefce.ops.rows.targets import Targets
from cutefce.ops.sampling.samples import Sampling

if TYPE_CHECKING:
    from cutefce.ops.primitives.cute_projection import CuteProjection, PartialLse


class SamplingSteps:
    """The steps of `SamplingProjection` on the kernels, for a `CuteProjection`."""

    def sample(
        self,
        h: Tensor,
        w: Tensor,
        reference: Tensor,
        estimate: Tensor,
        targets: Targets,
        sampling: Sampling,
    ) -> "tuple[PartialLse, KernelSamples]":
        """See `SamplingProjection`; the entries are those of `fill`."""
        own = cast("CuteProjection", self)
        samples = KernelSamples.empty(own, w, reference, sampling.samples)
        estimate = torch.where(targets.active, estimate, torch.inf)
        return samples.fill(own, h, w, reference, estimate, targets, sampling), samples

    def finish_samples(
        self,
        samples: "KernelSamples",
        h: Tensor,
        w: Tensor,
        stats: RowStats,
        estimate: Tensor,
        targets: Targets,
        sampling: Sampling,
    ) -> None:
        """See `SamplingProjection`."""
        own = cast("CuteProjection", self)
        samples.finish(own, h, w, stats, estimate, targets, sampling)


@dataclass(frozen=True)
class KernelSamples:
    """The entries that were chosen of N tokens, K at most of each, as kernels have them."""

    kernels: SamplingKernels
    memory: tuple[Tensor, ...]
    """(N + 1, K), (N + 1,) and (N + 1,): what the fields below have, and a row of no token."""

    @staticmethod
    def empty(
        projection: "CuteProjection", w: Tensor, like: Tensor, samples: int
    ) -> "KernelSamples":
        """Return undefined ones of tokens and with the device of `like` (N,)."""
        row_sums, tokens, most = projection.kernels.row_sums, len(like), slots(samples, len(w))
        kernels = sampling_kernels(arch_named(row_sums.arch), row_sums, tokens, most)
        entries = like.new_empty(tokens + 1, most, dtype=torch.int64)
        counts = like.new_empty(tokens + 1, dtype=torch.int32)
        return KernelSamples(kernels, (entries, counts, like.new_empty(tokens + 1)))

    @property
    def entries(self) -> Tensor:
        """(N, K) int64: v above e / q in 32 bits, ascending; u in its place until `finish`."""
        return self.memory[0][:-1]

    @property
    def counts(self) -> Tensor:
        """(N,) int32: entries of each token; -1 for none, where more were kept than fit."""
        return self.memory[1][:-1]

    @property
    def threshold(self) -> Tensor:
        """(N,) that of `common.sampling`."""
        return self.memory[2][:-1]

    def fill(
        self,
        projection: "CuteProjection",
        h: Tensor,
        w: Tensor,
        reference: Tensor,
        estimate: Tensor,
        targets: Targets,
        sampling: Sampling,
    ) -> "PartialLse":
        """Choose entries by the estimate (N,) of lse, +inf for no entries; return row sums."""
        row_hash = torch.empty_like(self.counts)
        none = estimate.new_full((len(estimate), 1), -math.inf)
        given = none, estimate.contiguous(), sampling.rows, sampling.seed
        results = self.threshold, row_hash, self.counts
        compiled(self.kernels.prepare)(*given, *results, 0.0, math.log2(sampling.samples), 1)
        chosen = self.threshold, row_hash, self.counts, self.entries, targets.first
        operands = h, w, (0, len(w)), reference, targets
        return projection.launch_sums(self.kernels.project_exp, *operands, samples=chosen)

    def finish(
        self,
        projection: "CuteProjection",
        h: Tensor,
        w: Tensor,
        stats: RowStats,
        estimate: Tensor,
        targets: Targets,
        sampling: Sampling,
    ) -> None:
        """Sample tokens with a low estimate again, and put entries in their final form."""
        lse, most = stats.lse, math.log(expected_limit(sampling.samples) / sampling.samples)
        again = targets.active & (lse - estimate > most)
        y = torch.where(again, targets.index, targets.options.ignore_index)
        arch = projection.kernels.row_sums.arch
        selection = select_on_device(arch, y, targets.options.ignore_index, len(y))
        selection = replace(selection, may_skip=True)
        order = selection.order
        inside = torch.arange(len(y), device=y.device) < selection.count
        part, own = _of_rows(targets, selection), replace(sampling, rows=sampling.rows[order])
        refilled = KernelSamples.empty(projection, w, estimate, sampling.samples)
        rows = gather_rows(projection.kernels, h, selection)
        of_rows = stats.reference[order], torch.where(inside, lse[order], math.inf)
        refilled.fill(projection, rows, w, *of_rows, part, own)
        place = torch.where(inside, order, len(y))  # others go to the row of no token
        for all_rows, some in zip(self.memory, refilled.memory, strict=True):
            all_rows.index_copy_(0, place, some[:-1])
        scale = None if targets.logits is None else targets.logits.row_scale
        given = self.entries, self.counts, self.threshold, stats.reference
        compiled(self.kernels.sort)(*given, scale if self.kernels.sort.softcap else None)

    def grad_hidden(
        self,
        out: Tensor,
        w: Tensor,
        targets: Targets,
        coefficients: RowCoefficients,
        order: Tensor | None,
    ) -> None:
        """Write s_i Σ (e / q) w_v + c_i w_y of token i to row i, or `order`_i, of out (N, D)."""
        spec = _with_result(self.kernels.grad_hidden, out)
        factors = coefficients.scale.contiguous(), coefficients.target.contiguous()
        places = targets.index, targets.index if order is None else order, int(order is not None)
        compiled(spec)(out, w, (self.entries, self.counts, *factors, *places))

    def by_class(
        self, targets: Targets, coefficients: RowCoefficients, stats: RowStats
    ) -> "ClassLists":
        """Return the entries of every class, with s_i e / q, and c_i of its targets."""
        total, vocab = len(self.counts) * (self.entries.shape[1] + 1), targets.vocab
        lists, ends = self.entries.new_empty(total), self.counts.new_empty(1 + vocab)
        between = self.counts.new_empty(total), self.counts.new_empty(vocab)
        factors = coefficients.scale.contiguous(), coefficients.target.contiguous()
        selection = targets.selection
        order, maps = (targets.index, 0) if selection is None else (selection.order, 1)
        rows = self.entries, self.counts, targets.index, *factors, order, maps
        compiled(self.kernels.list_classes)(rows, (lists, ends, *between))
        # NaN if a token has no gradient, which is in the references of float16
        zeros = coefficients.scale * 0 + torch.where(targets.active, stats.reference, 0) * 0
        start = zeros.sum(0, keepdim=True)
        return ClassLists(self.kernels, lists, ends, start)


@dataclass(frozen=True)
class ClassLists:
    """The entries of every class, see `cute_kernels.sampling.list_samples`."""

    kernels: SamplingKernels
    entries: Tensor
    ends: Tensor
    start: Tensor
    """(1,) 0, or NaN if a token has no defined gradient."""

    def grad_weight(
        self,
        dw: Tensor | None,
        h: Tensor,
        dbias: Tensor | None,
        every: RankOne | None,
        *,
        adds: bool,
        in_place: bool,
    ) -> None:
        """Write dW (V, D), or add to it, and the sums of dbias (V,), of hidden states h (M, D).

        Sums are formed beside dW, some rows at a time, unless `in_place`.
        """
        if dw is not None and every is None and (in_place or not adds):
            if adds and dbias is not None:
                dbias.zero_()
            self._launch(dw, h, dbias, 0, adds=adds)
            return
        for rows, sums in self._blocks(h):
            self._launch(sums, h, None if dbias is None else dbias[rows], rows.start)
            if every is not None:
                term = every.rows(rows)
                sums.addr_(term.factor, term.row)
            if dw is not None and adds:
                dw[rows] += sums
            elif dw is not None:
                dw[rows] = sums

    def _blocks(self, h: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Yield rows of dW with memory for their sums."""
        vocab, hidden = len(self.ends) - 1, h.shape[1]
        rows = min(added_rows(hidden, self.start.itemsize, h.device.type), vocab)
        room = self.start.new_empty(rows, hidden)
        for part in blocks(vocab, rows):
            yield part, room[: part.stop - part.start]

    def _launch(
        self, out: Tensor, h: Tensor, dbias: Tensor | None, first: int, adds: bool = False
    ) -> None:
        spec, bias = self.kernels.grad_weight, dbias is not None
        spec = replace(_with_result(spec, out), adds=adds, bias=bias)
        ends = self.ends[first : first + len(out) + 1]
        compiled(spec)(out, h, (self.entries, ends, self.start, dbias))


def _of_rows(targets: Targets, selection: RowSelection) -> Targets:
    """Return `targets` of the rows of a selection of them."""
    every = copy.copy(targets)
    every.selection = None
    part = every.per_token(selection.order)
    part.selection = selection
    return part


def _with_result(spec: SparseRowsSpec, out: Tensor) -> SparseRowsSpec:
    """Return the kernel whose result has the dtype of `out`."""
    name = str(out.dtype).removeprefix("torch.")
    return spec if name == spec.dtype else replace(spec, out=name)


def is_in_place(buffer: Tensor, dtype: torch.dtype) -> bool:
    """Whether kernels with operands of `dtype` can add to `buffer` (V, D)."""
    return has_aligned_rows(buffer) and buffer.dtype in (dtype, torch.float32)
