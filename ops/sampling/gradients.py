"""Sampled gradients: the loss is exact, few entries of the softmax are multiplied.

With p̂_iv = exp(u_iv - l̂_i), l̂ an estimate of lse, and θ = 1 / samples, an entry (i, v) beside the
target's is kept with probability q = min(1, p̂ / θ), and e_iv / q then takes the place of e_iv in
the gradients.  Its expectation is e_iv, whatever the estimate; where l̂ is lse, a token expects to
keep 1/θ entries or fewer.  The target's part is exact.

Kernels put lse in the place of an estimate below it; without kernels, tokens whose estimate is far
too low are done exactly, see `planning.sample_sizes`.  Either depends on the estimate and the
logits, not on what was kept, so that expectations stay as they are.
"""

import dataclasses
import math
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

from cutefce.ops.planning.sample_sizes import estimate_count
from cutefce.ops.primitives.gradient_interface import TargetGradT
from cutefce.ops.primitives.interface import (
    PartialT,
    Projection,
    WrappedProjection,
)
from cutefce.ops.primitives.weighted_sum import RowFactors
from cutefce.ops.program import calls as programs
from cutefce.ops.program.hidden import class_term, finish_dx
from cutefce.ops.program.inputs import LossInputs
from cutefce.ops.program.plan import Plan
from cutefce.ops.program.weight import WeightGradient, every_row, finish_dbias
from cutefce.ops.rows.coefficients import RowCoefficients
from cutefce.ops.rows.logit_map import LogitMap
from cutefce.ops.rows.scaling import Scaling
from cutefce.ops.rows.statistics import RowStats
from cutefce.ops.rows.targets import Targets
from cutefce.ops.sampling.interface import SamplingProjection
from cutefce.ops.sampling.kernels import KernelSamples, is_in_place
from cutefce.ops.sampling.samples import Samples, Sampling


@dataclass(frozen=True)
class SamplingForward(WrappedProjection[PartialT]):
    """A `Projection` whose pass over all columns chooses entries too."""

    own: SamplingProjection[PartialT]
    sampling: Sampling
    found: list[Any]
    """Receives the entries, as `own` returns them."""

    def project_exp(
        self,
        h: Tensor,
        w: Tensor,
        window: tuple[int, int],
        reference: Tensor,
        targets: Targets,
        exps: Tensor | None = None,
    ) -> PartialT:
        """Estimate the log-sum-exps first, and choose the entries of all columns."""
        assert window == (0, w.shape[0]) and exps is None
        estimate = estimate_lse(self.own, h, w, reference, targets, self.sampling)
        more = reference, estimate, targets, self.sampling
        partial, samples = self.own.sample(h, w, *more)
        self.found.append(samples)
        return partial


def forward(
    inputs: LossInputs[PartialT, TargetGradT], sampling: Sampling, plan: Plan
) -> tuple[Tensor, RowStats, Samples | KernelSamples]:
    """Return the reduced loss, () or (N,), the statistics of every token, and the entries."""
    own = cast(SamplingProjection[PartialT], inputs.primitives.projection)
    found: list[Any] = []
    of_ranks = own if inputs.ranks is None else inputs.ranks.sampling(own)
    projection = SamplingForward(of_ranks, sampling, found)
    primitives = replace(inputs.primitives, projection=cast(Projection[PartialT], projection))
    loss, stats, _ = programs.forward(replace(inputs, primitives=primitives), plan)
    (samples,) = found
    own.finish_samples(samples, inputs.selected(), inputs.w, stats, inputs.targets, sampling)
    return loss, stats, samples


def backward(
    inputs: LossInputs[PartialT, TargetGradT],
    stats: RowStats,
    samples: Samples | KernelSamples,
    upstream: Tensor,
    window: int,
    grad_hidden: bool,
    dw: Tensor | None,
    dbias: Tensor | None,
) -> Tensor | None:
    """Return dX (N, D) for the upstream gradient of the loss, (N,) or (); write `dw` (V, D).

    `dbias` (V,) receives the gradient of the bias, in the dtype of sums.  Where kernels select
    rows, `upstream` is in the order of the targets, dX in that of the call.  With
    `inputs.accumulate_into`, that is `dw`, to which dW is added.
    """
    gradients, h, targets = inputs.primitives.gradients, inputs.h, inputs.targets
    scaling = gradients.scaling(h.dtype, targets, stats, upstream, in_reference=False)
    if isinstance(samples, Samples):
        return _in_windows(inputs, scaling, samples, window, grad_hidden, dw, dbias)
    coefficients, selection, dx = scaling.dx, targets.selection, None
    order = None if selection is None else selection.order
    if grad_hidden:
        dx = _grad_hidden(inputs, samples, coefficients, order)
    if dw is not None or dbias is not None:
        every = None
        if dw is not None and coefficients.every is not None:
            every = every_row(inputs, coefficients.every, inputs.selected())
        lists, adds = (
            samples.by_class(targets, coefficients, stats),
            inputs.accumulate_into is not None,
        )
        in_place = dw is not None and is_in_place(dw, h.dtype)
        lists.grad_weight(dw, h, dbias, every, adds=adds, in_place=in_place)
    if dbias is not None:
        finish_dbias(dbias, targets, None, coefficients.every)
    return dx


def _in_windows(
    inputs: LossInputs[PartialT, TargetGradT],
    scaling: Scaling,
    samples: Samples,
    window: int,
    grad_hidden: bool,
    dw: Tensor | None,
    dbias: Tensor | None,
) -> Tensor | None:
    """Do what `backward` does in plain torch, a window of the columns at a time."""
    gradients, h, w, targets = inputs.primitives.gradients, inputs.h, inputs.w, inputs.targets
    projection = cast(SamplingProjection[PartialT], inputs.primitives.projection)
    if targets.soft is not None and scaling.entries is not None:
        samples = samples.with_terms(targets.soft.index, scaling.entries)
    weight, scaled, sums = None, inputs.selected(scaling.row_scale), None
    if dw is not None:
        target_grad = gradients.target_grad(h, scaling.target, targets)
        every = every_row(inputs, scaling.every, inputs.selected())
        adds = inputs.accumulate_into is not None
        operands = target_grad, scaling.grad_scale, every, targets.selection
        weight = WeightGradient(gradients, dw, *operands, adds or dw.dtype != w.dtype, adds)
    if grad_hidden:
        sums = scaling.target.new_empty(len(scaling.target), h.shape[1])
    factors = RowFactors.ones(h)
    if scaling.row_scale is not None:
        factors = RowFactors.of(scaling.row_scale, h.dtype)
    given = inputs.selected(), w, samples, scaling.reference, targets, window
    for first, last, exps in projection.sampled_exps(*given):
        if dbias is not None:
            dbias[first:last] = factors.sum(exps)
        if sums is not None:
            gradients.add_grad_hidden(sums, exps, w[first:last], accumulate=first > 0)
        if weight is not None:
            weight.finish(first, last, exps, scaled)
    if dbias is not None:
        finish_dbias(dbias, targets, scaling.target, scaling.every)
        dbias.mul_(scaling.grad_scale)
    if sums is None:
        return None
    order = None if targets.selection is None else targets.selection.order
    dx = sums
    if order is not None or sums.dtype != inputs.dx_dtype:
        dx = torch.empty_like(sums, dtype=inputs.dx_dtype)
    finish_dx(inputs, dx, sums, scaling.dx, order)
    return dx


def _grad_hidden(
    inputs: LossInputs[PartialT, TargetGradT],
    samples: KernelSamples,
    coefficients: RowCoefficients,
    order: Tensor | None,
) -> Tensor:
    """Return dX (N, D) in the order of the call."""
    h, w, targets = inputs.h, inputs.w, inputs.targets
    dx = h.new_empty(inputs.tokens, h.shape[1], dtype=inputs.dx_dtype)
    if class_term(inputs, coefficients) is None:
        samples.grad_hidden(dx, w, targets, coefficients, order)
        return dx
    # the class row's part is added before dX is rounded
    sums = coefficients.scale.new_empty(dx.shape)
    samples.grad_hidden(sums, w, targets, coefficients, None)
    ones, zeros = targets.active.to(sums.dtype), torch.zeros_like(coefficients.target)
    own = replace(coefficients, scale=ones, target=zeros)
    finish_dx(inputs, dx, sums, own, order)
    return dx


def estimate_lse(
    projection: SamplingProjection[PartialT],
    h: Tensor,
    w: Tensor,
    target_logit: Tensor,
    targets: Targets,
    sampling: Sampling,
) -> Tensor:
    """Return l̂ (N,), the log-sum-exps as some classes and `target_logit` (N,) tell them.

    Every rank returns the same.
    """
    total, count = sampling.vocab, estimate_count(sampling.vocab)
    if count == total:
        part = _row_sums_targets(targets, targets.index, len(w), targets.logits)
        every = projection.project_exp(h, w, (0, len(w)), target_logit, part)
        return projection.estimate_lse(None, every, 0.0, target_logit)
    chosen, logits = projection.choose_classes(targets, sampling), targets.logits
    # before other launches: kernels take w for older than the launch before theirs
    rows = projection.class_rows(w, chosen.classes)
    bias = None if logits is None else logits.bias
    bias = None if bias is None else projection.class_rows(bias, chosen.classes)
    partials, parts = [], ((0, chosen.frequent), (chosen.frequent, count))
    for places, (first, last) in zip(projection.target_places(chosen, targets), parts, strict=True):
        share = projection.share(last - first)
        own = slice(first + share.start, first + share.stop)
        if logits is not None:
            logits = replace(logits, bias=None if bias is None else bias[own])
        index = places - share.start if share.start else places
        part = _row_sums_targets(targets, index, own.stop - own.start, logits)
        operands = h, rows[own], (0, part.vocab), target_logit, part
        partials.append(projection.project_exp(*operands))
    log_ratio = math.log((total - chosen.frequent) / (count - chosen.frequent))
    frequent, drawn = partials
    return projection.estimate_lse(frequent, drawn, log_ratio, target_logit)


def _row_sums_targets(
    targets: Targets, index: Tensor, vocab: int, logits: LogitMap | None
) -> Targets:
    """Return `targets` as the numbers `index` (N,) of `vocab` classes, for row sums alone."""
    options = dataclasses.replace(targets.options, reduction="none", outputs="")
    part = Targets(index, vocab, options, logits=logits)
    part.selection = targets.selection
    return part
