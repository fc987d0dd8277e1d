"""Outputs of primitives for a tuning case: losses, exponentials and gradients of a step."""

import copy
import functools
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from cutefce.autotune_cache import defaults
from cutefce.autotune_cache.tuning.outputs import samples as sampled_outputs
from cutefce.autotune_cache.tuning.outputs import windows as window_outputs
from cutefce.autotune_cache.tuning.outputs.divergences import divergence_outputs, logits_outputs
from cutefce.autotune_cache.tuning.outputs.soft_targets import LOGIT_ROUNDINGS, soft_outputs
from cutefce.autotune_cache.tuning.targets.base import CheckedOutput, TuningCase
from cutefce.cute_kernels.config import WindowConfig
from cutefce.cute_kernels.integers import ceil_div, round_up
from cutefce.cute_kernels.parts import DIVERGENCES, FORWARD, PARTS, SAMPLES, SOFT_TARGETS, STEP
from cutefce.cute_kernels.problem import LOW_BITS, Problem, can_keep
from cutefce.ops.dtypes import sum_dtype
from cutefce.ops.interface.options import LossOptions, TensorOptions
from cutefce.ops.planning import planner
from cutefce.ops.primitives.cute_projection import CuteProjection
from cutefce.ops.primitives.interface import AnyPrimitives, forward_unfused
from cutefce.ops.primitives.row_selection import restore_rows, select_on_device
from cutefce.ops.rows import targets as rows
from cutefce.ops.rows.coefficients import RowCoefficients
from cutefce.ops.rows.selection import RowSelection
from cutefce.ops.rows.statistics import RowStats
from cutefce.ops.rows.targets import Targets
from cutefce.ops.strategies import windows
from cutefce.ops.strategies.dw_views import aliased_views, memory_of
from cutefce.ops.strategies.gradients_in_forward import gradients_in_forward
from cutefce.ops.strategies.hidden_sums import HiddenSums
from cutefce.ops.strategies.loss_inputs import LossInputs
from cutefce.ops.strategies.weight_sums import WeightSums

IGNORED = -100
FLOOR = torch.finfo(torch.float16).smallest_normal
"""Of relative errors of gradients that were rounded to 16 bits."""


def make_targets(case: TuningCase, reduction: str = "none") -> Targets:
    """Return the targets of a case, with the reduction of their losses."""
    return rows.make_targets(case.y, case.problem.vocab, LossOptions(reduction), TensorOptions())


def loss_inputs(
    case: TuningCase, primitives: AnyPrimitives, reduction: str = "none"
) -> LossInputs[Any, Any]:
    """Return the operands of a step with this `reduction`."""
    h, w = primitives.projection.prepare(case.h, case.w)
    return LossInputs(primitives, h, w, make_targets(case, reduction), h.dtype, h.dtype)


def default_plan(case: TuningCase) -> planner.Plan:
    """Return the plan of a step with the default workspace."""
    configs = defaults.window_configs(case.problem)
    return planner.make_plan(case.problem, configs, planner.DEFAULT, scalar_upstream=False)


def smallest_plan(problem: Problem, configs: Sequence[WindowConfig]) -> planner.Plan:
    """Return the plan of a step with the smallest workspace."""
    return planner.make_plan(problem, configs, planner.MINIMUM, scalar_upstream=True)


def _stored(case: TuningCase) -> list[tuple[int, Tensor]]:
    """Return buffers for stored exponentials with their first columns.

    Small problems have two buffers, like steps whose exponentials alias dW.
    """
    kept, block = default_plan(case).kept, defaults.widest_window(case.problem).reference_block
    first = 0 if case.upstream is None else kept // 2 // block * block
    parts = (0, first), (first, kept - first)
    return [(start, case.h.new_empty(case.problem.tokens, size)) for start, size in parts if size]


def smallest_step(
    case: TuningCase, primitives: AnyPrimitives
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Run a step with the smallest workspace; return losses (N,) and dX, dW of their mean."""
    config, window = primitives.config, primitives.config.window
    plan, inputs = smallest_plan(case.problem, (config,)), loss_inputs(case, primitives)
    h, dw = inputs.h, torch.empty_like(inputs.w)
    memory = memory_of(dw, len(h), config.reference_block)
    stored = aliased_views(dw, memory, plan.aliased)
    loss, stats = windows.forward(inputs, stored)
    upstream = make_targets(case, "mean").loss_scale(sum_dtype(h.dtype))
    step = stats, stored, upstream, window, True
    return loss, windows.backward(inputs, *step, dw, None, plan.aliased, plan.hidden_bits), dw


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
    for suffix, loss, *gradients in window_outputs.fused_steps(inputs, case, parts):
        results |= {f"loss{suffix}": CheckedOutput(loss, 1)} | _gradients(suffix, *gradients)
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


def _stored_outputs(
    case: TuningCase, inputs: LossInputs[Any, Any]
) -> tuple[dict[str, CheckedOutput], RowStats, list[tuple[int, Tensor]]]:
    """Return losses, stored and recomputed exponentials; the statistics, and what is stored."""
    vocab, dtype = case.problem.vocab, case.h.dtype
    (h, w), stored, window = (inputs.h, inputs.w), _stored(case), default_plan(case).window
    loss, stats = windows.forward(inputs, stored)
    recomputed = h.new_empty(h.shape[0], window)
    first, last = list(windows.split_windows(vocab, 0, window))[-1]
    rows = stats.reference, inputs.targets, recomputed
    inputs.primitives.projection.recompute_exp(h, w, (first, last), *rows)
    # the smallest float16 exponentials underflow, relative to sums of at most FLOAT16_TOTAL
    floor = 2.0**-28 if dtype == torch.float16 else 1e-30
    results = {
        "loss": CheckedOutput(loss, 1),
        "sum of the other exponentials": CheckedOutput(stats.sum_exp_others, 1, stats.sum_exp),
        "recomputed exponentials": CheckedOutput(
            recomputed[:, : last - first], 1, stats.sum_exp, floor
        ),
    }
    if stored:
        parts = [exps for _, exps in stored]
        kept = torch.cat(parts, 1) if len(parts) > 1 else parts[0]
        # the portable path rounds again when it changes the reference
        results["stored exponentials"] = CheckedOutput(kept[:, :vocab], 2, stats.sum_exp, floor)
    return results, stats, stored


def _gradient_outputs(case: TuningCase, inputs: LossInputs[Any, Any]) -> dict[str, CheckedOutput]:
    """Return the outputs of steps by plans of exact gradients, but for fused steps."""
    upstream, primitives = case.upstream, inputs.primitives
    assert upstream is not None
    w, dtype, window = inputs.w, case.h.dtype, default_plan(case).window
    results, stats, stored = _stored_outputs(case, inputs)
    dw = torch.empty_like(w)
    dx = windows.backward(inputs, stats, stored, upstream, window, True, dw)
    results |= _gradients("", dx, dw)
    dw = torch.empty_like(w)
    dx = windows.backward(inputs, stats, (), upstream.new_ones(()), window, True, dw)
    results |= _gradients(" of the sum, from probabilities", dx, dw)
    sum_type = stats.rows.dtype
    sums, in_sums = w.new_empty(w.shape, dtype=sum_type), replace(inputs, dw_dtype=sum_type)
    dx = windows.backward(in_sums, stats, (), upstream, window, True, sums)
    results |= _gradients(" in the dtype of sums, then rounded", dx, sums.to(dtype))
    if can_keep(case.problem.dtype):
        block = defaults.widest_window(case.problem).reference_block
        results |= _gradients_in_forward_outputs(inputs, block)
        kept = window_outputs.hidden_of_windows_in_chunks(inputs, case.problem.arch, block)
        results["dX of windows in chunks"] = _gradient(kept)
        for suffix, dx, kept_dw in window_outputs.of_windows(inputs, case.problem.arch, block):
            results |= _gradients(suffix, dx, kept_dw)
    results |= _counted_rows_outputs(case, primitives, "")
    results |= _counted_rows_outputs(case, _clearing(primitives), ", the others cleared")
    sums, coefficients = inputs.h.to(upstream.dtype), RowCoefficients(upstream, upstream)
    partial = torch.empty_like(sums)
    primitives.gradients.finish_dx(partial, sums, w, inputs.targets, coefficients)
    return results | {"partial dX of a rank": CheckedOutput(partial, 1, relative_to_row=True)}


def _sampled_outputs(case: TuningCase, inputs: LossInputs[Any, Any]) -> dict[str, CheckedOutput]:
    """Return the outputs of sampled gradients."""
    assert case.upstream is not None
    window = default_plan(case).window
    loss, dx, dw = sampled_outputs.gradients_of_all(inputs, case.upstream, window)
    results = {"sampled loss": CheckedOutput(loss, 1)} | _gradients(" of samples", dx, dw)
    entries = sampled_outputs.entries_of_few(inputs)
    results["sampled entries"] = CheckedOutput(entries, sampled_outputs.FLIPS)
    for name, values in sampled_outputs.estimates(inputs).items():
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
    case: TuningCase, inputs: LossInputs[Any, Any]
) -> tuple[LossInputs[Any, Any], RowSelection | None]:
    """Return operands with more tokens ignored, of which kernels select the others."""
    y, selection = _partly_ignored(case), None
    if isinstance(inputs.primitives.projection, CuteProjection):
        selection = select_on_device(case.problem.arch or "", y, IGNORED, len(y))
        y = selection.targets
    targets = Targets(y, case.problem.vocab, LossOptions("none", IGNORED))
    targets.selection = selection
    return replace(inputs, targets=targets), selection


def _counted_rows_outputs(
    case: TuningCase, primitives: AnyPrimitives, how: str
) -> dict[str, CheckedOutput]:
    """Return losses and gradients of a step with ignored tokens, which kernels leave out."""
    assert case.upstream is not None
    window, upstream, stored = default_plan(case).window, case.upstream, _stored(case)
    inputs, selection = _counting(case, loss_inputs(case, primitives))
    counts = (_partly_ignored(case) != IGNORED)[:, None]
    if selection is not None:
        upstream = selection.take(upstream)
    loss, stats = windows.forward(inputs, stored)
    dw = torch.empty_like(inputs.w)
    dx = windows.backward(inputs, stats, stored, upstream, window, True, dw)
    assert dx is not None
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


def _gradients_in_forward_outputs(
    inputs: LossInputs[Any, Any], block: int
) -> dict[str, CheckedOutput]:
    """Return dX and dW of the summed losses, computed in the forward of two chunks of tokens."""
    h, w, targets = inputs.h, inputs.w, inputs.targets
    stored, chunk = round_up(w.shape[0], block), ceil_div(len(h), 2)
    loss_scale = targets.loss_scale(sum_dtype(h.dtype))
    results: dict[str, CheckedOutput] = {}
    # sums that are kept in dW's memory and beside it, and those that are dW
    kinds = [(f", with {16 + n} bits of dW's sums", w.dtype, n) for n in LOW_BITS]
    for suffix, dtype, bits in (*kinds, (", in the dtype of sums", loss_scale.dtype, 8)):
        dx = HiddenSums.empty(torch.empty_like(h), loss_scale.dtype)
        dw = WeightSums.empty(torch.empty_like(w, dtype=dtype), loss_scale.dtype, bits)
        stats = gradients_in_forward(inputs, loss_scale, stored, stored, chunk, dx, dw, None)
        finished_dx = dx.finish(inputs, stats, loss_scale)
        finished_dw = dw.finish(inputs.primitives.gradients, loss_scale).to(w.dtype)
        name = f" of gradients in the forward{suffix}"
        results |= _gradients(name, finished_dx, finished_dw)
    return results


def _forward_outputs(case: TuningCase, inputs: LossInputs[Any, Any]) -> dict[str, CheckedOutput]:
    """Return the outputs of forwards without gradients: fused and unfused, of all rows and some."""
    results, projection = {}, inputs.primitives.projection
    unfused = functools.partial(forward_unfused, projection)
    for name, forward in (("no-grad", projection.forward), ("unfused no-grad", unfused)):
        stats, loss = forward(inputs.h, inputs.w, inputs.targets)
        results[f"{name} loss"] = CheckedOutput(loss, 1)
        others = CheckedOutput(stats.sum_exp_others, 1, stats.sum_exp)
        results[f"{name} sum of the other exponentials"] = others
        counted, selection = _counting(case, inputs)
        _, loss = forward(inputs.h, inputs.w, counted.targets)
        results[f"{name} loss of counted rows"] = CheckedOutput(_restored(loss, selection), 1)
    return results


def _gradients(suffix: str, dx: Tensor | None, dw: Tensor | None) -> dict[str, CheckedOutput]:
    """Return dX and dW.

    Roundings are those of the exponentials, of the scaled hidden states and of the result.
    """
    assert dx is not None and dw is not None
    return {f"dX{suffix}": _gradient(dx), f"dW{suffix}": _gradient(dw)}


def _gradient(x: Tensor) -> CheckedOutput:
    floor = torch.finfo(x.dtype).smallest_normal
    return CheckedOutput(x, 3, floor=floor, relative_to_row=True)
