"""Outputs of calls with options, for which kernels contain code beside the plain ones.

The numbers of tokens and classes that options take are exact in every dtype.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from cutefce.autotune_cache.tuning.cases import Case, CheckedOutput
from cutefce.autotune_cache.tuning.outputs.samples import ALL, sampled
from cutefce.autotune_cache.tuning.outputs.steps import Way, gradients, prepared, run
from cutefce.cute_kernels.variant import KernelVariant
from cutefce.ops.dtypes import sum_dtype
from cutefce.ops.interface.arguments import LossOptions, TensorOptions
from cutefce.ops.outputs.reductions import stat_rows
from cutefce.ops.parallel.class_row import set_class_row
from cutefce.ops.parallel.shard import ALONE
from cutefce.ops.primitives.cute_projection import CuteProjection
from cutefce.ops.primitives.primitives import Primitives
from cutefce.ops.rows.statistics import RowStats
from cutefce.ops.rows.targets import OUTPUTS, Targets, make_targets, variant_of

TOP = 8
"""The largest classes that are compared."""
ROUNDINGS = 4
"""Float32 roundings of a loss, or an output, with options."""
COUNTED = 2.0**17
"""The floor of counts of logits above another one: rounding may move two of them past it."""
WAY = Way(windows=2, stored=1)
"""Launches row sums, exponentials that are stored and computed again, and their repair."""


@dataclass(frozen=True)
class OptionCall:
    """The options of a call."""

    options: LossOptions
    tensors: tuple[str, ...] = ()
    """Names of those that are tensors."""
    samples: bool = False
    """Whether gradients are sampled, of so many samples that they are the exact ones."""


def _outputs(*names: str, top_k: int = 0, logit_scale: float = 1.0) -> LossOptions:
    return LossOptions(OUTPUTS, logit_scale=logit_scale, outputs=",".join(names), top_k=top_k)


CALLS = {
    "scale": OptionCall(LossOptions("none", logit_scale=0.75)),
    "bias": OptionCall(LossOptions("none"), ("linear_bias",)),
    "softcap": OptionCall(LossOptions("none", softcap=16.0)),
    "entropy": OptionCall(_outputs("entropy")),
    "scale, entropy": OptionCall(_outputs("entropy", logit_scale=0.75)),
    "rank": OptionCall(_outputs("is_top1", "argmax", "rank")),
    "top classes": OptionCall(_outputs(top_k=TOP)),
    "label smoothing and z-loss": OptionCall(
        LossOptions("none", label_smoothing=0.125, z_loss=2.0**-10)
    ),
    "samples, softcap": OptionCall(LossOptions("none", softcap=16.0), samples=True),
    "all": OptionCall(
        LossOptions(OUTPUTS, softcap=16.0, outputs="sum_p_squared,rank"),
        ("linear_bias", "temperature", "logit_floor"),
    ),
}
"""Calls by what they have; the last one has all code of logits at once."""


def option_outputs(
    case: Case, primitives_of: Callable[[KernelVariant], Primitives]
) -> dict[str, CheckedOutput]:
    """Return losses, gradients and outputs of tokens with options."""
    results: dict[str, CheckedOutput] = {}
    for name, call in CALLS.items():
        tensors, vocab = _tensors(case, call.tensors), case.problem.vocab
        targets = make_targets(case.y, vocab, call.options, tensors, sum_dtype(case.h.dtype))
        primitives = primitives_of(variant_of(targets))
        way = Way() if call.samples else WAY
        inputs, plan, _ = prepared(case, primitives, way, targets)
        if call.samples and isinstance(primitives, CuteProjection):
            inputs, plan = sampled(inputs, plan, primitives, ALL)
        if plan.problem.every_class:
            inputs.class_row = set_class_row(ALONE, inputs.w, targets)
        upstream = case.upstream
        if call.options.reduction == OUTPUTS:  # of log-probability, log-sum-exp and entropy
            entropy = upstream / 4 if call.options.scales_exps else torch.zeros_like(upstream)
            upstream = torch.stack([upstream, upstream / 2, entropy])
        loss, stats, dx, dw = run(inputs, plan, None, upstream)
        results[f"loss, {name}"] = CheckedOutput(loss.t(), ROUNDINGS)
        results |= gradients(f", {name}", dx, dw, case.h.dtype)
        results |= {
            f"{output}, {name}": x for output, x in _statistics(case, targets, stats).items()
        }
    return results


def _tensors(case: Case, names: tuple[str, ...]) -> TensorOptions:
    """Return options with a number of each token or class."""
    token = torch.arange(case.problem.tokens, device=case.h.device)
    number = torch.arange(case.problem.vocab, device=case.h.device)
    every = {
        "linear_bias": (number % 7 - 3) / 4,
        "temperature": (token % 3 + 1) / 2,
        "logit_floor": -1.0 - token % 2,
    }
    return TensorOptions(**{name: every[name] for name in names})


def _statistics(case: Case, targets: Targets, stats: RowStats) -> dict[str, CheckedOutput]:
    """Return outputs that are rows of the statistics; of classes, their raw logits.

    They are 0 of tokens that are ignored, or that have logits which are NaN.
    """
    counts = targets.active & case.h.isfinite().all(1)
    rows = torch.where(counts, stats.rows.double(), 0)
    names = targets.options.output_names
    found: dict[str, CheckedOutput] = {}
    for name, row in stat_rows(names).items():
        if name == "argmax":
            found["largest logit"] = _logits(case, rows[row][:, None])
        else:
            floor = COUNTED if name == "rank" else 1.0
            found[name] = CheckedOutput(rows[row], ROUNDINGS, floor)
    if targets.options.top_k:
        log_p, classes = rows[-2 * TOP :].unflatten(0, (2, TOP)).transpose(1, 2)
        found["largest log-probabilities"] = CheckedOutput(log_p, ROUNDINGS)
        found["logits of their classes"] = _logits(case, classes)
    return found


def _logits(case: Case, classes: Tensor) -> CheckedOutput:
    """Return the raw logits (N, K) of classes, of which several may be right."""
    found = classes.nan_to_num(0).clamp(0, case.problem.vocab - 1).long()
    w = case.w.double()[found]
    logits = (w * case.h.double().nan_to_num(0)[:, None]).sum(2)
    return CheckedOutput(logits, ROUNDINGS, 1.0)
