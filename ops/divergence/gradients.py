"""Steps of the gradients of a side, which are sums over windows of factors."""

import torch

from cutefce.ops.divergence.operands import Call, matrix
from cutefce.ops.divergence.steps import side_of
from cutefce.ops.divergence.tiles import window
from cutefce.ops.primitives.portable_gradients import matmul_into
from cutefce.ops.primitives.weighted_sum import weighted_sum
from cutefce.ops.program.steps import Step
from cutefce.ops.rows.blocks import row_blocks


def scale(call: Call, s: Step) -> None:
    """Multiply hidden states by what gradients are multiplied by."""
    index = side_of(s)
    h, (common, _) = call.inputs.sides[index].h, call.values["scales"][index]
    torch.mul(h, common, out=matrix(call, s.writes[0], h.dtype, *h.shape))


def gemm_hidden(call: Call, s: Step) -> None:
    """Write or add a window's part of dX's sums."""
    x, side = call.inputs, call.inputs.sides[side_of(s)]
    sums = matrix(call, s.writes[0], x.dtype, *side.h.shape)
    factors = window(call, s.reads[0], s.columns)
    matmul_into(sums, factors, side.w[slice(*s.columns)], accumulate=s.adds)


def gemm_weight(call: Call, s: Step) -> None:
    """Write a window's rows of dW, by way of sums if there is room for them."""
    x, side = call.inputs, call.inputs.sides[side_of(s)]
    factors, own, *wide = window(call, s.reads[0], s.columns), *s.writes
    shape = factors.shape[1], side.h.shape[1]
    out = matrix(call, own, side.h.dtype, *shape)
    if len(s.reads) > 1:
        scaled = matrix(call, s.reads[1], side.h.dtype, *side.h.shape)
        matmul_into(out, factors.t(), scaled, accumulate=False)
        return
    sums = matrix(call, wide[0], x.dtype, *shape) if wide else out
    matmul_into(sums, factors.t(), side.h, accumulate=False)
    sums.mul_(call.values["scales"][side_of(s)][0])
    if wide:
        out.copy_(sums)


def bias(call: Call, s: Step) -> None:
    """Write a window of the gradient of the bias."""
    index = side_of(s)
    logits, (common, _) = call.inputs.sides[index].logits, call.values["scales"][index]
    assert logits is not None
    sums = weighted_sum(window(call, s.reads[0], s.columns), None)
    call.values["bias"][index][slice(*s.columns)] = sums.mul_(common / logits.scale)


def finish_hidden(call: Call, s: Step) -> None:
    """Write dX (N, D), 0 for tokens that are not computed."""
    x, side, p = call.inputs, call.inputs.sides[side_of(s)], call.program.problem
    out = matrix(call, s.writes[0], side.h.dtype, p.tokens, side.h.shape[1])
    sums = x.shard.reduce_dx(matrix(call, s.reads[0], x.dtype, *side.h.shape))
    is_placed = x.selection is None and not p.sharded
    rows = out if is_placed else out.new_empty(sums.shape)
    for part in row_blocks(sums):
        torch.mul(sums[part], call.values["scales"][side_of(s)][0], out=rows[part])
    if is_placed:
        return
    rows = x.shard.gather_dx(rows, len(side.h))
    if x.selection is None:
        out.copy_(rows)
    else:
        out.zero_().index_copy_(0, x.selection.order, rows)
