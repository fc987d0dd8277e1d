"""Outputs of sampled gradients.

Which entries are kept depends on the rounding of logits.  So gradients are those of a call with so
many samples that all entries are kept, which are the exact ones; with few samples, the number of
entries is compared, and Σ of their columns.
"""

import math
from copy import copy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from cutefce.autotune_cache.tuning.cases import Case, CheckedOutput
from cutefce.autotune_cache.tuning.outputs.steps import Way, gradients, prepared, run
from cutefce.cute_kernels.jit.cache import compiled
from cutefce.cute_kernels.spec.sampling import PrepareSamplesSpec
from cutefce.ops.primitives.cute_projection import CuteProjection, PartialLse
from cutefce.ops.primitives.cute_rowwise import CublasPrimitives
from cutefce.ops.primitives.portable_projection import Logits
from cutefce.ops.primitives.primitives import Primitives
from cutefce.ops.program import calls as programs
from cutefce.ops.program.inputs import LossInputs
from cutefce.ops.program.plan import Plan
from cutefce.ops.program.run import Call
from cutefce.ops.rows.targets import Targets
from cutefce.ops.sampling.kernels import Entries
from cutefce.ops.sampling.random_bits import random_bits, row_states

ALL = 1 << 24
"""Samples with which all entries are kept."""
LOW = 10.0
"""Nats by which sums of some estimates are too low: lse decides, and tokens overflow of few
samples."""
LOG2_RATIO = 3.0
"""Base-2 logarithm of the classes that a drawn one stands for."""
FLIPS = 1 << 11
"""Float32 roundings of an entry in 32: that many may be kept or not by rounding of logits."""


class _LowEstimates(CublasPrimitives):
    """Primitives whose estimates of every third token are too low, but for the target's part."""

    def project_exp(self, *operands: Any) -> PartialLse:
        """Do what the projection does of the classes of the estimate."""
        partial = super().project_exp(*operands)
        partial.sums[::3] -= LOW / math.log(2)
        return partial


def few_samples(vocab: int) -> int:
    """Return samples with which few entries are kept: other kernels sort those of many columns."""
    return 64 if vocab < 2000 else 256


def sampled_outputs(case: Case, primitives: Primitives) -> dict[str, CheckedOutput]:
    """Return gradients of all entries, what is kept of few samples, and estimates, by name."""
    inputs, plan, _ = prepared(case, primitives, Way())
    projection = primitives
    if isinstance(projection, CuteProjection):
        few = few_samples(case.problem.vocab)
        entries = _entries(*sampled(inputs, plan, projection, few))
        estimates = _estimates(inputs, projection)
        inputs, plan = sampled(inputs, plan, projection, ALL)
    else:
        entries, estimates = _defined_entries(case), _defined_estimates(case)
    loss, _, dx, dw = run(inputs, plan, None, case.upstream)
    results = {"sampled loss": CheckedOutput(loss, 1)}
    results |= gradients(" of samples", dx, dw, case.h.dtype)
    results["sampled entries"] = CheckedOutput(entries, FLIPS)
    results["estimated log-sum-exps"] = CheckedOutput(estimates, 1, floor=1.0)
    return results


def _entries(inputs: LossInputs, plan: Plan) -> Tensor:
    """Return (2,) float64: how many entries are kept, and Σ of their columns over V."""
    _, _, saved = programs.forward(inputs, plan)
    own = Entries.of(Call(plan.program, inputs, saved.by_home))
    columns, counts = own.entries >> 32, own.counts
    is_entry = torch.arange(columns.shape[1], device=counts.device) < counts[:, None]
    places = torch.where(is_entry, columns, 0).sum() / len(inputs.w)
    return torch.stack([is_entry.sum().double(), places.double()])


def _defined_entries(case: Case) -> Tensor:
    """Return what `_entries` returns, by the definition of entries: of all probabilities."""
    tokens, columns = torch.arange(case.problem.tokens), torch.arange(case.problem.vocab)
    chance = (case.h @ case.w.t()).softmax(1) * few_samples(case.problem.vocab)
    bits = random_bits(row_states(_seed(case.y), tokens), columns).long() & 0xFFFFFFFF
    kept = (bits < chance * 2.0**32) & (case.y >= 0)[:, None] & (columns != case.y[:, None])
    counts = kept.sum(0).double()
    return torch.stack([counts.sum(), counts @ columns.double() / len(columns)])


def _seed(like: Tensor) -> Tensor:
    return torch.tensor([1, 2], dtype=torch.int32, device=like.device)


def _estimates(inputs: LossInputs, projection: CuteProjection) -> Tensor:
    """Return an estimate of lse (N,) of two halves of the classes, of which one counts more."""
    h, w, targets, half = inputs.h, inputs.w, inputs.targets, (len(inputs.w) + 1) // 2
    logit, none = projection.target_logit(h, w, targets), torch.full_like(targets.index, -1)
    part, sums = Targets(none, half, targets.options), []
    for rows in (w[:half], w[len(w) - half :]):
        sums.append(projection.project_exp(Logits(h, rows, (0, half), logit, part)).sums)
    result = torch.empty_like(logit)
    kernel = PrepareSamplesSpec(projection.kernels.row_sums.arch, "estimate")
    compiled(kernel)(*sums, logit, result, LOG2_RATIO, 0)
    return result


def _defined_estimates(case: Case) -> Tensor:
    """Return what `_estimates` returns, of all logits."""
    logits, half = case.h @ case.w.t(), (case.problem.vocab + 1) // 2
    target = logits.gather(1, case.y.clamp(min=0)[:, None])
    drawn = logits[:, -half:] + LOG2_RATIO * math.log(2)
    lse = torch.cat([target, logits[:, :half], drawn], 1).logsumexp(1)
    return torch.where(case.y < 0, torch.inf, lse)


def sampled(
    inputs: LossInputs, plan: Plan, projection: CuteProjection, samples: int
) -> tuple[LossInputs, Plan]:
    """Return a call with sampled gradients, and its plan, of one with exact ones on kernels.

    Some of its estimates are too low.
    """
    targets, given = copy(inputs.targets), projection
    low = _LowEstimates(given.kernels, given.num_sms, given.tiles, given.clears)
    targets.tensors = replace(targets.tensors, seed=_seed(targets.index))
    inputs = replace(inputs, primitives=low, targets=targets)
    problem = replace(plan.problem, samples=samples, stores=False)
    return inputs, Plan(problem, plan.layout)
