"""The steps of programs as calls of the primitives of a backend."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from cutefce.cute_kernels.integers import round_up
from cutefce.ops.planning.step_memory import few_low_bits
from cutefce.ops.primitives.interface import expect_soft_logits, set_soft_excess
from cutefce.ops.primitives.portable_gradients import scale_by_log
from cutefce.ops.primitives.row_selection import clear_first_rows, row_range
from cutefce.ops.primitives.weighted_sum import RowFactors, add_soft_rows, weighted_sum
from cutefce.ops.program.run import Call
from cutefce.ops.program.steps import Home, Kind, Step
from cutefce.ops.rows.outputs import reduce_outputs, stat_rows
from cutefce.ops.rows.scaling import Scaling, as_probabilities
from cutefce.ops.rows.statistics import RowStats, reduce_losses, returned_rows
from cutefce.ops.rows.targets import OUTPUTS
from cutefce.ops.strategies.bias_gradient import finish_dbias
from cutefce.ops.strategies.hidden_gradient import class_term
from cutefce.ops.strategies.hidden_sums import HiddenSums
from cutefce.ops.strategies.weight_gradient import WeightGradient, every_row
from cutefce.ops.strategies.weight_sums import WeightSums


def nothing(call: Call, s: Step) -> None:
    """Do nothing: what the step says is done with another one."""


def gather(call: Call, s: Step) -> None:
    """Write hidden states in the order of the targets, scaled if factors are read."""
    scale = scale_of(call) if "factors" in s.reads else None
    call.part(s.rows).selected(scale, rows_of(call, s, s.writes[0]))


def scale_of(call: Call) -> Tensor | None:
    """Return the factors of hidden states beside exponentials; None if these have them."""
    scaling: Scaling = call.values["scaling"]
    scale = scaling.row_scale if scaling.row_scale is not None else scaling.relative
    factor = call.values.get("known")
    return scale if scale is None or factor is None else scale * factor


def rows_of(call: Call, s: Step, name: str, columns: int | None = None) -> Tensor:
    """Return the rows of a buffer of a chunk that a step has."""
    view = call.view(name, columns)
    return view[: s.rows[1] - s.rows[0]] if call.program.in_forward else view


def states_of(call: Call, s: Step) -> Tensor:
    """Return the hidden states that a step reads."""
    names = [name for name in s.reads if name.startswith(("states", "scaled", "plain"))]
    return rows_of(call, s, names[0]) if names else call.part(s.rows).h


def exps_of(call: Call, s: Step, names: tuple[str, ...], *, whole: bool = False) -> Tensor:
    """Return the exponentials of a step's columns; `whole` ones with those beyond the classes."""
    (name,) = [name for name in names if name.startswith("exps")]
    columns = s.columns[1] - s.columns[0]
    if whole:
        block = call.inputs.primitives.config.reference_block
        columns = min(round_up(columns, block), call.program.buffers[name].columns)
    return rows_of(call, s, name, columns)


def target_logit(call: Call, s: Step) -> None:
    """Find the logits of targets."""
    x = call.part(s.rows)
    call.values["logits"] = x.primitives.projection.target_logit(x.h, x.w, x.targets)
    call.values["partials"] = []
    expect_soft_logits(x.primitives.projection, x.targets)
    if x.targets.class_logits is not None:
        call.values.setdefault("class logits", []).append(x.targets.class_logits)


def clear(call: Call, s: Step) -> None:
    """Clear what dW's product reads of a chunk of which no row counts."""
    clear_first_rows(call.view(s.writes[0]))


def project(call: Call, s: Step) -> None:
    """Sum exponentials, or compute them again."""
    x, states = call.part(s.rows), states_of(call, s)
    projection, stores = x.primitives.projection, any(n.startswith("exps") for n in s.writes)
    exps = exps_of(call, s, s.writes, whole=True) if stores else None
    if "logits" in s.reads:
        given: Any = states, x.w, s.columns, call.values["logits"], x.targets, exps
        call.values["partials"].append(projection.project_exp(*given))
        leave_out_entries(call, s, exps)
        return
    assert exps is not None
    reference, targets = call.values["stats"].reference, x.targets
    if s.far and "exps" not in s.writes:
        of_all = targets, call.values["partial"], call.values["stats"]
        projection.repair_stored_exps(exps, states, x.w, s.columns[0], *of_all)
        return
    if s.far:  # of windows that are not stored
        targets = copy.copy(targets)
        targets.selection = projection.far_rows(call.values["partial"], x.targets)
        call.values["far"] = targets.selection
    elif "stats" not in s.reads:
        reference = call.values["scaling"].reference
    projection.recompute_exp(states, x.w, s.columns, reference, targets, exps)
    if call.program.in_forward:
        leave_out_entries(call, s, exps)


def leave_out_entries(call: Call, s: Step, exps: Tensor | None) -> None:
    """Clear exponentials of a chunk's window that become entries, which all columns' sums tell."""
    x = call.part(s.rows)
    if exps is not None and x.targets.soft is not None and s.columns != (0, len(x.w)):
        put = x.primitives.projection.put_soft
        if call.program.in_forward:
            put(None, exps[:, : s.columns[1] - s.columns[0]], s.columns[0], x.targets)


def entries(call: Call, s: Step) -> None:
    """Put the terms of other target classes among exponentials, or add them to dX's sums."""
    x, scaling = call.part(s.rows), call.values.get("scaling")
    if s.writes[0].startswith("sums"):
        values = x.targets.soft_entries(call.values["stats"], x.h.dtype)
        if values is not None:
            add_soft_rows(rows_of(call, s, s.writes[0]), values, x.targets, x.w)
        return
    exps = exps_of(call, s, s.writes)
    if call.program.in_forward:
        values = x.targets.soft_entries(call.values["stats"], x.h.dtype)
    else:
        assert scaling is not None
        values = scaling.entries
        if scaling.factor is not None:
            scale_by_log(exps, *scaling.factor)
    call.values["entries"] = values
    if values is not None:
        x.primitives.projection.put_soft(values, exps, s.columns[0], x.targets)


def scale_exps(call: Call, s: Step) -> None:
    """Multiply exponentials by the factors of tokens, and put entries that are rounded with them.

    dX's product may have multiplied them.
    """
    x, own = call.part(s.rows), call.values["scaling"]
    coefficients = own.dx if call.program.in_forward else own
    target, scale = coefficients.target, scale_of(call)
    if "known" in call.values:
        target = target * call.values["known"]
    exps, is_scaled = exps_of(call, s, s.writes), call.values.pop("is scaled", False)
    given: Any = call.values["entries"], target, exps, s.columns[0], x.targets, scale, is_scaled
    x.primitives.projection.scale_soft(*given)


def has_scaled_exps(call: Call) -> bool:
    """Whether exponentials have the factors of tokens, and terms of targets among them."""
    return call.program.scales_exps


def reduce(call: Call, s: Step) -> None:
    """Make statistics of row sums, with the outputs that are asked for, and the loss."""
    x, logit = call.part(s.rows), call.values["logits"]
    projection, targets = x.primitives.projection, x.targets
    outputs, more, part = targets.options.output_names, None, None
    set_soft_excess(projection, x.h, x.w, targets, logit)
    partial = projection.concat_partials(call.values.pop("partials"))
    stats, loss = projection.reduce_partials(partial, logit, targets)
    if stat_rows(outputs):
        if targets.options.reduces_rows:
            part = projection.partial_outputs(partial, logit)
        classes = targets.index + targets.first
        more = reduce_outputs(part, classes, targets.class_logits, outputs)
    if x.h.dtype == torch.float16:
        stats = as_probabilities(stats)
    if more is not None:
        stats = RowStats(torch.cat([stats.rows, more]))
    call.values |= {"stats": stats, "partial": partial, "loss": loss}
    call.values.setdefault("all", []).append(stats.rows)
    if targets.soft is not None and targets.soft.excess is not None:
        call.values.setdefault("excess", []).append(targets.soft.excess)


def finish_loss(call: Call, s: Step) -> None:
    """Join the statistics of chunks, and return what the reduction asks for."""
    targets, every = call.inputs.targets, call.values.pop("all")
    excess = call.values.pop("excess", None)
    if call.program.in_forward:
        if excess is not None and targets.soft is not None:
            targets.soft.excess = torch.cat(excess)
        if "class logits" in call.values:
            targets.class_logits = torch.cat(call.values.pop("class logits"))
        stats = RowStats(torch.cat(every, 1))
        returned = returned_rows if targets.options.reduction == OUTPUTS else reduce_losses
        call.values |= {"stats": stats, "loss": returned(stats, targets)}
    elif targets.options.reduction == OUTPUTS:
        call.values["loss"] = returned_rows(call.values["stats"], targets)
    for name in ("partial", "logits"):
        del call.values[name]


def coefficients(call: Call, s: Step) -> None:
    """Choose where the factors of tokens are applied."""
    if "last factors" in s.writes:
        return
    x, stats = call.part(s.rows), call.values["stats"]
    if not call.program.in_forward:
        given: Any = x.h.dtype, x.targets, stats, call.values["upstream"]
        is_late = len(s.writes) > 1 or s.final
        made = x.primitives.gradients.scaling(*given, in_reference=is_late)
        call.values |= {"scaling": made, "entries": made.entries}
        return
    whole, dtype = call.inputs.targets, stats.rows.dtype
    loss_scale = whole.loss_scale(dtype)
    given = x.h.dtype, x.targets, stats, loss_scale
    scaling = x.primitives.gradients.scaling(*given, in_reference=False)
    tokens, rows = call.inputs.tokens, slice(*s.rows)
    call.values["scaling"] = scaling
    if call.program.problem.adds_in_forward:
        assert whole.tensors.grad_output is not None
        call.values["known"] = whole.tensors.grad_output
    for name, values in (("target", scaling.dx.target), ("every", scaling.dx.every)):
        if values is not None:
            if rows.start == 0 or name not in call.values:
                call.values[name] = loss_scale.new_zeros(tokens)
            call.values[name][rows] = values


def list_targets(call: Call, s: Step) -> None:
    """List the terms of targets and of every class in dW."""
    x, gradients = call.inputs, call.inputs.primitives.gradients
    if call.program.in_forward:
        call.values["listed"] = None
        if gradients.lists_targets:
            target = call.values["target"]
            if "known" in call.values:
                target = target * call.values["known"]
            call.values["listed"] = gradients.target_grad(x.h, target, x.targets)
        return
    scaling, into = call.values["scaling"], x.accumulate_into
    out = call.memory[Home.DW] if into is None else into
    if has_scaled_exps(call):
        terms = gradients.no_target_grad(x.h, x.targets)
    else:
        terms = gradients.target_grad(x.h, scaling.target, x.targets)
    as_sums = into is not None or x.dw_dtype != x.w.dtype
    every = every_row(x, scaling.every)
    call.values["weight"] = WeightGradient(
        gradients,
        out,
        terms,
        scaling.grad_scale,
        every,
        x.targets.selection,
        as_sums=as_sums,
        adds=into is not None,
    )


def gemm_hidden(call: Call, s: Step) -> None:
    """Write or add a window's part of dX's sums."""
    x, exps = call.part(s.rows), exps_of(call, s, s.reads)
    gradients, w = x.primitives.gradients, row_range(x.w, *s.columns)
    sums, *low = (rows_of(call, s, name) for name in s.writes)
    selection = call.values.pop("far") if s.far else x.targets.selection
    more: Any = {"accumulate": s.adds, "selection": selection}
    if low:
        gradients.keep_dx(sums, used(call, low[0]), exps, w, **more)
    else:
        more["in_windows"] = s.columns != (0, len(x.w)) and not call.program.in_forward
        if has_scaled_exps(call) and call.program.problem.grad_weight:
            more["factor"] = scale_of(call)
        call.values["is scaled"] = gradients.add_grad_hidden(sums, exps, w, **more)


def gemm_weight(call: Call, s: Step) -> None:
    """Write or add a window's rows of dW."""
    states, exps = states_of(call, s), exps_of(call, s, s.reads)
    if not call.program.in_forward:
        weight: WeightGradient[Any] = call.values["weight"]
        weight.finish(*s.columns, exps, states)
        return
    x = call.part(s.rows)
    gradients, selection = x.primitives.gradients, call.inputs.targets.selection
    is_first, of_chunk = s.rows[0] == 0, None
    if selection is not None:
        of_chunk = selection.rows(slice(*s.rows))
        if not (is_first or s.final):  # which begins the sums, or adds the terms of all tokens
            of_chunk = of_chunk.skipping()
    own = call.values["scaling"].dx
    if "known" in call.values:
        own = own.times(call.values["known"])
    if has_scaled_exps(call):
        terms = gradients.no_target_grad(x.h, x.targets)
    elif gradients.lists_targets:
        terms = call.values["listed"] if s.final else gradients.no_target_grad(x.h, x.targets)
    else:
        terms = gradients.target_grad(x.h, own.target, x.targets)
    row = every_row(x, own.every)
    if row is not None and not is_first:
        before = call.values["row"]
        row = replace(row, row=row.row + before.row)
    call.values["row"] = row
    given: Any = exps, states, terms, row if s.final else None, of_chunk
    sums_of_weight(call, s.writes).add(gradients, *given, chunk=int(not is_first))


def sums_of_weight(call: Call, names: Sequence[str]) -> WeightSums:
    """Return dW's sums over chunks."""
    if names[0] == "into":
        assert call.inputs.accumulate_into is not None
        return WeightSums.in_buffer(call.inputs.accumulate_into, call.values["known"])
    own, *low = (call.view(name) for name in names)
    bits = call.program.low_bits if low else 0
    return WeightSums(own, low[0] if low else own.new_empty(0, 0, dtype=torch.uint8), bits)


def bias(call: Call, s: Step) -> None:
    """Sum the columns of exponentials with the factors of tokens."""
    x, scaling = call.part(s.rows), call.values["scaling"]
    out = call.view(s.writes[0]).view(-1)[s.columns[0] : s.columns[1]]
    exps = exps_of(call, s, s.reads)
    if call.program.in_forward:
        sums = weighted_sum(exps, scaling.dx.scale)
        out.copy_(out + sums if s.adds else sums)
        if s.final:
            every = call.values.get("every")
            finish_dbias(out, call.inputs.targets, call.values["target"], every)
        return
    scale = scale_of(call) if "factors" in s.reads else None
    factors = RowFactors.ones(x.h) if scale is None else RowFactors.of(scale, x.h.dtype)
    out.copy_(factors.sum(exps))


def rescale(call: Call, s: Step) -> None:
    """Make sums relative to the references of probabilities."""
    sums, *low = (call.view(name) for name in s.writes)
    scale = call.values["scaling"].relative
    if low:
        call.inputs.primitives.gradients.scale_kept_rows(sums, used(call, low[0]), scale)
    else:
        sums.mul_(scale[:, None])


def kept_hidden(call: Call, names: Sequence[str], *, rounded: bool) -> HiddenSums:
    """Return what is kept of dX's sums over chunks."""
    own = call.view("dx")
    low = [call.view(name) for name in names if name.startswith("low")]
    hidden = own.shape[1]
    kept = own.new_empty(0, 0, dtype=torch.uint8)
    if low:
        kept = low[0][:, : hidden * few_low_bits(hidden) // 8]
    factor = call.inputs.targets.tensors.grad_output if rounded else None
    return HiddenSums(own, kept, factor)


def keep_hidden(call: Call, s: Step) -> None:
    """Keep the sums of a chunk."""
    part, sums = call.part(s.rows), rows_of(call, s, "sums")
    scaling = call.values.get("scaling")
    kept = kept_hidden(call, s.writes, rounded=s.final)
    given = part, call.values["stats"], None if scaling is None else scaling.dx
    kept.keep(slice(*s.rows), sums, *given)
    if not s.final and not len(kept.low):
        kept.gradient[slice(*s.rows)] = sums


def finish_hidden(call: Call, s: Step) -> None:
    """Round dX."""
    x, out = call.inputs, call.view(s.writes[0])
    if call.program.in_forward:
        kept = kept_hidden(call, s.reads, rounded=call.values["rounds"])
        given = call.values["stats"], call.values["upstream"], call.values["selection"]
        call.values["dx"] = kept.finish(x, *given)
        return
    scaling = call.values["scaling"]
    names = [n for n in s.reads if n in ("sums", "dx")]
    low = [n for n in s.reads if n.startswith("low")]
    gradients, term = x.primitives.gradients, class_term(x, scaling.dx)
    order = None if x.targets.selection is None else x.targets.selection.order
    sums, rows = call.view(names[0]), (x.w, x.targets, scaling.dx, term, order)
    if low:
        gradients.finish_kept(out, sums, used(call, call.view(low[0])), *rows)
    else:
        gradients.finish_dx(out, sums, *rows)


def finish_weight(call: Call, s: Step) -> None:
    """Multiply dW's sums by the upstream gradient, and round or add them."""
    sums, upstream = sums_of_weight(call, s.reads), call.values["upstream"]
    if s.adds:
        assert call.inputs.accumulate_into is not None
        sums.add_to(call.inputs.accumulate_into, upstream)
    else:
        sums.finish(call.inputs.primitives.gradients, upstream)


def finish_bias(call: Call, s: Step) -> None:
    """Finish the gradient of the bias, in the dtype of sums."""
    x, dbias = call.inputs, call.view(s.reads[0]).view(-1)
    if call.program.in_forward:
        call.values["dbias"] = dbias * call.values["upstream"]
        return
    scaling = call.values["scaling"]
    finish_dbias(dbias, x.targets, scaling.target, scaling.every)
    call.values["dbias"] = dbias.mul(scaling.grad_scale)


def used(call: Call, low: Tensor) -> Tensor:
    """Return the bytes of low bits that are used."""
    return low[:, : call.inputs.h.shape[1] * call.program.low_bits // 8]


TABLE: dict[Kind, Callable[[Call, Step], None]] = {
    Kind.SELECT: nothing,
    Kind.CLASS_ROW: nothing,
    Kind.GATHER: gather,
    Kind.TARGET_LOGIT: target_logit,
    Kind.CLEAR: clear,
    Kind.PROJECT: project,
    Kind.REDUCE: reduce,
    Kind.LOSS: finish_loss,
    Kind.COEFFICIENTS: coefficients,
    Kind.ENTRIES: entries,
    Kind.SCALE_EXPS: scale_exps,
    Kind.LIST_TARGETS: list_targets,
    Kind.GEMM_HIDDEN: gemm_hidden,
    Kind.GEMM_WEIGHT: gemm_weight,
    Kind.BIAS: bias,
    Kind.RESCALE: rescale,
    Kind.KEEP_HIDDEN: keep_hidden,
    Kind.FINISH_HIDDEN: finish_hidden,
    Kind.FINISH_WEIGHT: finish_weight,
    Kind.FINISH_BIAS: finish_bias,
}
