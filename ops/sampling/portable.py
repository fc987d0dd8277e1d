"""Sampled gradients in plain torch: entries chosen of tiles of exponentials, and their products.

No step waits for a GPU.  A CPU looks at what was chosen, and multiplies these entries alone; a GPU
gets them as a matrix that is zero elsewhere, one window at a time.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from cutefce.ops.planning.sample_sizes import expected_limit, slots
from cutefce.ops.planning.step_memory import GATHERED_COLUMNS, sampled_rows
from cutefce.ops.primitives.portable_gradients import matmul_into
from cutefce.ops.rows.blocks import blocks, row_blocks
from cutefce.ops.rows.statistics import RowStats
from cutefce.ops.rows.targets import Targets
from cutefce.ops.sampling.estimate_classes import (
    AllClasses,
    EstimateClasses,
    estimate_classes,
    target_places,
)
from cutefce.ops.sampling.random_bits import random_bits, row_states
from cutefce.ops.sampling.samples import Samples, Sampling

if TYPE_CHECKING:
    from cutefce.ops.primitives.portable_projection import PartialSums

FAR = 64.0
"""Nats that a reference may exceed the estimate of lse by; a token beyond is done exactly."""


class PortableSamplingSteps(AllClasses):
    """The steps of `SamplingProjection` for a `PortableProjection` that form no logits."""

    def choose_classes(self, targets: Targets, sampling: Sampling) -> EstimateClasses:
        """See `SamplingProjection`."""
        return estimate_classes(targets, sampling)

    def target_places(self, chosen: EstimateClasses, targets: Targets) -> tuple[Tensor, Tensor]:
        """See `SamplingProjection`."""
        return target_places(chosen, targets)

    def estimate_lse(
        self,
        frequent: "PartialSums | None",
        drawn: "PartialSums",
        log_ratio: float,
        target_logit: Tensor,
    ) -> Tensor:
        """See `SamplingProjection`."""
        terms = [target_logit[:, None], drawn.sums.log() + (drawn.references + log_ratio)]
        if frequent is not None:
            terms.append(frequent.sums.log() + frequent.references)
        return torch.cat(terms, 1).logsumexp(1)

    def finish_samples(
        self,
        samples: Samples,
        h: Tensor,
        w: Tensor,
        stats: RowStats,
        targets: Targets,
        sampling: Sampling,
    ) -> None:
        """See `SamplingProjection`."""
        factor = (samples.estimate - stats.reference).exp().div_(sampling.samples)
        samples.exps.mul_(factor[:, None])


class TileSampler:
    """Chooses entries of tiles of exponentials, in the order of columns."""

    def __init__(self, sampling: Sampling, estimate: Tensor, targets: Targets, vocab: int) -> None:
        tokens, self.slots = len(estimate), slots(sampling.samples, vocab)
        self.sampling, self.estimate, self.targets = sampling, estimate, targets
        self.states = row_states(sampling.seed, sampling.rows)
        # the last slot of a token receives what is not kept
        self.columns = estimate.new_zeros(tokens, self.slots + 1, dtype=torch.int32)
        self.exps = estimate.new_zeros(tokens, self.slots + 1)
        self.counts = estimate.new_zeros(tokens, dtype=torch.int32)
        self.expected = torch.zeros_like(estimate)
        self.far = torch.zeros_like(targets.active)

    def take(self, rows: slice, first: int, exps: Tensor, references: Tensor) -> None:
        """Choose entries of `exps` (R, P, C) from column `first` on, which are overwritten.

        They are relative to `references` (R, P).
        """
        distance = references - self.estimate[rows, None]
        self.far[rows] |= (distance > FAR).any(1)
        factor = distance.clamp_(max=FAR).exp_().mul_(self.sampling.samples)
        factor.masked_fill_(~self.targets.active[rows, None], 0)
        exps.mul_(factor[:, :, None])
        flat = exps.flatten(1)
        ids = torch.arange(first, first + flat.shape[1], device=flat.device)
        for part in blocks(len(flat), sampled_rows(flat.shape[1], exps.device.type)):
            self._choose(slice(rows.start + part.start, rows.start + part.stop), ids, flat[part])

    def _choose(self, rows: slice, columns: Tensor, relative: Tensor) -> None:
        """Choose entries of p̂ / θ (R, C)."""
        q, slots, counts = relative.clamp(max=1), self.slots, self.counts[rows]
        self.expected[rows] += q.sum(1)
        bits = random_bits(self.states[rows], columns + self.targets.first, self.sampling.seed)
        kept = (bits.to(torch.int64) & 0xFFFFFFFF) < q.mul_(2.0**32).to(torch.int64)
        del q, bits  # freed before the next ones are allocated
        slot = kept.cumsum(1).add_(counts[:, None] - 1)
        slot.masked_fill_(~kept | (slot >= slots), slots)
        self.columns[rows].scatter_(1, slot, columns.to(torch.int32).expand(slot.shape))
        self.exps[rows].scatter_(1, slot, relative.clamp_(min=1))
        counts += kept.sum(1, dtype=torch.int32)

    def samples(self) -> Samples:
        """Return the entries, of which `exps` are relative to θ times the exponential of lse."""
        within = (self.expected <= expected_limit(self.sampling.samples)) & ~self.far
        exact = self.targets.active & ~(within & (self.counts <= self.slots))
        counts = self.counts.masked_fill_(exact, 0)
        columns, exps = self.columns[:, : self.slots], self.exps[:, : self.slots]
        return Samples(columns, exps, counts, self.estimate, exact)


@dataclass(frozen=True)
class SampledExps:
    """A matrix (N, K) of exponentials of which few are not 0: sampled ones, and whole rows.

    Products take it for a tensor.
    """

    tokens: Tensor
    """(E,) int64: rows of the entries, ascending."""
    columns: Tensor
    """(E,) int64: their columns."""
    values: Tensor
    """(E,) in the dtype of sums."""
    whole: Tensor
    """(F,) int64: rows that are done exactly."""
    exps: Tensor
    """(F, K): these rows."""
    is_transposed: bool = False

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of stored exponentials."""
        return self.exps.dtype

    def t(self) -> "SampledExps":
        """Return the transposed matrix."""
        return replace(self, is_transposed=not self.is_transposed)

    def __getitem__(self, index: tuple[slice, slice]) -> "SampledExps":
        """Return a slice of the columns; the first slice is that of all rows."""
        _, columns = index
        exps = self.exps[:, columns]
        if exps.shape == self.exps.shape:
            return self
        inside = (self.columns >= columns.start) & (self.columns < columns.stop)
        own = self.tokens[inside], self.columns[inside] - columns.start, self.values[inside]
        return SampledExps(*own, self.whole, exps)

    def multiply_into(self, out: Tensor, b: Tensor) -> None:
        """`out += self @ b`; sums have the dtype of `out`, and entries are added in their order."""
        rows, index, values = self.tokens, self.columns, self.values
        if self.is_transposed:
            rows, order = self.columns.sort(stable=True)
            index, values = self.tokens[order], values[order]
            del order
        starts = torch.searchsorted(rows, torch.arange(len(out)))
        for part in blocks(out.shape[1], GATHERED_COLUMNS):
            of = b[:, part].to(out.dtype).contiguous()
            out[:, part] += F.embedding_bag(
                index, of, starts, mode="sum", per_sample_weights=values
            )
            del of  # freed before the next ones are allocated
        if self.is_transposed and len(self.whole):
            own = b if len(self.whole) == len(b) else b[self.whole]
            matmul_into(out, self.exps.t(), own, accumulate=True)
        elif len(self.whole):
            for part in row_blocks(out.new_empty(()).expand(len(self.whole), out.shape[1])):
                products = out.new_empty(part.stop - part.start, out.shape[1])
                matmul_into(products, self.exps[part], b, accumulate=False)
                out.index_add_(0, self.whole[part], products)

    def weighted_sum(self, factor: Tensor) -> Tensor:
        """Return Σ_i factor_i e_i (K,) in the dtype of sums."""
        factor = factor.to(self.values.dtype)
        terms = self.values * factor[self.tokens]
        total = terms.new_zeros(self.exps.shape[1]).index_add_(0, self.columns, terms)
        return total + factor[self.whole] @ self.exps.to(factor.dtype)


Recompute = Callable[[Tensor, tuple[int, int], Tensor, Targets, Tensor], None]
"""Writes exponentials: of hidden states, a window, references and targets, and where they go."""


def sparse_windows(
    h: Tensor,
    vocab: int,
    window: int,
    samples: Samples,
    reference: Tensor,
    targets: Targets,
    recompute: Recompute,
) -> Iterator[tuple[int, int, SampledExps]]:
    """Yield windows of columns with what they hold, which the CPU looks at."""
    whole, used = samples.exact.nonzero()[:, 0], 0
    if 0 < len(whole) < len(h):
        h, reference, targets = h[whole], reference[whole], targets.per_token(whole)
    if len(samples.counts):
        used = int(samples.counts.amax())
    columns, exps = samples.columns[:, :used], samples.exps[:, :used]
    is_entry = torch.arange(used) < samples.counts[:, None]
    buffer = h.new_empty(len(whole), window)
    for columns_of in blocks(vocab, window):
        first, last = columns_of.start, columns_of.stop
        if len(whole):
            recompute(h, (first, last), reference, targets, buffer)
        inside = (columns >= first).logical_and_(columns < last).logical_and_(is_entry)
        tokens, slot = inside.nonzero().unbind(1)
        del inside  # freed before the entries are gathered
        entries = tokens, columns[tokens, slot].to(torch.int64) - first, exps[tokens, slot]
        yield first, last, SampledExps(*entries, whole, buffer[:, : last - first])


def dense_windows(
    h: Tensor,
    vocab: int,
    window: int,
    samples: Samples,
    reference: Tensor,
    targets: Targets,
    recompute: Recompute,
) -> Iterator[tuple[int, int, Tensor]]:
    """Yield windows of columns as matrices (N, K): nothing looks at what they hold."""
    own = torch.where(samples.exact, reference, torch.inf)  # the exponentials of others are 0
    is_entry = torch.arange(samples.columns.shape[1], device=h.device) < samples.counts[:, None]
    buffer = h.new_empty(len(h), window)
    for columns in blocks(vocab, window):
        first, last = columns.start, columns.stop
        recompute(h, (first, last), own, targets, buffer)
        place = samples.columns - first
        inside = is_entry & (place >= 0) & (place < last - first)
        values = samples.exps.masked_fill(~inside, 0).to(h.dtype)
        # at most two terms of a place are not 0: their order does not matter
        buffer.scatter_add_(1, place.masked_fill_(~inside, 0).to(torch.int64), values)
        yield first, last, buffer[:, : last - first]
