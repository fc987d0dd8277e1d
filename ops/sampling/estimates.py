"""Steps of the classes that log-sum-exps are estimated of, and of their logits."""

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from cutefce.ops.primitives.portable_projection import Logits
from cutefce.ops.program.inputs import LossInputs
from cutefce.ops.program.run import Call
from cutefce.ops.program.steps import Step
from cutefce.ops.rows.logit_map import LogitMap
from cutefce.ops.rows.targets import Targets
from cutefce.ops.sampling.estimate_classes import estimate_classes, target_places
from cutefce.ops.sampling.sample_sizes import estimate_count, frequent_count


def total_classes(call: Call) -> int:
    """Return the number of classes of all ranks."""
    x = call.inputs
    return len(x.w) if x.ranks is None else x.ranks.total_vocab(x.w)


def choose_classes(call: Call, s: Step) -> None:
    """Choose the classes of the estimates."""
    call.values["classes"] = estimate_classes(call.inputs.targets, total_classes(call))


def gather_classes(call: Call, s: Step) -> None:
    """Copy the rows of the weight, and of the bias, of the classes; find the targets among them."""
    x, classes = call.inputs, call.values["classes"]
    bias = None if x.targets.logits is None else x.targets.logits.bias
    _gather(x, x.w, classes, call.view(s.writes[0]))
    if bias is not None:
        bias = _gather(x, bias, classes, bias.new_empty(len(classes)))
    call.values["bias of classes"] = bias
    # behind the copies, as the kernels of products may read the weight before the last launch ends
    call.values["places"] = target_places(classes, frequent_count(total_classes(call)), x.targets)


def _gather(x: LossInputs, rows: Tensor, classes: Tensor, out: Tensor) -> Tensor:
    """Write the rows (C, ...) of global `classes` (C,) to `out`, and return it.

    Of each, one rank has another one than 0 to add.
    """
    if x.ranks is None:
        return torch.index_select(rows, 0, classes, out=out)
    place = classes - x.targets.first
    here = (place >= 0) & (place < len(rows))
    torch.index_select(rows, 0, place.clamp_(0, len(rows) - 1), out=out)
    out.masked_fill_(~here.view(-1, *[1] * (out.ndim - 1)), 0)
    return x.ranks.all_reduce_(out)


def project_classes(call: Call, s: Step) -> None:
    """Sum exponentials of the classes: of this rank's share of the frequent and of the drawn ones.

    If these are all classes, this rank's own ones are drawn.
    """
    x, values = call.inputs, call.values
    operands = call.states(s), values["logits"], x.targets.logits
    if "classes" not in values:
        values["sums of classes"] = [_project(x, x.w, x.targets.index, *operands)]
        return
    h, reference, logits = operands
    count, frequent = len(values.pop("classes")), frequent_count(total_classes(call))
    rows, bias = call.view("rows of classes"), values.pop("bias of classes")
    parts, sums = ((0, frequent), (frequent, count)), []
    for places, (first, last) in zip(values.pop("places"), parts, strict=True):
        start, stop = 0, last - first
        if x.ranks is not None:
            start, stop = (stop * n // x.ranks.count for n in (x.ranks.rank, x.ranks.rank + 1))
        own = slice(first + start, first + stop)
        if logits is not None:
            logits = replace(logits, bias=None if bias is None else bias[own])
        index = places - start if start else places
        sums.append(_project(x, rows[own], index, h, reference, logits))
    values["sums of classes"] = sums


def _project(
    x: LossInputs,
    w: Tensor,
    index: Tensor,
    h: Tensor,
    reference: Tensor,
    logits: LogitMap | None,
) -> Any:
    """Return the row sums of w (C, D), of which row `index` (N,) is the target's."""
    options = replace(x.targets.options, reduction="none", outputs="")
    targets = Targets(index, len(w), options, logits=logits)
    targets.selection = x.targets.selection
    logits_of = Logits(h, w, (0, len(w)), reference, targets)
    return x.primitives.project_exp(logits_of)


def class_sums(call: Call) -> tuple[Any, Any, float]:
    """Return the row sums over frequent and over drawn classes of all ranks, and a logarithm.

    It is that of the classes that a drawn one stands for.  Targets are not in these sums.  The
    first is None if all classes are drawn.
    """
    x, total, sums = call.inputs, total_classes(call), call.values.pop("sums of classes")
    if x.ranks is not None:
        gather = x.ranks.all_gather
        sums = [x.primitives.gather_partials(partial, gather) for partial in sums]
    if len(sums) == 1:
        return None, sums[0], 0.0
    count, frequent = estimate_count(total), frequent_count(total)
    return *sums, math.log((total - frequent) / (count - frequent))
