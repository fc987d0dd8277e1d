"""Steps of dW and of the bias' gradient, which are sums over tokens.

In a backward, a product writes rows of dW in the dtype of the weight, or as sums; or it adds them
to a buffer of the caller's, in its own memory where that holds what a GEMM adds to, else by way of
a block of rows.

Chunks add to sums until their factor is known.  float32 sums would take twice the memory of a
16-bit dW, and 8 bytes an element would move in every chunk.  So a sum is packed in 20 bits: 16 in
the memory of its element of dW, and four beside it, two columns in a byte.  Sums over many chunks
are packed in 24 bits.  Each chunk adds its products in float32 and rounds to nearest; terms of
targets are added with those of the last chunk, or of each.  dW is rounded once more, at the end.
Sums that are added to a buffer of the caller's are packed in 24 bits; with an upstream gradient
that is known before the backward, they are in the buffer itself.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from cutefce.ops.primitives.block_sizes import added_rows
from cutefce.ops.primitives.portable_gradients import apply_rowwise
from cutefce.ops.primitives.select_rows import row_range
from cutefce.ops.primitives.weighted_sum import weighted_sum
from cutefce.ops.program.inputs import LossInputs
from cutefce.ops.program.run import Call
from cutefce.ops.program.steps import Home, Step
from cutefce.ops.rows.blocks import blocks, row_blocks
from cutefce.ops.rows.coefficients import RankOne
from cutefce.ops.rows.loss_terms import class_weights
from cutefce.ops.rows.packed_sums import Sums, add_packed_to_
from cutefce.ops.rows.target_rows import add_rows_
from cutefce.ops.rows.targets import Targets


def list_targets(call: Call, s: Step) -> None:
    """List the terms of targets and of every class in dW."""
    x, primitives = call.inputs, call.inputs.primitives
    if call.program.in_chunks:
        call.values["listed"] = None
        if primitives.lists_targets:
            target = call.values["target"]
            if "known" in call.values:
                target = target * call.values["known"]
            call.values["listed"] = primitives.target_grad(x.h, target, x.targets)
        return
    scaling = call.values["scaling"]
    target = None if call.program.scales_exps else scaling.target
    call.values["listed"] = primitives.target_grad(x.h, target, x.targets)
    call.values["row"] = every_row(x, scaling.every, call.states(s))


def gemm_weight(call: Call, s: Step) -> None:
    """Write or add a window's rows of dW."""
    states, exps = call.states(s), call.exps(s)
    if not call.program.in_chunks:
        add_window(call, *s.columns, exps, states)
        return
    x = call.part(s.rows)
    primitives, selection = x.primitives, call.inputs.targets.selection
    is_first, of_chunk = s.rows[0] == 0, None
    if selection is not None:
        of_chunk = selection.rows(slice(*s.rows))
        if not (is_first or s.final):  # which begins the sums, or adds the terms of all tokens
            of_chunk = of_chunk.skipping()
    own = call.values["scaling"].dx
    if "known" in call.values:
        own = own.times(call.values["known"])
    if s.final and primitives.lists_targets and not call.program.scales_exps:
        terms = call.values["listed"]
    else:
        has_terms = not (call.program.scales_exps or primitives.lists_targets)
        terms = primitives.target_grad(x.h, own.target if has_terms else None, x.targets)
    plain = call.rows(s, "states") if "states" in s.reads else x.h
    row = every_row(x, own.every, plain)
    if row is not None and not is_first:
        before = call.values["row"]
        row = replace(row, row=row.row + before.row)
    call.values["row"] = row
    more: Any = {"rank_one": row if s.final else None, "selection": of_chunk}
    # the caller's buffer holds sums before the first chunk
    more["accumulate"] = s.adds or s.writes[0] == "into"
    primitives.add_weight(_sums(call, s.writes), exps, states, terms, 0, **more)


def _sums(call: Call, names: tuple[str, ...]) -> Sums:
    """Return dW's sums over chunks, which may be in the caller's buffer."""
    if names[0] == "into":
        assert call.inputs.accumulate_into is not None
        return Sums(call.inputs.accumulate_into)
    return call.sums(names)


def finish_weight(call: Call, s: Step) -> None:
    """Multiply dW's sums by the upstream gradient, and round them or add them to the buffer."""
    sums, factor = _sums(call, s.reads), call.values["upstream"]
    into = call.inputs.accumulate_into
    if s.adds:
        assert into is not None
        if sums.low is None:
            add_rows(into, sums.upper.mul_(factor))
        else:
            apply_rowwise(add_packed_to_, into, sums.words, sums.low, whole=(factor,))
    elif sums.low is None:
        sums.upper.mul_(factor)
    else:
        call.inputs.primitives.finish_packed_dw(sums, factor)


def bias(call: Call, s: Step) -> None:
    """Sum the columns of exponentials with the factors of tokens."""
    x, scaling = call.part(s.rows), call.values["scaling"]
    out = call.view(s.writes[0]).view(-1)[s.columns[0] : s.columns[1]]
    exps = call.exps(s)
    # others hold no numbers
    rows = x.primitives.rows_of_products(exps)
    exps = row_range(exps, 0, rows)
    if call.program.in_chunks:
        sums = weighted_sum(exps, row_range(scaling.dx.scale, 0, rows))
        out.copy_(out + sums if s.adds else sums)
        if s.final:
            every = call.values.get("every")
            finish_dbias(out, call.inputs.targets, call.values["target"], every)
        return
    scale = call.scale() if "factors" in s.reads else None
    out.copy_(weighted_sum(exps, None if scale is None else row_range(scale, 0, rows)))


def finish_bias(call: Call, s: Step) -> None:
    """Finish the gradient of the bias, in the dtype of sums."""
    x, dbias = call.inputs, call.view(s.reads[0]).view(-1)
    if call.program.in_chunks:
        call.values["dbias"] = dbias * call.values["upstream"]
        return
    scaling = call.values["scaling"]
    finish_dbias(dbias, x.targets, scaling.target, scaling.every)
    call.values["dbias"] = dbias.mul(scaling.grad_scale)


def finish_dbias(
    dbias: Tensor, targets: Targets, target: Tensor | None, every: Tensor | None
) -> None:
    """Add the terms of targets (N,) and of every class to the sums of the bias' gradient (V,).

    Those of targets may be in the sums.
    """
    if target is not None:
        add_rows_(dbias, targets.safe_index, target)
    if every is not None and targets.terms is not None:
        weight = targets.terms.class_weight
        dbias.add_(every.sum() if weight is None else every.sum() * weight)
    if targets.logits is not None and targets.logits.scale != 1:
        dbias.div_(targets.logits.scale)


def add_window(call: Call, first: int, last: int, exps: Tensor, scaled: Tensor) -> None:
    """Write, or add, rows [first, last) of dW; `exps` (N, last - first) are their exponentials.

    `scaled` (N, D) are the hidden states with the factors of tokens.
    """
    x, grad_scale = call.inputs, call.values["scaling"].grad_scale
    into, row = x.accumulate_into, call.values["row"]
    p = call.program.problem
    as_sums = into is not None or p.dw_item != p.item_bytes

    def write(out: Tensor, exps: Tensor, first: int, *, accumulate: bool) -> None:
        """Write the rows of dW from `first` on to `out` (K, D), or add."""
        more: Any = {"selection": x.targets.selection, "accumulate": accumulate}
        more["rank_one"] = row and row.rows(slice(first, first + len(out)))
        if not as_sums:
            more["grad_scale"] = grad_scale
        listed, primitives = call.values["listed"], x.primitives
        primitives.add_weight(Sums(out), exps, scaled, listed, first, **more)
        if as_sums and exps.dtype == torch.float16:
            out.mul_(grad_scale)

    rows = row_range(call.memory[Home.DW] if into is None else into, first, last)
    if into is None or can_add_in_place(into, exps.dtype, grad_scale.dtype):
        write(rows, exps, first, accumulate=into is not None)
        return
    add = added_rows(rows.shape[1], grad_scale.itemsize, rows.device.type)
    room = grad_scale.new_empty(min(add, len(rows)), rows.shape[1])
    for part in blocks(len(rows), add):
        own = room[: part.stop - part.start]
        write(own, exps[:, part], first + part.start, accumulate=False)
        add_rows(rows[part], own)


def every_row(inputs: LossInputs, every: Tensor | None, states: Tensor) -> RankOne | None:
    """Return the part κ_v Σ_i every_i h_i of dW (V, D), None without label smoothing.

    `states` (N, D) are the hidden states in the order of the targets.
    """
    if every is None or inputs.targets.terms is None:
        return None
    factor = class_weights(inputs.targets.terms, inputs.w).contiguous()
    return RankOne(factor, weighted_sum(states, every))


def add_rows(buffer: Tensor, sums: Tensor) -> None:
    """Add `sums` (K, D) to `buffer` (K, D), each number rounded once."""
    for rows in row_blocks(sums):
        buffer[rows] += sums[rows]


def can_add_in_place(buffer: Tensor, dtype: torch.dtype, sums: torch.dtype) -> bool:
    """Whether GEMMs of operands of `dtype` can add dW to `buffer` (V, D), of the dtype of `sums`.

    Those of float16 have a factor that is applied after them; kernels need aligned rows.
    """
    is_aligned = not buffer.is_cuda or buffer.data_ptr() % 16 == 0
    return buffer.dtype == sums and dtype != torch.float16 and is_aligned
