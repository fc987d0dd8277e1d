"""The steps of programs as calls of the primitives of a backend."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from cutefce.ops.primitives.row_selection import row_range
from cutefce.ops.primitives.weighted_sum import RowFactors
from cutefce.ops.program.run import Call
from cutefce.ops.program.steps import Kind, Step
from cutefce.ops.rows.outputs import reduce_outputs, stat_rows
from cutefce.ops.rows.scaling import Scaling, as_probabilities
from cutefce.ops.rows.statistics import RowStats, returned_rows
from cutefce.ops.rows.targets import OUTPUTS
from cutefce.ops.strategies.bias_gradient import finish_dbias
from cutefce.ops.strategies.hidden_gradient import class_term
from cutefce.ops.strategies.weight_gradient import WeightGradient


def nothing(call: Call, s: Step) -> None:
    """Do nothing: what the step says is done with another one."""


def gather(call: Call, s: Step) -> None:
    """Write hidden states in the order of the targets, scaled if factors are read."""
    scaling: Scaling | None = call.values.get("scaling") if "factors" in s.reads else None
    scale = None
    if scaling is not None:
        scale = scaling.row_scale if scaling.row_scale is not None else scaling.relative
    call.view(s.writes[0]).copy_(call.inputs.selected(scale))


def states_of(call: Call, s: Step) -> Tensor:
    """Return the hidden states that a step reads."""
    names = [name for name in s.reads if name.startswith(("states", "scaled", "plain"))]
    return call.view(names[0]) if names else call.inputs.h


def exps_of(call: Call, s: Step, names: tuple[str, ...]) -> Tensor:
    """Return the exponentials of a step's columns."""
    (name,) = [name for name in names if name.startswith("exps")]
    return call.view(name, s.columns[1] - s.columns[0])


def target_logit(call: Call, s: Step) -> None:
    """Find the logits of targets."""
    x = call.inputs
    call.values["logits"] = x.primitives.projection.target_logit(x.h, x.w, x.targets)
    call.values["partials"] = []


def project(call: Call, s: Step) -> None:
    """Sum exponentials, or compute them again."""
    x, states = call.inputs, states_of(call, s)
    projection = x.primitives.projection
    names = [name for name in s.writes if name.startswith("exps")]
    if s.far:
        stats, partial = call.values["stats"], call.values["partial"]
        exps, first = call.view(names[0]), s.columns[0]
        projection.repair_stored_exps(exps, states, x.w, first, x.targets, partial, stats)
    elif "logits" in s.reads:
        given: Any = states, x.w, s.columns, call.values["logits"], x.targets
        exps_or_none = call.view(names[0]) if names else None
        call.values["partials"].append(projection.project_exp(*given, exps_or_none))
    else:
        scaling = call.values["scaling"]
        early = call.values["stats"].reference
        reference = scaling.reference if "numbers" in s.reads else early
        exps = call.view(names[0])
        projection.recompute_exp(states, x.w, s.columns, reference, x.targets, exps)


def reduce(call: Call, s: Step) -> None:
    """Make statistics and the loss of row sums."""
    x, logit = call.inputs, call.values["logits"]
    projection, targets = x.primitives.projection, x.targets
    partial = projection.concat_partials(call.values.pop("partials"))
    stats, loss = projection.reduce_partials(partial, logit, targets)
    call.values |= {"stats": stats, "partial": partial, "loss": loss}


def finish_loss(call: Call, s: Step) -> None:
    """Add outputs to the statistics, and return what the reduction asks for."""
    x, stats = call.inputs, call.values["stats"]
    targets, outputs = x.targets, x.targets.options.output_names
    more = None
    if stat_rows(outputs):
        part = None
        if targets.options.reduces_rows:
            projection, logit = x.primitives.projection, call.values["logits"]
            part = projection.partial_outputs(call.values["partial"], logit)
        classes = targets.index + targets.first
        more = reduce_outputs(part, classes, targets.class_logits, outputs)
    if x.h.dtype == torch.float16:
        stats = as_probabilities(stats)
    if more is not None:
        stats = RowStats(torch.cat([stats.rows, more]))
    if targets.options.reduction == OUTPUTS:
        call.values["loss"] = returned_rows(stats, targets)
    call.values["stats"] = stats
    for name in ("partial", "logits"):
        del call.values[name]


def coefficients(call: Call, s: Step) -> None:
    """Choose where the factors of tokens are applied."""
    x, stats, upstream = call.inputs, call.values["stats"], call.values["upstream"]
    given = x.h.dtype, x.targets, stats, upstream
    is_late = len(s.writes) > 1
    call.values["scaling"] = x.primitives.gradients.scaling(*given, in_reference=is_late)


def list_targets(call: Call, s: Step) -> None:
    """List the terms of targets and of every class in dW."""
    from cutefce.ops.strategies.windows import every_row

    x, scaling = call.inputs, call.values["scaling"]
    gradients = x.primitives.gradients
    into = x.accumulate_into
    out = call.memory_of_dw() if into is None else into
    terms = gradients.target_grad(x.h, scaling.target, x.targets)
    every = every_row(x, scaling.every)
    as_sums = into is not None or x.dw_dtype != x.w.dtype
    operands: Any = terms, scaling.grad_scale, every, x.targets.selection, as_sums
    call.values["weight"] = WeightGradient(gradients, out, *operands, into is not None)


def gemm_hidden(call: Call, s: Step) -> None:
    """Write or add a window's part of dX's sums."""
    x, exps = call.inputs, exps_of(call, s, s.reads)
    gradients, w = x.primitives.gradients, row_range(x.w, *s.columns)
    sums, *low = (call.view(name) for name in s.writes)
    more: Any = {"accumulate": s.adds, "selection": x.targets.selection}
    if low:
        gradients.keep_dx(sums, _low(call, low[0]), exps, w, **more)
    else:
        more["in_windows"] = s.columns != (0, len(x.w))
        gradients.add_grad_hidden(sums, exps, w, **more)


def gemm_weight(call: Call, s: Step) -> None:
    """Write or add a window's rows of dW."""
    weight: WeightGradient[Any] = call.values["weight"]
    states = states_of(call, s)
    weight.finish(*s.columns, exps_of(call, s, s.reads), states)


def bias(call: Call, s: Step) -> None:
    """Sum the columns of exponentials with the factors of tokens."""
    x, scaling = call.inputs, call.values["scaling"]
    factors = RowFactors.ones(x.h)
    if "factors" in s.reads:
        scale = scaling.row_scale if scaling.row_scale is not None else scaling.relative
        factors = RowFactors.of(scale, x.h.dtype)
    out = call.view(s.writes[0]).view(-1)
    out[s.columns[0] : s.columns[1]] = factors.sum(exps_of(call, s, s.reads))


def rescale(call: Call, s: Step) -> None:
    """Make sums relative to the references of probabilities."""
    sums, *low = (call.view(name) for name in s.writes)
    scale = call.values["scaling"].relative
    if low:
        call.inputs.primitives.gradients.scale_kept_rows(sums, _low(call, low[0]), scale)
    else:
        sums.mul_(scale[:, None])


def finish_hidden(call: Call, s: Step) -> None:
    """Round dX."""
    x, scaling = call.inputs, call.values["scaling"]
    names = [n for n in s.reads if n in ("sums", "dx")]
    low = [n for n in s.reads if n.startswith("low")]
    gradients, term = x.primitives.gradients, class_term(x, scaling.dx)
    selection, out = x.targets.selection, call.view(s.writes[0])
    order = None if selection is None else selection.order
    sums = call.view(names[0])
    rows = x.w, x.targets, scaling.dx, term, order
    if low:
        gradients.finish_kept(out, sums, _low(call, call.view(low[0])), *rows)
    else:
        gradients.finish_dx(out, sums, *rows)


def finish_bias(call: Call, s: Step) -> None:
    """Finish the gradient of the bias, in the dtype of sums."""
    x, scaling = call.inputs, call.values["scaling"]
    dbias = call.view(s.reads[0]).view(-1)
    finish_dbias(dbias, x.targets, scaling.target, scaling.every)
    call.values["dbias"] = dbias.mul(scaling.grad_scale)


def _low(call: Call, low: Tensor) -> Tensor:
    """Return the bytes of low bits that are used."""
    hidden = call.inputs.h.shape[1]
    return low[:, : hidden * call.program.low_bits // 8]


TABLE: dict[Kind, Callable[[Call, Step], None]] = {
    Kind.SELECT: nothing,
    Kind.CLASS_ROW: nothing,
    Kind.GATHER: gather,
    Kind.TARGET_LOGIT: target_logit,
    Kind.PROJECT: project,
    Kind.REDUCE: reduce,
    Kind.LOSS: finish_loss,
    Kind.COEFFICIENTS: coefficients,
    Kind.LIST_TARGETS: list_targets,
    Kind.GEMM_HIDDEN: gemm_hidden,
    Kind.GEMM_WEIGHT: gemm_weight,
    Kind.BIAS: bias,
    Kind.RESCALE: rescale,
    Kind.FINISH_HIDDEN: finish_hidden,
    Kind.FINISH_BIAS: finish_bias,
}
