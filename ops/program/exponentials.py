"""Steps of logits: row sums, statistics and the loss, exponentials, and the factors of tokens."""

import copy
from typing import Any

import torch

from cutefce.cute_kernels.arch.base import TILE_K
from cutefce.ops.outputs.rows import output_rows
from cutefce.ops.primitives.portable_gradients import scale_by_log
from cutefce.ops.primitives.portable_projection import Logits
from cutefce.ops.primitives.weighted_sum import add_soft_rows
from cutefce.ops.program.run import Call
from cutefce.ops.program.steps import Step
from cutefce.ops.rows.scaling import as_probabilities
from cutefce.ops.rows.statistics import RowStats, reduce_losses, returned_rows
from cutefce.ops.rows.targets import OUTPUTS


def gather(call: Call, s: Step) -> None:
    """Write hidden states in the order of the targets, scaled if factors are read."""
    x, out = call.part(s.rows), call.rows(s, s.writes[0])
    scale, selection = call.scale() if "factors" in s.reads else None, x.targets.selection
    if selection is not None:
        x.primitives.select(x.h, selection, scale, out)
    else:
        assert scale is not None, "else the hidden states themselves are read"
        x.primitives.scale_rows(out, x.h, scale)


def target_logit(call: Call, s: Step) -> None:
    """Find the logits of targets."""
    x = call.part(s.rows)
    call.values["logits"] = x.primitives.target_logit(x.h, x.w, x.targets)
    call.values["partials"] = []
    call.values.pop("partial", None)  # of the chunk before
    if x.targets.class_logits is not None:
        call.values.setdefault("class logits", []).append(x.targets.class_logits)


def all_reduce(call: Call, s: Step) -> None:
    """Take the logits of targets from the ranks that have them."""
    x = call.part(s.rows)
    assert x.ranks is not None
    call.values["logits"] = x.ranks.target_logit(call.values["logits"], x.targets)


def all_gather(call: Call, s: Step) -> None:
    """Gather the row sums of all ranks."""
    x = call.part(s.rows)
    primitives, ranks = x.primitives, x.ranks
    assert ranks is not None
    partial = primitives.concat_partials(call.values.pop("partials"))
    shares = primitives.gather_partials(partial, ranks.all_gather)
    call.values |= {"partial": partial, "shares": shares}


def clear(call: Call, s: Step) -> None:
    """Clear the rows that dW's kernels read even of a chunk of which no row counts."""
    call.view(s.writes[0])[:TILE_K].zero_()


def project(call: Call, s: Step) -> None:
    """Sum exponentials, or compute them again."""
    x, states = call.part(s.rows), call.states(s)
    primitives = x.primitives
    exps = None if s.exps is None else call.exps(s, whole=True)
    if "logits" in s.reads:
        logits = Logits(states, x.w, s.columns, call.values["logits"], x.targets)
        call.values["partials"].append(primitives.project_exp(logits, exps))
        leave_out_entries(call, s)
        return
    assert exps is not None
    stats, targets = call.values["stats"], x.targets
    if s.repairs and "exps" not in s.writes:
        logits = Logits(states, x.w, s.columns, stats.reference, targets)
        primitives.repair_stored_exps(logits, exps, call.values["partial"])
        return
    if s.repairs:  # of windows that are not stored
        targets = copy.copy(targets)
        targets.selection = primitives.far_rows(call.values["partial"], x.targets)
        call.values["far rows"] = targets.selection
    is_early = s.repairs or "stats" in s.reads
    reference = stats.reference if is_early else call.values["scaling"].reference
    primitives.recompute_exp(Logits(states, x.w, s.columns, reference, targets), exps)
    leave_out_entries(call, s)


def leave_out_entries(call: Call, s: Step) -> None:
    """Clear exponentials of a chunk's window that become entries, which all columns' sums tell."""
    x = call.part(s.rows)
    is_window = call.program.in_chunks and s.columns != (0, x.w.shape[0])
    if is_window and x.targets.soft is not None:
        x.primitives.put_soft(None, call.exps(s), s.columns[0], x.targets)


def reduce(call: Call, s: Step) -> None:
    """Make statistics of row sums, with the outputs that are asked for, and the loss."""
    x, logit = call.part(s.rows), call.values["logits"]
    primitives, targets = x.primitives, x.targets
    if targets.soft is not None and targets.soft.excess is None:
        # launched behind a product, it takes no CPU time for which a GPU waits
        excess = primitives.soft_excess(x.h, x.w, targets, logit)
        targets.soft.excess = excess if x.ranks is None else x.ranks.all_reduce_(excess)
    if x.ranks is None:
        partial = primitives.concat_partials(call.values.pop("partials"))
        stats, loss = primitives.reduce_partials(partial, logit, targets)
    else:
        partial = call.values["partial"]
        stats, loss = primitives.reduce_partials(call.values.pop("shares"), logit, targets)
        # where another rank has the target
        stats.sum_exp_others.masked_fill_(targets.active & ~targets.owned, 0)
    others = output_rows(x, call.states(s), partial, logit, stats)
    if x.h.dtype == torch.float16:
        stats = as_probabilities(stats)
    if others:
        stats = RowStats(torch.cat([stats.rows, *others]))
    call.values |= {"stats": stats, "partial": partial, "loss": loss}
    call.values.setdefault("all", []).append(stats.rows)
    if targets.soft is not None and targets.soft.excess is not None:
        call.values.setdefault("excess", []).append(targets.soft.excess)


def finish_loss(call: Call, s: Step) -> None:
    """Join the statistics of chunks, and return what the reduction asks for."""
    targets, every = call.inputs.targets, call.values.pop("all")
    excess = call.values.pop("excess", None)
    if call.program.in_chunks:
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
    """Compute the factors of tokens, and choose where they are applied."""
    if "last factors" in s.writes:
        return
    x, stats = call.part(s.rows), call.values["stats"]
    if not call.program.in_chunks:
        given: Any = x.h.dtype, x.targets, stats, call.values["upstream"]
        is_late = len(s.writes) > 1 or s.final
        made = x.primitives.scaling(*given, in_reference=is_late)
        call.values |= {"scaling": made, "entries": made.entries}
        return
    whole, dtype = call.inputs.targets, stats.rows.dtype
    loss_scale = whole.loss_scale(dtype)
    given = x.h.dtype, x.targets, stats, loss_scale
    scaling = x.primitives.scaling(*given, in_reference=False)
    tokens, rows = len(whole.index), slice(*s.rows)
    call.values["scaling"] = scaling
    if call.program.problem.adds_in_forward:
        assert whole.tensors.grad_output is not None
        call.values["known"] = whole.tensors.grad_output
    for name, values in (("target", scaling.dx.target), ("every", scaling.dx.every)):
        if values is not None:
            if rows.start == 0 or name not in call.values:
                call.values[name] = loss_scale.new_zeros(tokens)
            call.values[name][rows] = values


def entries(call: Call, s: Step) -> None:
    """Put the terms of other target classes among exponentials, or add them to dX's sums."""
    x, scaling = call.part(s.rows), call.values.get("scaling")
    if s.writes[0].startswith("sums"):
        values = x.targets.soft_entries(call.values["stats"], x.h.dtype)
        if values is not None:
            add_soft_rows(call.rows(s, s.writes[0]), values, x.targets, x.w)
        return
    exps = call.exps(s)
    if call.program.in_chunks:
        values = x.targets.soft_entries(call.values["stats"], x.h.dtype)
    else:
        assert scaling is not None
        values = scaling.entries
        if scaling.factor is not None:
            scale_by_log(exps, *scaling.factor)
    call.values["entries"] = values
    if values is not None:
        x.primitives.put_soft(values, exps, s.columns[0], x.targets)


def scale_exps(call: Call, s: Step) -> None:
    """Multiply exponentials by the factors of tokens; put entries that are rounded with them."""
    x, own = call.part(s.rows), call.values["scaling"]
    coefficients = own.dx if call.program.in_chunks else own
    target, scale = coefficients.target, call.scale()
    assert scale is not None
    if "known" in call.values:
        target = target * call.values["known"]
    entries = call.values["entries"]
    x.primitives.scale_soft(entries, target, call.exps(s), s.columns[0], x.targets, scale)
