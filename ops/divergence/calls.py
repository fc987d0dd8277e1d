"""Forward and backward of a divergence, as the two parts of its program."""

from collections.abc import Callable
from enum import Enum

from torch import Tensor

from cutefce.ops.divergence import gradients, tiles
from cutefce.ops.divergence.inputs import Call, DivergenceInputs
from cutefce.ops.divergence.steps import DW, DX, STATS, TileKind
from cutefce.ops.program.run import SavedMemory
from cutefce.ops.program.steps import Home, Kind, Step

TABLE: dict[Enum, Callable[[Call, Step], None]] = {
    TileKind.ROWS: tiles.rows,
    TileKind.ADD_EXPS: tiles.add_exps,
    TileKind.FINISH_LSES: tiles.finish_lses,
    TileKind.ADD_TERMS: tiles.add_terms,
    Kind.ALL_REDUCE: tiles.all_reduce,
    TileKind.COPY: tiles.copy,
    TileKind.FACTORS: tiles.factors,
    Kind.GATHER: gradients.scale,
    Kind.GEMM_HIDDEN: gradients.gemm_hidden,
    Kind.GEMM_WEIGHT: gradients.gemm_weight,
    Kind.BIAS: gradients.bias,
    Kind.FINISH_HIDDEN: gradients.finish_hidden,
}


def forward(x: DivergenceInputs) -> tuple[Tensor, SavedMemory]:
    """Return the statistics (7, M), and the memory that is saved for the backward."""
    call = Call(x.plan.program, x)
    stats = call.values["stats"] = x.h.new_empty(STATS, len(x.h), dtype=x.dtype)
    call.allocate(Home.SAVED)
    for side, home in zip(x.sides, DW, strict=True):
        if home in call.program.homes_of_forward:
            call.memory[home] = side.w.new_empty(side.w.shape)
    call.run(call.program.forward, Home.FORWARD, TABLE)
    return stats, SavedMemory(x.plan.program, call.memory)


def backward(
    x: DivergenceInputs, saved: SavedMemory | None, stats: Tensor, upstream: Tensor
) -> list[Tensor]:
    """Return dX, dW and the bias' gradient of student and teacher, without rows if not asked for.

    Factors that are not `saved` any more are computed again, by the forward.
    """
    memory = None if saved is None else saved.take()
    if memory is None and x.plan.kept:
        _, saved = forward(x)
        memory = saved.take()
    call = Call(x.plan.program, x, memory or {})
    del saved
    upstream, trained = upstream.to(x.dtype), call.program.problem.trained
    scales = {i: x.sides[i].scales(upstream, x.loss_scale) for i in trained}
    results: list[Tensor] = []
    for i, side in enumerate(x.sides):
        of_hidden, of_weight, of_bias = x.options.gradients(i)
        tokens, (classes, hidden) = call.program.problem.tokens, side.w.shape
        call.memory[DX[i]] = side.h.new_empty(tokens * of_hidden, hidden)
        if DW[i] not in call.memory:
            call.memory[DW[i]] = side.w.new_empty(classes * of_weight, hidden)
        like = side.w if side.bias is None else side.bias
        results += call.memory[DX[i]], call.memory[DW[i]], like.new_empty(classes * of_bias)
    call.values |= {"stats": stats, "scales": scales, "bias": results[2::3]}
    call.run(call.program.backward, Home.BACKWARD, TABLE)
    return results
