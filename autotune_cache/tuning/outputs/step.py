"""Outputs of primitives for a tuning case: losses, exponentials and gradients of a step."""

import copy
import functools
from collections.abc import Sequence
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
from cutefce.cute_kernels.problem import LOW_BITS, Problem, can_keep
from cutefce.ops.dtypes import sum_dtype
from cutefce.ops.interface.options import LossOptions, TensorOptions
from cutefce.ops.planning import planner
from cutefce.ops.planning.chunks.sizes import Chunks
from cutefce.ops.primitives.cute_projection import CuteProjection
from cutefce.ops.primitives.interface import AnyPrimitives, forward_unfused
from cutefce.ops.primitives.row_selection import restore_rows, select_on_device
from cutefce.ops.rows import targets as rows
from cutefce.ops.rows.coefficients import RowCoefficients
from cutefce.ops.rows.selection import RowSelection
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


def step_outputs(case: TuningCase, primitives: AnyPrimitives) -> dict[str, CheckedOutput]:
    """Return losses, stored and recomputed exponentials, and gradients, by name.

    With an upstream gradient, launches every kernel that a call without options may launch.
    """
    vocab, dtype = case.problem.vocab, case.h.dtype
    inputs = loss_inputs(case, primitives)
    (h, w), stored, window = (inputs.h, inputs.w), _stored(case), default_plan(case).window
    loss, stats = windows.forward(inputs, stored)
    recomputed = h.new_empty(h.shape[0], window)
    first, last = list(windows.split_windows(vocab, 0, window))[-1]
    rows = stats.reference, inputs.targets, recomputed
    primitives.projection.recompute_exp(h, w, (first, last), *rows)
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
    if case.upstream is not None:
        dw = torch.empty_like(w)
        dx = windows.backward(inputs, stats, stored, case.upstream, window, True, dw)
        results |= _gradients("", dx, dw)
        dw = torch.empty_like(w)
        dx = windows.backward(inputs, stats, (), case.upstream.new_ones(()), window, True, dw)
        results |= _gradients(" of the sum, from probabilities", dx, dw)
        sums, in_sums = w.new_empty(w.shape, dtype=loss.dtype), replace(inputs, dw_dtype=loss.dtype)
        dx = windows.backward(in_sums, stats, (), case.upstream, window, True, sums)
        results |= _gradients(" in the dtype of sums, then rounded", dx, sums.to(dtype))
        if can_keep(case.problem.dtype):
            block = defaults.widest_window(case.problem).reference_block
            results |= _gradients_in_forward_outputs(inputs, block)
            kept = window_outputs.hidden_of_windows_in_chunks(inputs, case.problem.arch, block)
            results["dX of windows in chunks"] = _gradient(kept)
            for suffix, dx, kept_dw in window_outputs.of_windows(inputs, case.problem.arch, block):
                results |= _gradients(suffix, dx, kept_dw)
        results |= _single_call_outputs(inputs, case.upstream)
        results |= _counted_rows_outputs(case, primitives, "")
        results |= _counted_rows_outputs(case, _clearing(primitives), ", the others cleared")
        for suffix, loss, *gradients in window_outputs.fused_steps(inputs, case):
            results |= {f"loss{suffix}": CheckedOutput(loss, 1)} | _gradients(suffix, *gradients)
        loss, dx, dw = sampled_outputs.gradients_of_all(inputs, case.upstream, window)
        results |= {"sampled loss": CheckedOutput(loss, 1)} | _gradients(" of samples", dx, dw)
        entries = sampled_outputs.entries_of_few(inputs)
        results["sampled entries"] = CheckedOutput(entries, sampled_outputs.FLIPS)
        for name, x in divergence_outputs(primitives, case.h, case.problem.arch).items():
            results[name] = CheckedOutput(x, 1, floor=FLOOR, relative_to_row=True)
        for name, x in logits_outputs(primitives, case.h, case.problem.arch).items():
            results[name] = CheckedOutput(x, 1, floor=1.0, relative_to_row=x.ndim > 1)
        for name, values in sampled_outputs.estimates(inputs).items():
            results[name] = CheckedOutput(values, 1, floor=1.0)
        for name, values in soft_outputs(inputs, case.y, case.problem.arch).items():
            roundings = 1 if values.dtype == dtype else LOGIT_ROUNDINGS
            in_row = values.ndim > 1
            results[name] = CheckedOutput(values, roundings, floor=1.0, relative_to_row=in_row)
    return results


def _clearing(primitives: AnyPrimitives) -> AnyPrimitives:
    """Return primitives that clear rows that do not count, as for the gradient of a bias."""
    if not isinstance(primitives.projection, CuteProjection):
        return primitives
    projection = copy.copy(primitives.projection)
    projection.clears = True
    return replace(primitives, projection=projection)


def _counted_rows_outputs(
    case: TuningCase, primitives: AnyPrimitives, how: str
) -> dict[str, CheckedOutput]:
    """Return losses and gradients of a step with ignored tokens, which kernels leave out."""
    assert case.upstream is not None
    tokens, window = case.problem.tokens, default_plan(case).window
    y = torch.where(torch.arange(tokens, device=case.y.device) % 3 == 0, IGNORED, case.y)
    upstream, selection, counts = case.upstream, None, (y != IGNORED)[:, None]
    if isinstance(primitives.projection, CuteProjection):
        selection = select_on_device(case.problem.arch or "", y, IGNORED, tokens)
        y, upstream = selection.targets, selection.take(upstream)
    targets = Targets(y, case.problem.vocab, LossOptions("none", IGNORED))
    targets.selection = selection
    inputs, stored = replace(loss_inputs(case, primitives), targets=targets), _stored(case)
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
    stored, chunks = round_up(w.shape[0], block), Chunks.even(len(h), ceil_div(len(h), 2))
    loss_scale = targets.loss_scale(sum_dtype(h.dtype))
    results: dict[str, CheckedOutput] = {}
    # sums that are kept in dW's memory and beside it, and those that are dW
    kinds = [(f", with {16 + n} bits of dW's sums", w.dtype, n) for n in (0, *LOW_BITS)]
    for suffix, dtype, bits in (*kinds, (", in the dtype of sums", loss_scale.dtype, 8)):
        dx = HiddenSums.empty(torch.empty_like(h), loss_scale.dtype)
        dw = WeightSums.empty(torch.empty_like(w, dtype=dtype), loss_scale.dtype, bits, chunks=2)
        stats = gradients_in_forward(inputs, loss_scale, stored, stored, chunks, dx, dw, None)
        finished_dx = dx.finish(inputs, stats, loss_scale)
        finished_dw = dw.finish(inputs.primitives.gradients, loss_scale).to(w.dtype)
        name = f" of gradients in the forward{suffix}"
        results |= _gradients(name, finished_dx, finished_dw)
        if not bits:  # rounding at random errs by up to twice as much, in each chunk
            at_random = results[f"dW{name}"]
            results[f"dW{name}"] = replace(at_random, roundings=at_random.roundings + 4)
    return results


def _single_call_outputs(
    inputs: LossInputs[Any, Any], upstream: Tensor
) -> dict[str, CheckedOutput]:
    """Return the outputs of no-grad forwards, fused and unfused, and a partial dX of one rank."""
    h, w, targets = inputs.h, inputs.w, inputs.targets
    projection = inputs.primitives.projection
    results, unfused = {}, functools.partial(forward_unfused, projection)
    for name, forward in (("no-grad", projection.forward), ("unfused no-grad", unfused)):
        stats, loss = forward(h, w, targets)
        results[f"{name} loss"] = CheckedOutput(loss, 1)
        others = CheckedOutput(stats.sum_exp_others, 1, stats.sum_exp)
        results[f"{name} sum of the other exponentials"] = others
    sums, coefficients = h.to(upstream.dtype), RowCoefficients(upstream, upstream)
    partial = torch.empty_like(sums)
    inputs.primitives.gradients.finish_dx(partial, sums, w, targets, coefficients)
    return results | {"partial dX of a rank": CheckedOutput(partial, 1, relative_to_row=True)}


def _gradients(suffix: str, dx: Tensor | None, dw: Tensor | None) -> dict[str, CheckedOutput]:
    """Return dX and dW.

    Roundings are those of the exponentials, of the scaled hidden states and of the result.
    """
    assert dx is not None and dw is not None
    return {f"dX{suffix}": _gradient(dx), f"dW{suffix}": _gradient(dw)}


def _gradient(x: Tensor) -> CheckedOutput:
    floor = torch.finfo(x.dtype).smallest_normal
    return CheckedOutput(x, 3, floor=floor, relative_to_row=True)
