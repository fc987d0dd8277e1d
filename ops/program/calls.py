"""Forward and backward of a call as its program; which function runs which step."""

from collections.abc import Callable, Collection
from enum import Enum

from torch import Tensor

from cutefce.ops.program import exponentials, hidden, weight
from cutefce.ops.program.inputs import LossInputs
from cutefce.ops.program.plan import Plan
from cutefce.ops.program.run import Call, SavedMemory
from cutefce.ops.program.steps import Home, Kind, Step
from cutefce.ops.rows.selection import RowSelection
from cutefce.ops.rows.statistics import RowStats
from cutefce.ops.sampling.kernels import SAMPLING


def nothing(call: Call, s: Step) -> None:
    """Do nothing: what the step says is done with another one."""


TABLE: dict[Enum, Callable[[Call, Step], None]] = {
    Kind.SELECT: nothing,
    Kind.CLASS_ROW: nothing,
    Kind.GATHER: exponentials.gather,
    Kind.TARGET_LOGIT: exponentials.target_logit,
    Kind.ALL_REDUCE: exponentials.all_reduce,
    Kind.ALL_GATHER: exponentials.all_gather,
    Kind.CLEAR: exponentials.clear,
    Kind.PROJECT: exponentials.project,
    Kind.REDUCE: exponentials.reduce,
    Kind.LOSS: exponentials.finish_loss,
    Kind.COEFFICIENTS: exponentials.coefficients,
    Kind.ENTRIES: exponentials.entries,
    Kind.SCALE_EXPS: exponentials.scale_exps,
    Kind.LIST_TARGETS: weight.list_targets,
    Kind.GEMM_HIDDEN: hidden.gemm_hidden,
    Kind.GEMM_WEIGHT: weight.gemm_weight,
    Kind.BIAS: weight.bias,
    Kind.RESCALE: hidden.rescale,
    Kind.KEEP_HIDDEN: hidden.keep_hidden,
    Kind.FINISH_HIDDEN: hidden.finish_hidden,
    Kind.FINISH_WEIGHT: weight.finish_weight,
    Kind.FINISH_BIAS: weight.finish_bias,
    **SAMPLING,
}
"""What an operator has done before: SELECT and CLASS_ROW, whose results are among the inputs."""


def forward(inputs: LossInputs, plan: Plan) -> tuple[Tensor, RowStats, SavedMemory]:
    """Return the loss, the statistics, and the memory that is saved for the backward."""
    call = Call(plan.program, inputs)
    call.allocate(Home.SAVED)
    allocate_gradients(call, call.program.homes_of_forward)
    call.run(call.program.forward, Home.FORWARD, TABLE)
    return call.values["loss"], call.values["stats"], SavedMemory(plan.program, call.memory)


def allocate_gradients(call: Call, homes: Collection[Home | None]) -> None:
    """Allocate the gradients that steps write to."""
    x, p = call.inputs, call.program.problem
    if Home.DX in homes:
        call.memory[Home.DX] = x.h.new_empty((p.tokens, p.hidden), dtype=call.dtype_of(p.dx_item))
    if Home.DW in homes:
        call.memory[Home.DW] = x.w.new_empty(x.w.shape, dtype=call.dtype_of(p.dw_item))


def backward(
    plan: Plan,
    memory: dict[Home, Tensor],
    inputs: LossInputs,
    upstream: Tensor,
    stats: RowStats,
    selection: RowSelection | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return dX, dW and, in the dtype of sums, the bias' gradient; what is not computed is None.

    `memory` is what the forward has saved.  `selection` is that of the tokens, which the targets of
    a program in chunks have not.
    """
    if inputs.targets.options.scales_exps != plan.problem.scales_exps:
        plan = plan.without_entropy  # entropy has no gradient after all
    program = plan.program
    call = Call(program, inputs, memory)
    call.values |= {"upstream": upstream, "stats": stats, "selection": selection}
    allocate_gradients(call, program.homes - call.memory.keys())
    call.run(call.program.backward, Home.BACKWARD, TABLE)
    dx, dw = call.memory.pop(Home.DX, None), call.memory.pop(Home.DW, None)
    return call.values.get("dx", dx), dw, call.values.get("dbias")
