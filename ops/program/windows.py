"""Calls over windows, run as programs."""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from cutefce.ops.planning.plan import Plan
from cutefce.ops.program.layout import Layout
from cutefce.ops.program.lower import lower
from cutefce.ops.program.problem import Problem, Upstream
from cutefce.ops.program.run import Call, Left, sum_dtype
from cutefce.ops.program.steps import Home, Program, Step
from cutefce.ops.program.table import TABLE
from cutefce.ops.rows.statistics import RowStats
from cutefce.ops.strategies.loss_inputs import LossInputs


@dataclass(frozen=True)
class PrimitivesBackend:
    """Primitives that allocate their sums of rows and scratch themselves."""

    block: int

    def partial_sums(self, p: Problem, rows: int, columns: int) -> int:
        return 0

    def listed_targets(self, p: Problem) -> int:
        return 0

    def scratch(self, p: Problem, step: Step) -> int:
        return 0


def can_run(inputs: LossInputs[Any, Any], plan: Plan) -> bool:
    """Whether programs serve a call."""
    targets = inputs.targets
    if plan.in_forward or plan.is_sampled or inputs.sampling is not None:
        return False
    return targets.soft is None and targets.dense is None and not targets.options.scales_exps


@lru_cache(maxsize=1024)
def program_of(p: Problem, x: Layout, block: int) -> Program:
    """Return the program of a problem and a layout."""
    return lower(p, x, PrimitivesBackend(block))


def program_for(inputs: LossInputs[Any, Any], plan: Plan) -> Program:
    """Return the program of a call with a plan of windows."""
    h, w, targets = inputs.h, inputs.w, inputs.targets
    item, sums = h.itemsize, sum_dtype(h.dtype).itemsize
    into = 0 if inputs.accumulate_into is None else inputs.accumulate_into.itemsize
    p = Problem(
        inputs.tokens,
        h.shape[1],
        len(w),
        item,
        sums,
        plan.grad_hidden,
        plan.grad_weight,
        plan.grad_bias,
        Upstream.SCALAR if targets.options.is_scalar else Upstream.ROWS,
        targets.scales_rows,
        inputs.class_row is not None,
        selects=targets.selection is not None,
        grad_hidden_item=inputs.dx_dtype.itemsize,
        grad_weight_item=inputs.dw_dtype.itemsize if not into else 0,
        into=into if plan.grad_weight else 0,
    )
    low = plan.hidden_bits or 0
    if inputs.dx_dtype != h.dtype:
        low = 0
    x = Layout(max(inputs.tokens, 1), plan.window, plan.kept, plan.aliased, low)
    return program_of(p, x, inputs.primitives.config.reference_block)


def forward(inputs: LossInputs[Any, Any], plan: Plan) -> tuple[Tensor, RowStats, Left]:
    """Return the loss, the statistics, and what is left for the backward."""
    call = Call(program_for(inputs, plan), inputs)
    call.allocate(Home.KEPT)
    run_forward(call)
    return call.values["loss"], call.values["stats"], Left(call.program, call.memory)


def run_forward(call: Call) -> None:
    """Run the steps of the forward, into the memory that is there."""
    buffers, lives = call.program.buffers, call.program.lives
    middle = len(call.program.forward)
    if any(b.home is Home.DW and lives[n][0] < middle for n, b in buffers.items()):
        w = call.inputs.w
        call.memory[Home.DW] = w.new_empty(w.shape, dtype=call.inputs.dw_dtype)
    call.run(call.program.forward, Home.FORWARD, TABLE)


def backward(
    left: Left, inputs: LossInputs[Any, Any], upstream: Tensor, stats: RowStats
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return dX, dW and, in the dtype of sums, the bias' gradient; what is not computed is None."""
    call = Call(left.program, inputs, left.memory)
    p = call.program.problem
    if left.is_spent:
        run_forward(call)
    left.is_spent = call.program.is_spent
    call.values |= {"upstream": upstream, "stats": stats}
    if p.grad_hidden:
        call.memory[Home.DX] = inputs.h.new_empty((p.tokens, p.hidden), dtype=inputs.dx_dtype)
    if p.grad_weight and not p.into and Home.DW not in call.memory:
        call.memory[Home.DW] = inputs.w.new_empty(inputs.w.shape, dtype=inputs.dw_dtype)
    call.run(call.program.backward, Home.BACKWARD, TABLE)
    dbias = call.values.get("dbias")
    return call.memory.pop(Home.DX, None), call.memory.pop(Home.DW, None), dbias
