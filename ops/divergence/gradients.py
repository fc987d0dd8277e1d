"""Steps of the gradients of a side, which are sums over windows of factors."""

import torch

from cutefce.ops.divergence.inputs import Call, matrix
from cutefce.ops.divergence.steps import side_of
from cutefce.ops.divergence.tiles import window
from cutefce.ops.primitives.products import matmul_into
from cutefce.ops.primitives.weighted_sum import weighted_sum
from cutefce.ops.program.steps import Step


def scale(call: Call, s: Step) -> None:
    """Multiply hidden states by what gradients are multiplied by."""
    index, out = side_of(s.writes[0]), matrix(call, s.writes[0])
    torch.mul(call.inputs.sides[index].h, call.values["scales"][index][0], out=out)


def gemm_hidden(call: Call, s: Step) -> None:
    """Write or add a window's part of dX's sums."""
    w, sums = call.inputs.sides[side_of(s.reads[0])].w, matrix(call, s.writes[0])
    factors = window(call, s.reads[0], s.columns)
    matmul_into(sums, factors, w[slice(*s.columns)], accumulate=s.adds)


def gemm_weight(call: Call, s: Step) -> None:
    """Write a window's rows of dW, by way of sums if there is room for them."""
    index, out = side_of(s.reads[0]), matrix(call, s.writes[0])
    factors = window(call, s.reads[0], s.columns).t()
    if len(s.reads) > 1:
        matmul_into(out, factors, matrix(call, s.reads[1]), accumulate=False)
        return
    sums = matrix(call, s.writes[1], len(out)) if len(s.writes) > 1 else out
    matmul_into(sums, factors, call.inputs.sides[index].h, accumulate=False)
    sums.mul_(call.values["scales"][index][0])
    if sums is not out:
        out.copy_(sums)


def bias(call: Call, s: Step) -> None:
    """Write a window of the gradient of the bias."""
    index = side_of(s.reads[0])
    logits, (common, _) = call.inputs.sides[index].logits, call.values["scales"][index]
    assert logits is not None
    sums = weighted_sum(window(call, s.reads[0], s.columns), None)
    call.values["bias"][index][slice(*s.columns)] = sums.mul_(common / logits.scale)


def finish_hidden(call: Call, s: Step) -> None:
    """Write dX (N, D), 0 for tokens that are not computed."""
    x, index, out = call.inputs, side_of(s.writes[0]), matrix(call, s.writes[0])
    sums = matrix(call, s.reads[0]).mul_(call.values["scales"][index][0])
    if x.selection is not None:
        rows = x.shard.finish_dx(sums, out.dtype)
        out.zero_().index_copy_(0, x.selection.order, rows)
    elif call.program.problem.sharded:
        out.copy_(x.shard.finish_dx(sums, out.dtype))
    elif sums.dtype != out.dtype:
        out.copy_(sums)
