"""Losses and gradients of fused steps for a tuning case: all that `FusedStep` may launch."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from cutefce.autotune_cache.tuning.targets.base import TuningCase
from cutefce.cute_kernels.integers import round_up
from cutefce.cute_kernels.problem import LOW_BITS, Problem, can_keep
from cutefce.ops.interface.options import LossOptions
from cutefce.ops.planning.dw_aliasing import DwMemory
from cutefce.ops.planning.window_layout import WindowLayout
from cutefce.ops.primitives.cute_gradients import CuteGradients
from cutefce.ops.primitives.fused_step import FusedStep
from cutefce.ops.rows.targets import Targets
from cutefce.ops.strategies import windows
from cutefce.ops.strategies.loss_inputs import LossInputs

IGNORED = -100
BLOCK, LEAST = 64, 128
"""Columns that stored ones are a multiple of, and of a window in the memory of dW at least."""

Step = tuple[str, Tensor, Tensor, Tensor]
"""Name, losses (N,), dX and dW."""


def layouts(problem: Problem) -> dict[str, tuple[WindowLayout, int | None]]:
    """Return layouts by name: all columns kept; some aliased, kept and computed again.

    Each has the bits of dX's sums beside 16, None for float32.
    """
    tokens, hidden, vocab = problem.tokens, problem.hidden, problem.vocab
    memory, third = DwMemory(tokens, hidden, vocab, BLOCK), vocab // 3 // BLOCK * BLOCK
    found = dict[str, tuple[WindowLayout, int | None]]()
    found[""] = WindowLayout.of(memory, 0, round_up(vocab, BLOCK), LEAST), None
    if third:
        aliased = min(memory.most_aliased(LEAST), third)
        layout = WindowLayout.of(memory, aliased, third, LEAST)
        found[" over windows"] = layout, None
        for bits in LOW_BITS:
            found[f" over windows, with {16 + bits} bits of dX's sums,"] = layout, bits
    return found


def fused_steps(inputs: LossInputs[Any, Any], case: TuningCase) -> Iterator[Step]:
    """Yield steps with ignored tokens, as `FusedStep` launches them, or exact ones.

    The portable path yields none that are not exact: nothing is compared with them.
    """
    assert case.upstream is not None
    problem, gradients = case.problem, inputs.primitives.gradients
    options, h, w = LossOptions("none", IGNORED), inputs.h, inputs.w
    y = torch.where(torch.arange(problem.tokens, device=case.y.device) % 3 == 0, IGNORED, case.y)
    if isinstance(gradients, CuteGradients) and can_keep(problem.dtype):
        for name, (layout, bits) in layouts(problem).items():
            # both kernels of dX
            short = 1 + min(window.last - window.first for window in layout.windows)
            for selects in (False, True):
                kind = layout, selects, bits, short
                step = FusedStep(problem, gradients.kernels, gradients.num_sms, *kind)
                for of_sum in upstreams(layout):
                    loss, saved = step.forward(h, w, y, options)
                    upstream = case.upstream.new_ones(()) if of_sum else case.upstream
                    if saved.selection is not None:
                        loss = saved.selection.restore(loss)
                        upstream = upstream if of_sum else saved.selection.take(upstream)
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
        for name, (layout, _) in layouts(problem).items():
            for selects in (False, True):
                for of_sum in upstreams(layout):
                    yield _name(name, selects, of_sum), loss, *results[of_sum]


def upstreams(layout: WindowLayout) -> tuple[bool, ...]:
    """Return whether tokens have the same upstream gradient, which matters to probabilities."""
    return (False, True) if layout.recomputes else (False,)


def _name(layout: str, selects: bool, of_sum: bool) -> str:
    rows = " of counted rows" * selects + " of the sum" * of_sum
    return f" of a fused step{layout}{rows}"
