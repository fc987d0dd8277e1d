"""Forward and backward of a divergence, as the two parts of its program; steps of gradients."""

from collections.abc import Callable
from enum import Enum

import torch
from torch import Tensor

from cutefce.ops.divergence import tiles
from cutefce.ops.divergence.inputs import Call, DivergenceInputs, matrix
from cutefce.ops.divergence.kernels import RowKernel
from cutefce.ops.divergence.steps import DW, DX, STATS, TileKind, side_of
from cutefce.ops.primitives.products import matmul_into
from cutefce.ops.primitives.weighted_sum import weighted_sum
from cutefce.ops.program.run import SavedMemory
from cutefce.ops.program.steps import Home, Kind, Step


def forward(x: DivergenceInputs) -> tuple[Tensor, SavedMemory]:
    """Return the statistics (7, M), and the memory that is saved for the backward."""
    call = Call(x.plan.program, x)
    stats = call.values["stats"] = x.h.new_empty(STATS, len(x.h), dtype=x.dtype)
    if x.plan.is_one_pass and x.plan.tokens:
        call.values["row kernel"] = RowKernel.of(x)
    call.allocate(Home.SAVED)
    for side, home in zip(x.sides, DW, strict=True):
        if home in call.program.homes_of_forward:
            call.memory[home] = side.w.new_empty(side.w.shape)
    call.run(call.program.forward, Home.FORWARD, TABLE)
    return stats, SavedMemory(x.plan.program, call.memory)


def backward(x: DivergenceInputs, saved: SavedMemory | None, stats: Tensor) -> list[Tensor]:
    """Return dX, dW and the bias' gradient of student and teacher, without rows if not asked for.

    Factors that are not `saved` any more are computed again, by the forward.
    """
    memory = None if saved is None else saved.take()
    if memory is None and x.plan.kept:
        _, saved = forward(x)
        memory = saved.take()
    call = Call(x.plan.program, x, memory or {})
    del saved
    results: list[Tensor] = []
    for i, side in enumerate(x.sides):
        of_hidden, of_weight, of_bias = x.options.gradients(i)
        tokens, (classes, hidden) = call.program.problem.tokens, side.w.shape
        call.memory[DX[i]] = side.h.new_empty(tokens * of_hidden, hidden)
        if DW[i] not in call.memory:
            call.memory[DW[i]] = side.w.new_empty(classes * of_weight, hidden)
        bias = x.options.of_logits(i)[1].linear_bias
        like = side.w if bias is None else bias
        results += call.memory[DX[i]], call.memory[DW[i]], like.new_empty(classes * of_bias)
    call.values |= {"stats": stats, "bias": results[2::3]}
    call.run(call.program.backward, Home.BACKWARD, TABLE)
    return results


def scale_hidden(call: Call, s: Step) -> None:
    """Multiply hidden states by what gradients are multiplied by."""
    index, out = side_of(s.writes[0]), matrix(call, s.writes[0])
    torch.mul(call.inputs.sides[index].h, call.inputs.scales[index][0], out=out)


def gemm_hidden(call: Call, s: Step) -> None:
    """Write or add a window's part of dX's sums."""
    w, sums = call.inputs.sides[side_of(s.reads[0])].w, matrix(call, s.writes[0])
    factors = tiles.window(call, s.reads[0], s.columns)
    matmul_into(sums, factors, w[slice(*s.columns)], accumulate=s.adds)


def gemm_weight(call: Call, s: Step) -> None:
    """Write a window's rows of dW, by way of sums if there is room for them."""
    index, out = side_of(s.reads[0]), matrix(call, s.writes[0])
    factors = tiles.window(call, s.reads[0], s.columns).t()
    if len(s.reads) > 1:
        matmul_into(out, factors, matrix(call, s.reads[1]), accumulate=False)
        return
    sums = matrix(call, s.writes[1], len(out)) if len(s.writes) > 1 else out
    matmul_into(sums, factors, call.inputs.sides[index].h, accumulate=False)
    sums.mul_(call.inputs.scales[index][0])
    if sums is not out:
        out.copy_(sums)


def bias(call: Call, s: Step) -> None:
    """Write a window of the gradient of the bias."""
    index = side_of(s.reads[0])
    logits, (common, _) = call.inputs.sides[index].logits, call.inputs.scales[index]
    assert logits is not None
    sums = weighted_sum(tiles.window(call, s.reads[0], s.columns), None)
    call.values["bias"][index][slice(*s.columns)] = sums.mul_(common / logits.scale)


def finish_hidden(call: Call, s: Step) -> None:
    """Write dX (N, D), 0 for tokens that are not computed."""
    x, index, out = call.inputs, side_of(s.writes[0]), matrix(call, s.writes[0])
    sums = matrix(call, s.reads[0]).mul_(x.scales[index][0])
    if x.selection is not None:
        rows = x.shard.finish_dx(sums, out.dtype)
        out.zero_().index_copy_(0, x.selection.order, rows)
    elif call.program.problem.sharded:
        out.copy_(x.shard.finish_dx(sums, out.dtype))
    elif sums.dtype != out.dtype:
        out.copy_(sums)


TABLE: dict[Enum, Callable[[Call, Step], None]] = {
    TileKind.ROWS: tiles.rows,
    TileKind.ADD_EXPS: tiles.add_exps,
    TileKind.FINISH_LSES: tiles.finish_lses,
    TileKind.ADD_TERMS: tiles.add_terms,
    Kind.ALL_REDUCE: tiles.all_reduce,
    TileKind.COPY: tiles.copy,
    TileKind.FACTORS: tiles.factors,
    Kind.GATHER: scale_hidden,
    Kind.GEMM_HIDDEN: gemm_hidden,
    Kind.GEMM_WEIGHT: gemm_weight,
    Kind.BIAS: bias,
    Kind.FINISH_HIDDEN: finish_hidden,
}
