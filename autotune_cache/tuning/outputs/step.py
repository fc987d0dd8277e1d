"""Outputs of primitives for a tuning case: losses, exponentials and gradients of a step."""

import copy
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from cutefce.autotune_cache import defaults
from cutefce.autotune_cache.tuning.outputs import samples as sampled_outputs
from cutefce.autotune_cache.tuning.outputs.divergences import divergence_outputs, logits_outputs
from cutefce.autotune_cache.tuning.outputs.soft_targets import LOGIT_ROUNDINGS, soft_outputs
from cutefce.autotune_cache.tuning.targets.base import CheckedOutput, TuningCase
from cutefce.cute_kernels.config import WindowConfig
from cutefce.cute_kernels.integers import ceil_div, round_up
from cutefce.cute_kernels.parts import DIVERGENCES, FORWARD, PARTS, SAMPLES, SOFT_TARGETS, STEP
from cutefce.cute_kernels.problem import LOW_BITS, Problem, can_keep
from cutefce.ops.dtypes import dtype_name, sum_dtype
from cutefce.ops.interface.options import LossOptions, TensorOptions
from cutefce.ops.planning.budget import DEFAULT, MINIMUM
from cutefce.ops.planning.device import device_of
from cutefce.ops.primitives.cute_projection import CuteProjection
from cutefce.ops.primitives.interface import AnyPrimitives
from cutefce.ops.primitives.row_selection import restore_rows, select_on_device
from cutefce.ops.program import calls as programs
from cutefce.ops.program.inputs import LossInputs
from cutefce.ops.program.layout import Layout
from cutefce.ops.program.plan import Plan
from cutefce.ops.program.plan import plan as make_plan
from cutefce.ops.program.primitives_backend import PrimitivesBackend
from cutefce.ops.program.problem import Problem as LossProblem
from cutefce.ops.program.problem import Upstream
from cutefce.ops.program.run import Call
from cutefce.ops.rows import targets as rows
from cutefce.ops.rows.coefficients import RowCoefficients
from cutefce.ops.rows.selection import RowSelection
from cutefce.ops.rows.statistics import RowStats
from cutefce.ops.rows.targets import Targets

Inputs = LossInputs[Any, Any]
IGNORED = -100
FLOOR = torch.finfo(torch.float16).smallest_normal
"""Of relative errors of gradients that were rounded to 16 bits."""


def make_targets(case: TuningCase, reduction: str = "none") -> Targets:
    """Return the targets of a case, with the reduction of their losses."""
    return rows.make_targets(case.y, case.problem.vocab, LossOptions(reduction), TensorOptions())


def loss_inputs(case: TuningCase, primitives: AnyPrimitives, reduction: str = "none") -> Inputs:
    """Return the operands of a step with this `reduction`."""
    h, w = primitives.projection.prepare(case.h, case.w)
    return LossInputs(primitives, h, w, make_targets(case, reduction), h.dtype, h.dtype)


def window_of(case: TuningCase) -> int:
    """Return the columns of a window."""
    return defaults.widest_window(case.problem).window


def kept_columns(case: TuningCase) -> int:
    """Return the columns that a step stores in the default workspace; none of float16."""
    p, block = case.problem, defaults.widest_window(case.problem).reference_block
    if not can_keep(p.dtype):
        return 0
    affordable = DEFAULT // (p.tokens * p.item_bytes) // block * block
    return min(affordable, round_up(p.vocab, block))


def smallest_plan(operands: Problem, configs: Sequence[WindowConfig]) -> Plan:
    """Return the plan of a step in windows with the smallest workspace."""
    problem = LossProblem(
        operands.tokens,
        operands.hidden,
        operands.vocab,
        operands.item_bytes,
        operands.accumulator_bytes,
        operands.grad_hidden,
        operands.grad_weight,
        stores=can_keep(operands.dtype),
    )
    widths = tuple(config.window for config in configs)
    backend = PrimitivesBackend(operands, configs[0], widths)
    in_windows = Layout(operands.tokens, widths[0])
    return make_plan(problem, backend, device_of(operands.device), MINIMUM, in_windows)


def layout(
    inputs: Inputs,
    window: int | None = None,
    kept: int = 0,
    chunk: int | None = None,
    low_bits: int = 0,
    grad_hidden: bool = True,
    grad_weight: bool = True,
) -> Plan:
    """Return a plan of windows of some columns; with `chunk`, of chunks of as many tokens."""
    (tokens, hidden), vocab, dtype = (
        (inputs.tokens, inputs.h.shape[1]),
        len(inputs.w),
        inputs.h.dtype,
    )
    targets = inputs.targets
    problem = LossProblem(
        tokens,
        hidden,
        vocab,
        dtype.itemsize,
        sum_dtype(dtype).itemsize,
        grad_hidden,
        grad_weight,
        upstream=Upstream.SCALAR if targets.options.is_scalar else Upstream.ROWS,
        stores=dtype != torch.float16,
        selects=targets.selection is not None,
        grad_weight_item=inputs.dw_dtype.itemsize,
    )
    operands, tiles = (
        Problem(tokens, hidden, vocab, dtype_name(dtype), inputs.h.device.type),
        inputs.primitives.config,
    )
    x = Layout(chunk or tokens, window or vocab, kept, 0, low_bits, in_forward=chunk is not None)
    return Plan(problem, x, PrimitivesBackend(operands, tiles, (tiles.window,)))


def step_of(
    inputs: Inputs, plan: Plan, upstream: Tensor, selection: RowSelection | None = None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return losses, dX and dW of a plan; `selection` is that of tokens in chunks."""
    loss, stats, left = programs.forward(inputs, plan)
    if selection is not None:
        inputs.targets.selection = None
    dx, dw, _ = programs.backward(left, inputs, upstream, stats, selection)
    return loss, dx, dw


def smallest_step(
    case: TuningCase, primitives: AnyPrimitives
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Run a step with the smallest workspace; return the mean loss (1,), dX and dW."""
    plan = smallest_plan(case.problem, (primitives.config,))
    one = case.h.new_ones((), dtype=sum_dtype(case.h.dtype))
    loss, dx, dw = step_of(loss_inputs(case, primitives, "mean"), plan, one)
    return loss[None], dx, dw


def smallest_step_outputs(case: TuningCase, primitives: AnyPrimitives) -> dict[str, CheckedOutput]:
    """Return the outputs of `smallest_step` by name."""
    loss, dx, dw = smallest_step(case, primitives)
    return {"loss": CheckedOutput(loss, 1)} | _gradients("", dx, dw)


def step_outputs(
    case: TuningCase, primitives: AnyPrimitives, parts: Collection[str] = PARTS
) -> dict[str, CheckedOutput]:
    """Return what the `parts` of a call compute, by name.

    With an upstream gradient, launches every kernel of these parts that a call without options may
    launch; without one, those of a forward that stores exponentials.
    """
    inputs = loss_inputs(case, primitives)
    if case.upstream is None:
        return _stored_outputs(case, inputs)[0]
    results: dict[str, CheckedOutput] = {}
    if FORWARD in parts:
        results |= _forward_outputs(case, inputs)
    if STEP in parts:
        results |= _gradient_outputs(case, inputs)
    if SAMPLES in parts:
        results |= _sampled_outputs(case, inputs)
    if DIVERGENCES in parts:
        for name, x in divergence_outputs(primitives, case.h, case.problem.arch).items():
            results[name] = CheckedOutput(x, 1, floor=FLOOR, relative_to_row=True)
        for name, x in logits_outputs(primitives, case.h, case.problem.arch).items():
            results[name] = CheckedOutput(x, 1, floor=1.0, relative_to_row=x.ndim > 1)
    if SOFT_TARGETS in parts:
        for name, values in soft_outputs(inputs, case.y, case.problem.arch).items():
            roundings = 1 if values.dtype == case.h.dtype else LOGIT_ROUNDINGS
            in_row = values.ndim > 1
            results[name] = CheckedOutput(values, roundings, floor=1.0, relative_to_row=in_row)
    return results


def _stored_outputs(case: TuningCase, inputs: Inputs) -> tuple[dict[str, CheckedOutput], RowStats]:
    """Return losses, stored and recomputed exponentials; and the statistics."""
    vocab, dtype = case.problem.vocab, case.h.dtype
    h, w, window, kept = inputs.h, inputs.w, window_of(case), kept_columns(case)
    loss, stats, left = programs.forward(inputs, layout(inputs, kept=kept))
    recomputed = h.new_empty(h.shape[0], window)
    first = (vocab - 1) // window * window
    rows = stats.reference, inputs.targets, recomputed
    inputs.primitives.projection.recompute_exp(h, w, (first, vocab), *rows)
    # the smallest float16 exponentials underflow, relative to sums of at most FLOAT16_TOTAL
    floor = 2.0**-28 if dtype == torch.float16 else 1e-30
    results = {
        "loss": CheckedOutput(loss, 1),
        "sum of the other exponentials": CheckedOutput(stats.sum_exp_others, 1, stats.sum_exp),
        "recomputed exponentials": CheckedOutput(
            recomputed[:, : vocab - first], 1, stats.sum_exp, floor
        ),
    }
    if kept:
        exps = Call(left.plan.program, inputs, left.memory).view("exps of 0")
        # the portable path rounds again when it changes the reference
        results["stored exponentials"] = CheckedOutput(exps[:, :vocab], 2, stats.sum_exp, floor)
    return results, stats


def _gradient_outputs(case: TuningCase, inputs: Inputs) -> dict[str, CheckedOutput]:
    """Return the outputs of steps by plans of exact gradients."""
    upstream, primitives, window = case.upstream, inputs.primitives, window_of(case)
    assert upstream is not None
    w, dtype, kept = inputs.w, case.h.dtype, kept_columns(case)
    results, stats = _stored_outputs(case, inputs)
    results |= _gradients("", *step_of(inputs, layout(inputs, window, kept), upstream)[1:])
    of_sum = loss_inputs(case, primitives, "sum")
    found = step_of(of_sum, layout(of_sum, window), upstream.new_ones(()))
    results |= _gradients(" of the sum, from probabilities", *found[1:])
    in_sums = replace(inputs, dw_dtype=stats.rows.dtype)
    _, dx, dw = step_of(in_sums, layout(in_sums, window), upstream)
    assert dw is not None
    results |= _gradients(" in the dtype of sums, then rounded", dx, dw.to(dtype))
    if can_keep(case.problem.dtype):
        summed = loss_inputs(case, primitives, "sum")
        results |= _gradients_in_forward_outputs(case, summed)
        results |= _gradients_of_windows(case, summed)
    results |= _counted_rows_outputs(case, primitives, "")
    results |= _counted_rows_outputs(case, _clearing(primitives), ", the others cleared")
    sums, coefficients = inputs.h.to(upstream.dtype), RowCoefficients(upstream, upstream)
    partial = torch.empty_like(sums)
    primitives.gradients.finish_dx(partial, sums, w, inputs.targets, coefficients)
    return results | {"partial dX of a rank": CheckedOutput(partial, 1, relative_to_row=True)}


def _sampled_outputs(case: TuningCase, inputs: Inputs) -> dict[str, CheckedOutput]:
    """Return the outputs of sampled gradients."""
    assert case.upstream is not None
    plan = layout(inputs, window_of(case))
    loss, dx, dw = sampled_outputs.gradients_of_all(inputs, case.upstream, plan)
    results = {"sampled loss": CheckedOutput(loss, 1)} | _gradients(" of samples", dx, dw)
    entries = sampled_outputs.entries_of_few(inputs, plan)
    results["sampled entries"] = CheckedOutput(entries, sampled_outputs.FLIPS)
    for name, values in sampled_outputs.estimates(inputs, plan).items():
        results[name] = CheckedOutput(values, 1, floor=1.0)
    return results


def _clearing(primitives: AnyPrimitives) -> AnyPrimitives:
    """Return primitives that clear rows that do not count, as for the gradient of a bias."""
    if not isinstance(primitives.projection, CuteProjection):
        return primitives
    projection = copy.copy(primitives.projection)
    projection.clears = True
    return replace(primitives, projection=projection)


def _partly_ignored(case: TuningCase) -> Tensor:
    """Return the targets (N,) of a case, of which every third token is ignored too."""
    is_third = torch.arange(case.problem.tokens, device=case.y.device) % 3 == 0
    return torch.where(is_third, IGNORED, case.y)


def _counting(
    case: TuningCase, inputs: Inputs, y: Tensor, chunk: int | None = None
) -> tuple[Inputs, RowSelection | None]:
    """Return operands with targets y (N,), of which kernels select those that are not ignored."""
    selection = None
    if isinstance(inputs.primitives.projection, CuteProjection):
        selection = select_on_device(case.problem.arch or "", y, IGNORED, chunk or len(y))
        y = selection.targets
    targets = Targets(y, case.problem.vocab, inputs.targets.options)
    targets.selection = selection
    return replace(inputs, targets=targets), selection


def _counted_rows_outputs(
    case: TuningCase, primitives: AnyPrimitives, how: str
) -> dict[str, CheckedOutput]:
    """Return losses and gradients of a step with ignored tokens, which kernels leave out."""
    assert case.upstream is not None
    window, upstream, y = window_of(case), case.upstream, _partly_ignored(case)
    inputs, selection = _counting(case, loss_inputs(case, primitives), y)
    counts = (y != IGNORED)[:, None]
    if selection is not None:
        upstream = selection.take(upstream)
    loss, dx, dw = step_of(inputs, layout(inputs, window, kept_columns(case)), upstream)
    loss, suffix = _restored(loss, selection), f" of counted rows{how}"
    results = {f"loss{suffix}": CheckedOutput(loss, 1)} | _gradients(suffix, dx, dw)
    for name, dtype in (("partial dX", upstream.dtype), ("moved rows", inputs.h.dtype)):
        rows = inputs.h.to(dtype)
        rows = rows if selection is None else rows.index_select(0, selection.order)
        rows = torch.where(counts, restore_rows(selection, rows), 0)
        moved = CheckedOutput(rows, 3, floor=FLOOR, relative_to_row=True)
        results[f"{name}{suffix}"] = moved
    return results


def _restored(loss: Tensor, selection: RowSelection | None) -> Tensor:
    return loss if selection is None else selection.restore(loss)


def _gradients_in_forward_outputs(case: TuningCase, inputs: Inputs) -> dict[str, CheckedOutput]:
    """Return dX and dW of the summed losses, computed in the forward of two chunks of tokens.

    dW's sums are kept in its memory and beside it, or are dW.  dX alone is also computed in windows
    of the chunks.
    """
    w, block = inputs.w, defaults.widest_window(case.problem).reference_block
    chunk, every = ceil_div(inputs.tokens, 2), round_up(len(w), block)
    results: dict[str, CheckedOutput] = {}
    kinds = [(f", with {16 + n} bits of dW's sums", w.dtype, n) for n in LOW_BITS]
    sums = sum_dtype(w.dtype)
    scale = inputs.targets.loss_scale(sums)
    for suffix, dtype, bits in (*kinds, (", in the dtype of sums", sums, LOW_BITS[-1])):
        given = replace(inputs, dw_dtype=dtype)
        _, dx, dw = step_of(given, layout(given, every, chunk=chunk, low_bits=bits), scale)
        assert dw is not None
        results |= _gradients(f" of gradients in the forward{suffix}", dx, dw.to(w.dtype))
    window = min(round_up(ceil_div(len(w), 3), block), every)
    counted, selection = _counting(case, inputs, inputs.targets.index, chunk)
    plan = layout(counted, window, chunk=chunk, low_bits=LOW_BITS[0], grad_weight=False)
    _, dx, _ = step_of(counted, plan, scale, selection)
    assert dx is not None
    return results | {"dX of windows in chunks": _gradient(dx)}


def _gradients_of_windows(case: TuningCase, inputs: Inputs) -> dict[str, CheckedOutput]:
    """Return dX and dW of the summed losses, of windows over which sums of dX are kept.

    A third of the columns, in whole blocks, is stored; the others are computed again, as
    probabilities.
    """
    block = defaults.widest_window(case.problem).reference_block
    window = round_up(ceil_div(len(inputs.w), 3), block)
    inputs, _ = _counting(case, inputs, inputs.targets.index)
    one = inputs.h.new_ones((), dtype=sum_dtype(inputs.h.dtype))
    results: dict[str, CheckedOutput] = {}
    for bits in LOW_BITS:
        low = bits if inputs.h.dtype == torch.bfloat16 else 0
        _, dx, dw = step_of(inputs, layout(inputs, window, window, low_bits=low), one)
        results |= _gradients(f" of windows, with {16 + bits} bits of dX's sums", dx, dw)
    return results


def _forward_outputs(case: TuningCase, inputs: Inputs) -> dict[str, CheckedOutput]:
    """Return the outputs of forwards that store nothing, of all rows and of some."""
    none = {"grad_hidden": False, "grad_weight": False}
    loss, stats, _ = programs.forward(inputs, layout(inputs, **none))
    counted, selection = _counting(case, inputs, _partly_ignored(case))
    of_counted = _restored(programs.forward(counted, layout(counted, **none))[0], selection)
    others = CheckedOutput(stats.sum_exp_others, 1, stats.sum_exp)
    return {
        "no-grad loss": CheckedOutput(loss, 1),
        "no-grad sum of the other exponentials": others,
        "no-grad loss of counted rows": CheckedOutput(of_counted, 1),
    }


def _gradients(suffix: str, dx: Tensor | None, dw: Tensor | None) -> dict[str, CheckedOutput]:
    """Return dX and dW.

    Roundings are those of the exponentials, of the scaled hidden states and of the result.
    """
    assert dx is not None and dw is not None
    return {f"dX{suffix}": _gradient(dx), f"dW{suffix}": _gradient(dw)}


def _gradient(x: Tensor) -> CheckedOutput:
    floor = torch.finfo(x.dtype).smallest_normal
    return CheckedOutput(x, 3, floor=floor, relative_to_row=True)
