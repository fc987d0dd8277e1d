"""Forward and backward of a call, as the two parts of its program."""

from collections.abc import Collection

from torch import Tensor

from cutefce.ops.program.inputs import LossInputs
from cutefce.ops.program.plan import Plan
from cutefce.ops.program.run import Call, SavedMemory
from cutefce.ops.program.steps import Home
from cutefce.ops.program.table import TABLE
from cutefce.ops.rows.selection import RowSelection
from cutefce.ops.rows.statistics import RowStats


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
        call.memory[Home.DX] = x.h.new_empty((p.tokens, p.hidden), dtype=x.dx_dtype)
    if Home.DW in homes:
        call.memory[Home.DW] = x.w.new_empty(x.w.shape, dtype=x.dw_dtype)


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
