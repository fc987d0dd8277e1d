"""Outputs of sampled gradients for a tuning case, and the kernels that they launch.

Which entries are kept depends on the rounding of logits.  So gradients are those of a call with so
many samples that all entries are kept, which are the exact ones; with few samples, the number of
entries is compared, and Σ of their columns.
"""

from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

from cutefce.autotune_cache.tuning.shapes import SMALL_PROBLEMS
from cutefce.cute_kernels.kernel_set import KernelSet
from cutefce.cute_kernels.sampling_set import sampling_kernels
from cutefce.cute_kernels.spec import KernelSpec
from cutefce.ops.planning.sample_sizes import slots
from cutefce.ops.primitives.cute_projection import CuteProjection
from cutefce.ops.primitives.interface import WrappedProjection
from cutefce.ops.program import calls as programs
from cutefce.ops.program.inputs import LossInputs
from cutefce.ops.program.plan import Plan
from cutefce.ops.rows.targets import Targets
from cutefce.ops.sampling import gradients as sampled
from cutefce.ops.sampling.interface import SamplingProjection
from cutefce.ops.sampling.kernels import KernelSamples
from cutefce.ops.sampling.samples import Sampling

ALL, FEW = 1 << 24, 64
"""Samples with which all entries are kept, and few."""
LOW = 10.0
"""Nats by which some estimates are too low: lse decides, and tokens overflow of few samples."""
MANY_CLASSES = 20_000
FLIPS = 1 << 11
"""Float32 roundings of an entry in 32: that many may be kept or not by rounding of logits."""


@dataclass(frozen=True)
class _LowEstimates(WrappedProjection[Any]):
    """A projection whose estimates of every third token are too low."""

    own: CuteProjection

    def sample(
        self, h: Tensor, w: Tensor, reference: Tensor, estimate: Tensor, *others: Any
    ) -> Any:
        """Do what the projection does."""
        estimate[::3] -= LOW
        return self.own.sample(h, w, reference, estimate, *others)


def kernels(exact: KernelSet) -> list[KernelSpec]:
    """Return what checks on small problems launch beside the kernels of exact gradients."""
    found: list[KernelSpec] = []
    for tokens, _, vocab in SMALL_PROBLEMS.values():
        for samples in (ALL, FEW):
            found += sampling_kernels(exact, tokens, slots(samples, vocab))
    return found


def gradients_of_all(
    inputs: LossInputs[Any, Any], upstream: Tensor, plan: Plan
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return losses (N,), dX and dW of a call that keeps all entries; `plan` is an exact one."""
    if not isinstance(inputs.primitives.projection, CuteProjection):
        loss, stats, left = programs.forward(inputs, plan)
        dx, dw, _ = programs.backward(left, inputs, upstream, stats)
        return loss, dx, dw
    inputs, dw = _with_low_estimates(inputs), torch.empty_like(inputs.w)
    loss, stats, samples = sampled.forward(inputs, _sampling(inputs, ALL), plan)
    given = stats, samples, upstream, plan.layout.window, True, dw, None
    return loss, sampled.backward(inputs, *given), dw


def entries_of_few(inputs: LossInputs[Any, Any], plan: Plan) -> Tensor:
    """Return (2,) float64: how many entries are kept, and Σ of their columns over V."""
    if isinstance(inputs.primitives.projection, CuteProjection):
        inputs = _with_low_estimates(inputs)
    _, _, samples = sampled.forward(inputs, _sampling(inputs, FEW), plan)
    if isinstance(samples, KernelSamples):
        columns, counts = samples.entries >> 32, samples.counts
    else:
        columns, counts = samples.columns, samples.counts
    is_entry = torch.arange(columns.shape[1], device=counts.device) < counts[:, None]
    places = torch.where(is_entry, columns, 0).sum() / len(inputs.w)
    return torch.stack([is_entry.sum().double(), places.double()])


def estimates(inputs: LossInputs[Any, Any]) -> dict[str, Tensor]:
    """Return the classes of an estimate and the places of targets, and an estimate of lse (N,).

    The classes are of a large vocabulary; the estimate is of all classes, of which half count more.
    """
    h, w, targets = inputs.h, inputs.w, inputs.targets
    projection = cast(SamplingProjection[Any], inputs.primitives.projection)
    sampling, half = replace(_sampling(inputs, FEW), vocab=MANY_CLASSES), (len(w) + 1) // 2
    chosen = projection.choose_classes(targets, sampling)
    classes = torch.cat([chosen.classes, *projection.target_places(chosen, targets)])
    logit, none = projection.target_logit(h, w, targets), torch.full_like(targets.index, -1)
    partials = []
    for rows in (w[:half], w[len(w) - half :]):
        part = Targets(none, half, targets.options)
        partials.append(projection.project_exp(h, rows, (0, half), logit, part))
    frequent, drawn = partials
    estimate = projection.estimate_lse(frequent, drawn, 2.0, logit)
    return {"classes of the estimate": classes.double(), "estimated log-sum-exps": estimate}


def _with_low_estimates(inputs: LossInputs[Any, Any]) -> LossInputs[Any, Any]:
    own = cast(CuteProjection, inputs.primitives.projection)
    projection = cast(Any, _LowEstimates(own))
    return replace(inputs, primitives=replace(inputs.primitives, projection=projection))


def _sampling(inputs: LossInputs[Any, Any], samples: int) -> Sampling:
    index = inputs.targets.index
    seed = torch.tensor([1, 2], dtype=torch.int32, device=index.device)
    rows = torch.arange(len(index), device=index.device)
    return Sampling(seed, samples, rows, len(inputs.w))
