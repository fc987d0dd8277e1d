"""Gradients of a tuning case over windows: of fused steps, and of sums of dX in few bits."""

from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from cutefce.autotune_cache.tuning.targets.base import TuningCase
from cutefce.cute_kernels.integers import ceil_div, round_up
from cutefce.cute_kernels.parts import FUSED, fused_part
from cutefce.cute_kernels.problem import LOW_BITS, Problem, can_keep
from cutefce.ops.dtypes import sum_dtype
from cutefce.ops.interface.options import LossOptions
from cutefce.ops.planning.dw_aliasing import DwMemory
from cutefce.ops.planning.window_layout import WindowLayout
from cutefce.ops.primitives.cute_gradients import CuteGradients
from cutefce.ops.primitives.cute_projection import CuteProjection
from cutefce.ops.primitives.fused.step import FusedStep
from cutefce.ops.primitives.row_selection import select_on_device
from cutefce.ops.rows.selection import RowSelection
from cutefce.ops.rows.targets import Targets
from cutefce.ops.strategies import windows
from cutefce.ops.strategies.gradients_in_forward import gradients_in_forward
from cutefce.ops.strategies.hidden_sums import HiddenSums
from cutefce.ops.strategies.loss_inputs import LossInputs
from cutefce.ops.strategies.weight_sums import WeightSums

Inputs = LossInputs[Any, Any]
IGNORED = -100
BLOCK, LEAST = 64, 128
"""Columns that stored ones are a multiple of, and of a window in the memory of dW at least."""

Step = tuple[str, Tensor, Tensor, Tensor]
"""Name, losses (N,), dX and dW."""


def layouts(problem: Problem) -> dict[str, tuple[list[WindowLayout], int | None]]:
    """Return layouts by name: all columns kept; some aliased, kept and computed again.

    Each has the bits of dX's sums beside 16, None for float32.  The last ones have another layout
    beside that for all tokens, for as many as are not ignored.
    """
    tokens, hidden, vocab = problem.tokens, problem.hidden, problem.vocab
    memory, third = DwMemory(tokens, hidden, vocab, BLOCK), vocab // 3 // BLOCK * BLOCK
    found = dict[str, tuple[list[WindowLayout], int | None]]()
    found[""] = [WindowLayout.of(memory, 0, round_up(vocab, BLOCK), LEAST)], None
    if third:
        aliased = min(memory.most_aliased(LEAST), third)
        layout = WindowLayout.of(memory, aliased, third, LEAST)
        found[" over windows"] = [layout], None
        for bits in LOW_BITS:
            found[f" over windows, with {16 + bits} bits of dX's sums,"] = [layout], bits
        if tokens > 2:
            few = replace(memory, tokens=tokens - ceil_div(tokens, 3))
            of_few = WindowLayout.of(few, min(few.most_aliased(LEAST), third), third, LEAST)
            both = [replace(layout, fewest=few.tokens + 1), of_few]
            found[" over windows of fewer rows"] = both, None
    return found


def fused_steps(inputs: Inputs, case: TuningCase, parts: Collection[str]) -> Iterator[Step]:
    """Yield steps of `parts` with ignored tokens, as `FusedStep` launches them, or exact ones.

    The portable path yields none that are not exact: nothing is compared with them.
    """
    assert case.upstream is not None
    if FUSED.keys().isdisjoint(parts):
        return
    problem, gradients = case.problem, inputs.primitives.gradients
    options, h, w = LossOptions("none", IGNORED), inputs.h, inputs.w
    y = torch.where(torch.arange(problem.tokens, device=case.y.device) % 3 == 0, IGNORED, case.y)
    if isinstance(gradients, CuteGradients) and can_keep(problem.dtype):
        for name, (given, bits) in layouts(problem).items():
            # both kernels of dX
            short = 1 + min(window.last - window.first for window in given[-1].windows)
            for selects in selections(given, bits, parts):
                kind = given, selects, bits, short
                step = FusedStep(problem, gradients.kernels, gradients.num_sms, *kind)
                for of_sum in upstreams(given):
                    loss, saved = step.forward(h, w, y, options)
                    upstream = case.upstream.new_ones(()) if of_sum else case.upstream
                    if saved.selected is not None:
                        selection = saved.selected.unpack()
                        loss = selection.restore(loss)
                        upstream = upstream if of_sum else selection.take(upstream)
                    result = step.backward(upstream, h, w, y, saved, options)
                    yield _name(name, selects, of_sum), loss, *result
    elif h.dtype == torch.float64:
        exact = replace(inputs, targets=Targets(y, problem.vocab, options))
        loss, stats = windows.forward(exact)
        results = []
        for upstream in (case.upstream, case.upstream.new_ones(())):
            dw = torch.empty_like(w)
            dx = windows.backward(exact, stats, (), upstream, problem.vocab, True, dw)
            assert dx is not None
            results.append((dx, dw))
        for name, (given, bits) in layouts(problem).items():
            for selects in selections(given, bits, parts):
                for of_sum in upstreams(given):
                    yield _name(name, selects, of_sum), loss, *results[of_sum]


def selections(
    given: list[WindowLayout], bits: int | None, parts: Collection[str]
) -> tuple[bool, ...]:
    """Return whether `parts` select the rows that count, as several layouts need."""
    possible = (False, True) if len(given) == 1 else (True,)
    return tuple(selects for selects in possible if fused_part(selects, bits) in parts)


def upstreams(given: list[WindowLayout]) -> tuple[bool, ...]:
    """Return whether tokens have the same upstream gradient, which matters to probabilities."""
    return (False, True) if given[0].recomputes else (False,)


def _name(layout: str, selects: bool, of_sum: bool) -> str:
    rows = " of counted rows" * selects + " of the sum" * of_sum
    return f" of a fused step{layout}{rows}"


def hidden_of_windows_in_chunks(inputs: Inputs, arch: str | None, block: int) -> Tensor:
    """Return dX alone, computed in the forward of two chunks of tokens, in about three windows.

    These are whole blocks of `block` columns.
    """
    h, vocab, chunk = inputs.h, len(inputs.w), ceil_div(inputs.tokens, 2)
    inputs, selection = _selecting(inputs, arch, chunk)
    loss_scale = inputs.targets.loss_scale(sum_dtype(h.dtype))
    dx = HiddenSums.empty(torch.empty_like(h), loss_scale.dtype)
    dw = WeightSums.empty(inputs.w[:0], loss_scale.dtype, LOW_BITS[0])
    window = round_up(ceil_div(vocab, 4), block)
    columns = window, 2 * window  # the last window is wider
    stats = gradients_in_forward(inputs, loss_scale, *columns, chunk, dx, dw, None)
    return dx.finish(inputs, stats, loss_scale, selection)


def of_windows(
    inputs: Inputs, arch: str | None, block: int
) -> Iterator[tuple[str, Tensor | None, Tensor]]:
    """Yield a name, dX and dW of the summed losses, of windows over which sums of dX are kept.

    A third of the columns, in whole blocks, is stored; the others are computed again, as
    probabilities.
    """
    h, w, vocab = inputs.h, inputs.w, len(inputs.w)
    inputs, _ = _selecting(inputs, arch, inputs.tokens)
    window = round_up(ceil_div(vocab, 3), block)
    stored = [(0, h.new_empty(len(h), window))]
    _, stats = windows.forward(inputs, stored)
    one = stats.rows.new_ones(())
    for bits in LOW_BITS:
        dw, kept = torch.empty_like(w), bits if h.dtype == torch.bfloat16 else None
        step = stats, stored, one, window, True, dw
        dx = windows.backward(inputs, *step, hidden_bits=kept)
        yield f" of windows, with {16 + bits} bits of dX's sums", dx, dw


def _selecting(inputs: Inputs, arch: str | None, chunk: int) -> tuple[Inputs, RowSelection | None]:
    """Return operands of which kernels select the rows that count, in chunks of tokens."""
    targets = inputs.targets
    if not isinstance(inputs.primitives.projection, CuteProjection):
        return inputs, None
    ignored = targets.options.ignore_index
    selection = select_on_device(arch or "", targets.index, ignored, chunk)
    targets = Targets(selection.targets, len(inputs.w), targets.options)
    targets.selection = selection
    return replace(inputs, targets=targets), selection
