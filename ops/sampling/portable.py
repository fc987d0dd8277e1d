"""Steps of sampled gradients in plain torch: entries chosen of tiles of exponentials, and products.

No step waits for a GPU.  A CPU looks at what was chosen, and multiplies these entries alone; a GPU
gets them as a matrix that is zero elsewhere, one window at a time.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from cutefce.cute_kernels.integers import round_up
from cutefce.ops.primitives.row_selection import row_range
from cutefce.ops.primitives.weighted_sum import RowFactors
from cutefce.ops.program.run import Call
from cutefce.ops.program.steps import Step
from cutefce.ops.program.views import scale_of, states_of
from cutefce.ops.rows.blocks import blocks
from cutefce.ops.rows.targets import Targets
from cutefce.ops.sampling.estimate_classes import estimate_classes, target_places
from cutefce.ops.sampling.estimates import class_sums, sampling_of
from cutefce.ops.sampling.random_bits import random_bits, row_states
from cutefce.ops.sampling.sample_sizes import chosen_rows, expected_limit, frequent_count
from cutefce.ops.sampling.sampled_exps import SampledExps

FAR = 64.0
"""Nats that a reference may exceed the estimate of lse by; a token beyond is done exactly."""


def choose_classes(call: Call, s: Step) -> None:
    """Choose the classes of the estimates."""
    call.values["classes"] = estimate_classes(call.inputs.targets, sampling_of(call))


def place_targets(call: Call, s: Step) -> None:
    """Find the targets among them."""
    own = call.values["classes"], frequent_count(sampling_of(call).vocab)
    call.values["places"] = target_places(*own, call.inputs.targets)


def estimate(call: Call, s: Step) -> None:
    """Estimate log-sum-exps, +inf of ignored tokens."""
    (frequent, drawn, log_ratio), logit = class_sums(call), call.values["logits"]
    terms = [logit[:, None], drawn.sums.log() + (drawn.references + log_ratio)]
    if frequent is not None:
        terms.append(frequent.sums.log() + frequent.references)
    call.values["estimate"] = torch.cat(terms, 1).logsumexp(1)


@dataclass(frozen=True)
class Entries:
    """The entries (i, v), v not the target, of N tokens, less than K of each.

    They are behind the terms of other target classes, of which there are as many of each token, and
    before a place for what is not kept.
    """

    columns: Tensor
    """(N, K) int32: v, a row of this rank's weight, ascending."""
    values: Tensor
    """(N, K) e / q in the dtype of sums, relative to the reference ρ_i."""
    counts: Tensor
    """(N,) int32: entries of each token, the first ones of its row; what is beyond is undefined."""
    exact: Tensor
    """(N,) bool: the token is done exactly, of all columns, and no entries were chosen of it."""

    @staticmethod
    def of(call: Call, first: int) -> "Entries":
        """Return those of a call, without the first places."""
        columns, values = call.view("columns").view(torch.int32), call.view("values")
        counts, exact = call.view("counts")[0].view(torch.int32), call.view("exact")[0]
        return Entries(columns[:, first:], values[:, first:], counts, exact.view(torch.bool))


def sample(call: Call, s: Step) -> None:
    """Sum the exponentials of all columns, and choose entries of them."""
    x, sampler = call.inputs, TileSampler(call)
    given = states_of(call, s), x.w, call.values["logits"], x.targets
    call.values["partials"].append(x.primitives.projection.project_tiles(*given, sampler.take))
    sampler.finish()


class TileSampler:
    """Chooses entries of tiles of exponentials, in the order of columns.

    Entry (i, v) is kept with probability q = min(1, p̂ / θ), p̂ the exponential relative to the
    estimate of lse; an exponential has the factor du/dt of a softcap.  Values are p̂ / (q θ), which
    is 1 unless q is: they are relative to the estimate, and their unit is θ.
    """

    def __init__(self, call: Call) -> None:
        self.sampling, self.targets = sampling_of(call), call.inputs.targets
        self.estimate = call.values["estimate"]
        self.entries = Entries.of(call, call.program.problem.soft)
        self.slots = self.entries.columns.shape[1] - 1
        self.states = row_states(self.sampling.seed, self.sampling.rows)
        self.expected = torch.zeros_like(self.estimate)
        self.entries.counts.zero_()
        self.far = self.entries.exact.zero_()

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
        for part in blocks(len(flat), chosen_rows(flat.shape[1], exps.device.type)):
            self._choose(slice(rows.start + part.start, rows.start + part.stop), ids, flat[part])

    def _choose(self, rows: slice, columns: Tensor, relative: Tensor) -> None:
        """Choose entries of p̂ / θ (R, C)."""
        q, slots, counts = relative.clamp(max=1), self.slots, self.entries.counts[rows]
        self.expected[rows] += q.sum(1)
        bits = random_bits(self.states[rows], columns + self.targets.first, self.sampling.seed)
        kept = (bits.to(torch.int64) & 0xFFFFFFFF) < q.mul_(2.0**32).to(torch.int64)
        del q, bits  # freed before the next ones are allocated
        slot = kept.cumsum(1).add_(counts[:, None] - 1)
        slot.masked_fill_(~kept | (slot >= slots), slots)
        self.entries.columns[rows].scatter_(1, slot, columns.to(torch.int32).expand(slot.shape))
        self.entries.values[rows].scatter_(1, slot, relative.clamp_(min=1))
        counts += kept.sum(1, dtype=torch.int32)

    def finish(self) -> None:
        """Take away the entries of tokens that are done exactly, and say which these are."""
        within = (self.expected <= expected_limit(self.sampling.samples)) & ~self.far
        exact = self.targets.active & ~(within & (self.entries.counts <= self.slots))
        self.entries.counts.masked_fill_(exact, 0)
        self.entries.exact.copy_(exact)


def finish_entries(call: Call, s: Step) -> None:
    """Make values relative to the references."""
    factor = (call.values.pop("estimate") - call.values["stats"].reference).exp_()
    factor.div_(sampling_of(call).samples)
    Entries.of(call, call.program.problem.soft).values.mul_(factor[:, None])


def put_terms(call: Call, s: Step) -> None:
    """Put the terms of other target classes before the entries."""
    soft, terms = call.inputs.targets.soft, call.values.pop("entries")
    assert soft is not None
    entries, own = Entries.of(call, 0), slice(0, terms.shape[1])
    entries.columns[:, own] = soft.index
    entries.values[:, own] = terms
    call.values["scaling"] = replace(call.values["scaling"], entries=None)


def list_entries(call: Call, s: Step) -> None:
    """Find the entries of a window, in the form in which products take them."""
    x, entries, soft = call.inputs, Entries.of(call, 0), call.program.problem.soft
    counts = entries.counts
    if soft:
        counts = counts + soft * x.targets.active.to(counts.dtype)
    make = _matrix if x.h.is_cuda else _sparse
    call.values["exps"] = make(call, s, entries, counts)


def _sparse(call: Call, s: Step, entries: Entries, counts: Tensor) -> SampledExps:
    """Return the entries, which the CPU looks at."""
    (first, last), used = s.columns, int(counts.amax()) if len(counts) else 0
    columns, values = entries.columns[:, :used], entries.values[:, :used]
    inside = (columns >= first).logical_and_(columns < last)
    tokens, slot = inside.logical_and_(torch.arange(used) < counts[:, None]).nonzero().unbind(1)
    del inside  # freed before the entries are gathered
    own = tokens, columns[tokens, slot].to(torch.int64).sub_(first), values[tokens, slot]
    del slot
    whole = entries.exact.nonzero()[:, 0]
    x, reference = call.inputs, call.values["scaling"].reference
    if not len(whole):
        return SampledExps(*own, whole, x.h.new_empty(0, last - first))
    given = x.h[whole], reference[whole], x.targets.per_token(whole)
    return SampledExps(*own, whole, _recomputed(call, s, *given))


def _matrix(call: Call, s: Step, entries: Entries, counts: Tensor) -> Tensor:
    """Return the exponentials of a window as a matrix (N, K): nothing looks at what it holds."""
    x, (first, last) = call.inputs, s.columns
    # the exponentials of tokens that are not done exactly are 0
    reference = torch.where(entries.exact, call.values["scaling"].reference, torch.inf)
    exps = _recomputed(call, s, x.h, reference, x.targets)
    is_entry = torch.arange(entries.columns.shape[1], device=x.h.device) < counts[:, None]
    place = entries.columns - first
    inside = is_entry & (place >= 0) & (place < last - first)
    values = entries.values.masked_fill(~inside, 0).to(x.h.dtype)
    # at most two terms of a place are not 0: their order does not matter
    return exps.scatter_add_(1, place.masked_fill_(~inside, 0).to(torch.int64), values)


def _recomputed(call: Call, s: Step, h: Tensor, reference: Tensor, targets: Targets) -> Tensor:
    """Return the exponentials (M, K) of a step's columns, of hidden states h (M, D)."""
    x, columns = call.inputs, s.columns[1] - s.columns[0]
    exps = h.new_empty(len(h), round_up(columns, x.primitives.config.reference_block))
    x.primitives.projection.recompute_exp(h, x.w, s.columns, reference, targets, exps)
    return exps[:, :columns]


def sparse_hidden(call: Call, s: Step) -> None:
    """Add a window's part of dX's sums."""
    x, w, own = call.inputs, row_range(call.inputs.w, *s.columns), call.view(s.writes[0])
    x.primitives.gradients.add_grad_hidden(own, call.values["exps"], w, accumulate=s.adds)
    if s.final:
        del call.values["exps"]


def sparse_weight(call: Call, s: Step) -> None:
    """Write a window's rows of dW, and its part of the bias' gradient."""
    x, exps = call.inputs, call.values.pop("exps")
    if "sums of bias" in s.writes:
        scale = scale_of(call)
        factors = RowFactors.ones(x.h) if scale is None else RowFactors.of(scale, x.h.dtype)
        out = call.view("sums of bias").view(-1)[s.columns[0] : s.columns[1]]
        out.copy_(factors.sum(exps))
    if "scaled" in s.reads:
        call.values["weight"].finish(*s.columns, exps, states_of(call, s))
    if s.columns[1] == len(x.w):
        call.values.pop("weight", None)
