"""The strategy of sampled gradients: the loss is exact, few entries of the softmax are multiplied.

With p̂_iv = exp(u_iv - l̂_i), l̂ an estimate of lse, and θ = 1 / samples, an entry (i, v) beside the
target's is kept with probability q = min(1, p̂ / θ), and e_iv / q then takes the place of e_iv in
the gradients.  Its expectation is e_iv, whatever the estimate; where l̂ is lse, a token expects to
keep 1/θ entries or fewer.  The target's part is exact.

Tokens whose estimate is far too low are done exactly, see `planning.sample_sizes`: this depends on
the estimate, not on what was kept, so that expectations stay as they are.
"""

import dataclasses
from dataclasses import dataclass, replace
from typing import Any, Generic, cast

import torch
from torch import Tensor

from cutefce.ops.planning.sample_sizes import drawn_count
from cutefce.ops.primitives.gradient_interface import TargetGradT
from cutefce.ops.primitives.interface import PartialT, Projection, forward_unfused
from cutefce.ops.rows.coefficients import RowCoefficients
from cutefce.ops.rows.statistics import RowStats
from cutefce.ops.rows.targets import Targets
from cutefce.ops.sampling.interface import SamplingProjection
from cutefce.ops.sampling.kernels import KernelSamples, is_in_place
from cutefce.ops.sampling.random_bits import drawn_columns
from cutefce.ops.sampling.samples import Samples, Sampling
from cutefce.ops.strategies import windows
from cutefce.ops.strategies.hidden_gradient import class_term, finish_dx
from cutefce.ops.strategies.loss_inputs import LossInputs

ABSENT, IGNORED = -1, -2
"""Indices among drawn columns of targets that are none of them, and of ignored ones."""


@dataclass
class SamplingForward(Generic[PartialT]):
    """A `Projection` whose pass over all columns chooses entries too."""

    own: SamplingProjection[PartialT]
    sampling: Sampling
    estimate: Tensor | None = None
    """(N,) l̂"""
    samples: Any = None
    """As `own` returns them."""
    operands: tuple[Tensor, Tensor] | None = None
    """h and w of these."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.own, name)

    def forward(self, h: Tensor, w: Tensor, targets: Targets) -> tuple[RowStats, Tensor]:
        """Do the steps of a forward one by one."""
        return forward_unfused(cast(Projection[PartialT], self), h, w, targets)

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
        self.estimate = estimate_lse(self.own, h, w, reference, targets, self.sampling)
        more = reference, self.estimate, targets, self.sampling
        (partial, self.samples), self.operands = self.own.sample(h, w, *more), (h, w)
        return partial


def forward(
    inputs: LossInputs[PartialT, TargetGradT], sampling: Sampling
) -> tuple[Tensor, RowStats, Samples | KernelSamples]:
    """Return the reduced loss, () or (N,), the statistics of every token, and the entries."""
    own = cast(SamplingProjection[PartialT], inputs.primitives.projection)
    projection = SamplingForward(own, sampling)
    primitives = replace(inputs.primitives, projection=cast(Projection[PartialT], projection))
    loss, stats = windows.forward(replace(inputs, primitives=primitives))
    samples, estimate = projection.samples, projection.estimate
    assert projection.operands is not None and estimate is not None
    own.finish_samples(samples, *projection.operands, stats, estimate, inputs.targets, sampling)
    return loss, stats, samples


def backward(
    inputs: LossInputs[PartialT, TargetGradT],
    stats: RowStats,
    samples: KernelSamples,
    upstream: Tensor,
    grad_hidden: bool,
    dw: Tensor | None,
    dbias: Tensor | None,
) -> Tensor | None:
    """Do what `windows.backward` does, with the products of kernels: no window is formed."""
    gradients, h, targets = inputs.primitives.gradients, inputs.h, inputs.targets
    scaling = gradients.scaling(h.dtype, targets, stats, upstream, in_reference=False)
    coefficients, selection, dx = scaling.dx, targets.selection, None
    order = None if selection is None else selection.order
    if grad_hidden:
        dx = _grad_hidden(inputs, samples, coefficients, order)
    if dw is not None or dbias is not None:
        every = None if dw is None else windows.every_row(inputs, coefficients.every)
        lists, adds = (
            samples.by_class(targets, coefficients, stats),
            inputs.accumulate_into is not None,
        )
        in_place = dw is not None and is_in_place(dw, h.dtype)
        lists.grad_weight(dw, h, dbias, every, adds=adds, in_place=in_place)
    if dbias is not None:
        windows.finish_dbias(dbias, targets, None, coefficients.every, None)
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
    projection: Projection[PartialT],
    h: Tensor,
    w: Tensor,
    target_logit: Tensor,
    targets: Targets,
    sampling: Sampling,
) -> Tensor:
    """Return l̂ (N,), the log-sum-exps as drawn columns and `target_logit` (N,) tell them.

    Every rank returns the same.
    """
    drawn, part = drawn_classes(w, targets, sampling)
    partial = projection.project_exp(h, drawn, (0, len(drawn)), target_logit, part)
    stats, _ = projection.reduce_partials(partial, target_logit, part)
    classes = sampling.vocab / drawn_count(sampling.vocab)
    own = (target_logit - stats.reference).exp()
    return stats.reference + (classes * stats.sum_exp - (classes - 1) * own).log()


def drawn_classes(w: Tensor, targets: Targets, sampling: Sampling) -> tuple[Tensor, Targets]:
    """Return the drawn rows (S, D) of w (V, D), and the targets as numbers of these rows."""
    last = targets.first + len(w)
    columns = drawn_columns(sampling.seed, targets.first, last, sampling.vocab)
    logits = targets.logits
    if drawn_count(sampling.vocab) < sampling.vocab:  # else all of them, in their order
        w = w[columns]  # before others: kernels take w for older than the launch before theirs
        if logits is not None and logits.bias is not None:
            logits = replace(logits, bias=logits.bias[columns])
    place = torch.searchsorted(columns, targets.safe_index).clamp_(max=len(columns) - 1)
    is_drawn = targets.owned & (columns[place] == targets.index)
    index = torch.where(targets.active, torch.where(is_drawn, place, ABSENT), IGNORED)
    none: Any = {"reduction": "none", "outputs": "", "ignore_index": IGNORED}
    options = dataclasses.replace(targets.options, **none)
    part = Targets(index, len(w), options, logits=logits)
    part.selection = targets.selection
    return w, part
