"""Forward and backward of a call, as the two parts of its program."""

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from cutefce.cute_kernels.problem import LOW_BITS
from cutefce.cute_kernels.process_cache import process_cache
from cutefce.ops.dtypes import sum_dtype
from cutefce.ops.planning.plan import Plan
from cutefce.ops.planning.step_memory import few_low_bits
from cutefce.ops.program.inputs import LossInputs
from cutefce.ops.program.layout import Layout
from cutefce.ops.program.lower import lower
from cutefce.ops.program.problem import Problem, Upstream
from cutefce.ops.program.run import Call, Left
from cutefce.ops.program.steps import Buffer, Home, Program, Step
from cutefce.ops.program.table import TABLE
from cutefce.ops.rows.selection import RowSelection
from cutefce.ops.rows.statistics import RowStats
from cutefce.ops.rows.targets import OUTPUTS


@dataclass(frozen=True)
class PrimitivesBackend:
    """Primitives that allocate what tokens have, lists of targets and scratch themselves."""

    block: int
    places_values = False

    def partial_sums(self, p: Problem, rows: int, columns: int) -> int:
        """Return 0."""
        return 0

    def few_low_bits(self, p: Problem) -> int:
        """Return 4, or 8 where two columns of a byte would be of two rows."""
        return few_low_bits(p.hidden)

    def listed_targets(self, p: Problem) -> int:
        """Return 0."""
        return 0

    def scratch(self, p: Problem, step: Step) -> int:
        """Return 0."""
        return 0


@process_cache
def program_of(p: Problem, x: Layout, block: int) -> Program:
    """Return the program of a problem and a layout."""
    return lower(p, x, PrimitivesBackend(block))


def program_for(inputs: LossInputs[Any, Any], plan: Plan) -> tuple[Program, Layout]:
    """Return the program of a call with a plan, and its layout."""
    h, w, targets = inputs.h, inputs.w, inputs.targets
    item, sums = h.itemsize, sum_dtype(h.dtype).itemsize
    into = 0 if inputs.accumulate_into is None else inputs.accumulate_into.itemsize
    upstream = Upstream.SCALAR if targets.options.is_scalar else Upstream.ROWS
    if plan.adds_in_forward:
        upstream = Upstream.KNOWN
    indices = targets.tensors.target_indices
    is_soft = indices is not None and indices.shape[-1] > 1
    p = Problem(
        inputs.tokens,
        h.shape[1],
        len(w),
        item,
        sums,
        plan.grad_hidden,
        plan.grad_weight,
        plan.grad_bias,
        upstream,
        targets.scales_rows,
        inputs.class_row is not None,
        is_soft,
        is_soft and targets.options.reduction == OUTPUTS,
        targets.options.scales_exps,
        selects=targets.selection is not None,
        grad_hidden_item=inputs.dx_dtype.itemsize,
        grad_weight_item=inputs.dw_dtype.itemsize if not into else 0,
        into=into if plan.grad_weight else 0,
    )
    low = plan.hidden_bits or 0
    if inputs.dx_dtype != h.dtype:
        low = 0
    x = Layout(max(inputs.tokens, 1), plan.window, plan.kept, plan.aliased, low)
    if plan.in_forward:
        window = plan.window if plan.has_windows else len(w)
        low = plan.low_bits or LOW_BITS[-1]
        last = plan.kept if plan.has_windows else 0
        x = Layout(max(plan.chunk, 1), window, last, low_bits=low, in_forward=True)
    return program_of(p, x, inputs.primitives.config.reference_block), x


def forward(inputs: LossInputs[Any, Any], plan: Plan) -> tuple[Tensor, RowStats, Left]:
    """Return the loss, the statistics, and what is left for the backward."""
    program, layout = program_for(inputs, plan)
    call = Call(program, inputs)
    call.allocate(Home.KEPT)
    buffers, lives = call.program.buffers, call.program.lives
    middle = len(call.program.forward)
    homes = {b.home for n, b in buffers.items() if lives[n][0] < middle}
    allocate_gradients(call, homes)
    call.run(call.program.forward, Home.FORWARD, TABLE)
    return call.values["loss"], call.values["stats"], Left(program, layout, call.memory)


def _kept(program: Program) -> dict[str, Buffer]:
    """Return where exponentials are between forward and backward."""
    kept = (Home.KEPT, Home.DW)
    return {
        name: b for name, b in program.buffers.items() if name.startswith("exps") and b.home in kept
    }


def allocate_gradients(call: Call, homes: Collection[Home | None]) -> None:
    """Allocate the gradients that steps write to."""
    x, p = call.inputs, call.program.problem
    if Home.DX in homes:
        call.memory[Home.DX] = x.h.new_empty((p.tokens, p.hidden), dtype=x.dx_dtype)
    if Home.DW in homes:
        call.memory[Home.DW] = x.w.new_empty(x.w.shape, dtype=x.dw_dtype)


def backward(
    left: Left,
    inputs: LossInputs[Any, Any],
    upstream: Tensor,
    stats: RowStats,
    selection: RowSelection | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return dX, dW and, in the dtype of sums, the bias' gradient; what is not computed is None.

    `selection` is that of the tokens, which the targets of a program in chunks have not.
    """
    program, options = left.program, inputs.targets.options
    if options.scales_exps != program.problem.scales_exps:  # entropy has no gradient after all
        p = replace(program.problem, scales_exps=options.scales_exps)
        program = program_of(p, left.layout, inputs.primitives.config.reference_block)
        assert _kept(program) == _kept(left.program)
    call = Call(program, inputs, left.taken())
    p, buffers = program.problem, program.buffers.values()
    call.values |= {"upstream": upstream, "stats": stats, "selection": selection}
    call.values["rounds"] = p.upstream is Upstream.KNOWN
    missing = {b.home for b in buffers if b.home not in call.memory}
    allocate_gradients(call, missing)
    call.run(call.program.backward, Home.BACKWARD, TABLE)
    dx, dw = call.memory.pop(Home.DX, None), call.memory.pop(Home.DW, None)
    return call.values.get("dx", dx), dw, call.values.get("dbias")
