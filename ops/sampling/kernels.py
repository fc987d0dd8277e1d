"""Sampled gradients on the CuTe DSL kernels: what their launches are given.

Where a token's estimate of lse is too low, its lse decides in the end: of the entries that were
kept, `sort_samples` leaves out those that lse does not keep.  If there was no room for them, the
token is sampled once more, with its lse; this finds the same entries, so that what decides on it,
the number of those before, has no part in the result.  The launches exit at once where there is no
such token.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from cutefce.cute_kernels.jit.cache import compiled
from cutefce.cute_kernels.sampling_set import SamplingKernels, sampling_kernels
from cutefce.cute_kernels.spec import ChooseClassesSpec, PrepareSamplesSpec, SparseRowsSpec
from cutefce.ops.dtypes import dtype_name
from cutefce.ops.planning.sample_sizes import (
    estimate_count,
    frequent_count,
    slots,
)
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
from cutefce.ops.sampling.estimate_classes import AllClasses, EstimateClasses
from cutefce.ops.sampling.samples import Sampling

if TYPE_CHECKING:
    from cutefce.ops.primitives.cute_projection import CuteProjection, PartialLse


class SamplingSteps(AllClasses):
    """The steps of `SamplingProjection` on the kernels, for a `CuteProjection`."""

    def choose_classes(self, targets: Targets, sampling: Sampling) -> EstimateClasses:
        """See `SamplingProjection`."""
        own, total, index = cast("CuteProjection", self), sampling.vocab, targets.index
        frequent = frequent_count(total)
        classes = index.new_empty(estimate_count(total))
        counts = index.new_empty(total, dtype=torch.int32)
        numbers = frequent, targets.first, targets.options.ignore_index
        kernel = ChooseClassesSpec(own.kernels.row_sums.arch, "choose")
        compiled(kernel)(index, sampling.seed, classes, counts, *numbers)
        return EstimateClasses(classes, frequent)

    def target_places(self, chosen: EstimateClasses, targets: Targets) -> tuple[Tensor, Tensor]:
        """See `SamplingProjection`."""
        own, index = cast("CuteProjection", self), targets.index
        places = torch.empty_like(index), torch.empty_like(index)
        kernel = ChooseClassesSpec(own.kernels.row_sums.arch, "place")
        compiled(kernel)(index, chosen.classes, *places, chosen.frequent, targets.first)
        return places

    def estimate_lse(
        self,
        frequent: "PartialLse | None",
        drawn: "PartialLse",
        log_ratio: float,
        target_logit: Tensor,
    ) -> Tensor:
        """See `SamplingProjection`."""
        own, estimate = cast("CuteProjection", self), torch.empty_like(target_logit)
        kernel = PrepareSamplesSpec(own.kernels.row_sums.arch, "estimate")
        sums = drawn.sums if frequent is None else frequent.sums
        numbers = log_ratio / math.log(2), int(frequent is None)
        compiled(kernel)(sums, drawn.sums, target_logit, estimate, *numbers)
        return estimate

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
        rows = estimate, sampling.rows, sampling.seed
        results = samples.threshold, samples.row_hash, samples.counts
        prepare = compiled(samples.kernels.prepare)
        prepare(*rows, *results, math.log2(sampling.samples), 1)
        return samples.fill(own, h, w, reference, targets), samples

    def finish_samples(
        self,
        samples: "KernelSamples",
        h: Tensor,
        w: Tensor,
        stats: RowStats,
        targets: Targets,
        sampling: Sampling,
    ) -> None:
        """See `SamplingProjection`."""
        own = cast("CuteProjection", self)
        samples.finish(own, h, w, stats, targets, sampling)


@dataclass(frozen=True)
class KernelSamples:
    """The entries that were chosen of N tokens, K at most of each, as kernels have them."""

    kernels: SamplingKernels
    entries: Tensor
    """(N, K) int64: v above e / q in 32 bits, ascending; u in its place until `finish`."""
    counts: Tensor
    """(N,) int32: entries of each token; -1 for none, where more were kept than fit."""
    threshold: Tensor
    """(N,) that of `common.sampling`."""
    row_hash: Tensor
    """(N,) int32"""

    @staticmethod
    def empty(
        projection: "CuteProjection", w: Tensor, like: Tensor, samples: int
    ) -> "KernelSamples":
        """Return undefined ones of tokens and with the device of `like` (N,)."""
        tokens, most = len(like), slots(samples, len(w))
        kernels = sampling_kernels(projection.kernels, tokens, most)
        entries = like.new_empty(tokens, most, dtype=torch.int64)
        counts, row_hash = like.new_empty(2, tokens, dtype=torch.int32)
        return KernelSamples(kernels, entries, counts, torch.empty_like(like), row_hash)

    def fill(
        self,
        projection: "CuteProjection",
        h: Tensor,
        w: Tensor,
        reference: Tensor,
        targets: Targets,
        order: Tensor | None = None,
    ) -> "PartialLse":
        """Choose the entries of rows, or of rows `order` (N,); return row sums."""
        maps = targets.index if order is None else order, int(order is not None)
        chosen = self.threshold, self.row_hash, self.counts, self.entries, targets.first, *maps
        operands = h, w, (0, len(w)), reference, targets
        return projection.launch_sums(self.kernels.project_exp, *operands, samples=chosen)

    def finish(
        self,
        projection: "CuteProjection",
        h: Tensor,
        w: Tensor,
        stats: RowStats,
        targets: Targets,
        sampling: Sampling,
    ) -> None:
        """Sample tokens without room for their entries again, and put all in their final form."""
        ignored, most = targets.options.ignore_index, self.entries.shape[1]
        again = torch.where(self.counts > most, targets.index, ignored)
        arch = projection.kernels.row_sums.arch
        selection = select_on_device(arch, again, ignored, len(again))
        selection = selection.skipping()
        order, own_reference = selection.order, torch.empty_like(self.threshold)
        of_rows = stats.reference, stats.sum_exp
        log2_samples = math.log2(sampling.samples)
        given, results = (order, selection.count, *of_rows), (self.threshold, self.counts)
        compiled(self.kernels.prepare_again)(*given, *results, own_reference, log2_samples)
        rows = gather_rows(projection.kernels, h, selection)
        self.fill(projection, rows, w, own_reference, _of_rows(targets, selection), order)
        scale = None if targets.logits is None else targets.logits.row_scale
        scale = scale if self.kernels.sort.softcap else None
        vectors = self.counts, self.threshold, self.row_hash, *of_rows, scale
        compiled(self.kernels.sort)(self.entries, *vectors, log2_samples, targets.first)

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
        start, factors = self.threshold.new_empty(1), (coefficients.scale, coefficients.target)
        selection = targets.selection
        order, maps = (targets.index, 0) if selection is None else (selection.order, 1)
        rows = self.entries, self.counts, targets.index, *(x.contiguous() for x in factors)
        # of float16, the reference tells which rows have no gradient
        more = order, maps, stats.reference, targets.options.ignore_index
        compiled(self.kernels.list_classes)((*rows, *more), (lists, ends, *between, start))
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
    """Return `targets` of the rows of a selection of them, as far as row sums need them."""
    logits, options = targets.logits, targets.options.per_token()
    logits = None if logits is None else logits.rows(selection.order)
    part = Targets(selection.targets, targets.vocab, options, logits=logits, first=targets.first)
    part.selection = selection
    return part


def _with_result(spec: SparseRowsSpec, out: Tensor) -> SparseRowsSpec:
    """Return the kernel whose result has the dtype of `out`."""
    name = dtype_name(out.dtype)
    return spec if name == spec.dtype else replace(spec, out=name)


def is_in_place(buffer: Tensor, dtype: torch.dtype) -> bool:
    """Whether kernels with operands of `dtype` can add to `buffer` (V, D)."""
    return has_aligned_rows(buffer) and buffer.dtype in (dtype, torch.float32)
