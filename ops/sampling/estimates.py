"""The row sums that log-sum-exps are estimated of."""

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
from cutefce.ops.sampling.estimate_classes import estimate_classes, places_of
from cutefce.ops.sampling.sample_sizes import estimate_count, frequent_count


def class_sums(call: Call, s: Step) -> tuple[Any, Any, float]:
    """Return the row sums over frequent and over drawn classes of all ranks, and a logarithm.

    It is that of the classes that a drawn one stands for.  Targets are not in these sums.  The
    first is None if all classes are drawn: each rank its own ones.
    """
    x = call.inputs
    total = len(x.w) if x.ranks is None else x.ranks.total_vocab(x.w)
    count, frequent = estimate_count(total), frequent_count(total)
    if count == total:
        sums = [_project(call, s, x.w, x.targets.index, x.targets.logits)]
    else:
        sums = _sums_of_chosen(call, s, total)
    if x.ranks is not None:
        gather = x.ranks.all_gather
        sums = [x.primitives.gather_partials(partial, gather) for partial in sums]
    if count == total:
        return None, sums[0], 0.0
    return *sums, math.log((total - frequent) / (count - frequent))


def _sums_of_chosen(call: Call, s: Step, total: int) -> list[Any]:
    """Return the row sums over this rank's share of the frequent and of the drawn classes."""
    x, logits, bias = call.inputs, call.inputs.targets.logits, None
    count, frequent = estimate_count(total), frequent_count(total)
    classes, rows = estimate_classes(x.targets, total), call.view("rows of classes")
    _gather(x, x.w, classes, rows)
    if logits is not None and logits.bias is not None:
        bias = _gather(x, logits.bias, classes, logits.bias.new_empty(count))
    # behind the copies, as the kernels of products may read the weight before the last launch ends
    ids, parts, sums = x.targets.index + x.targets.first, ((0, frequent), (frequent, count)), []
    found = [places_of(ids, classes[first:last]) for first, last in parts]
    for places, (first, last) in zip(found, parts, strict=True):
        start, stop = 0, last - first
        if x.ranks is not None:
            start, stop = (stop * n // x.ranks.count for n in (x.ranks.rank, x.ranks.rank + 1))
        own = slice(first + start, first + stop)
        if logits is not None:
            logits = replace(logits, bias=None if bias is None else bias[own])
        index = places - start if start else places
        sums.append(_project(call, s, rows[own], index, logits))
    return sums


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


def _project(call: Call, s: Step, w: Tensor, index: Tensor, logits: LogitMap | None) -> Any:
    """Return the row sums of w (C, D), of which row `index` (N,) is the target's."""
    x = call.inputs
    options = replace(x.targets.options, reduction="none", outputs="")
    targets = Targets(index, len(w), options, logits=logits)
    targets.selection = x.targets.selection
    operands = call.states(s), w, (0, len(w)), call.values["logits"]
    return x.primitives.project_exp(Logits(*operands, targets))
