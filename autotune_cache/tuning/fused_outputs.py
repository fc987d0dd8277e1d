"""Losses and gradients of fused steps for a tuning case: all that `FusedStep` may launch."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from cutefce.autotune_cache.tuning.targets.base import TuningCase
from cutefce.cute_kernels.integers import round_up
from cutefce.cute_kernels.problem import Problem, can_keep
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


def layouts(problem: Problem) -> dict[str, WindowLayout]:
    """Return layouts by name: all columns kept; some aliased, kept and computed again."""
    tokens, hidden, vocab = problem.tokens, problem.hidden, problem.vocab
    memory, third = DwMemory(tokens, hidden, vocab, BLOCK), vocab // 3 // BLOCK * BLOCK
    found = {"": WindowLayout.of(memory, 0, round_up(vocab, BLOCK), LEAST)}
    if third:
        aliased = min(memory.most_aliased(LEAST), third)
        found[" over windows"] = WindowLayout.of(memory, aliased, third, LEAST)
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
        for name, layout in layouts(problem).items():
            # both kernels of dX
            short = 1 + min(window.last - window.first for window in layout.windows)
            for selects in (False, True):
                given = problem, gradients.kernels, gradients.num_sms, layout, selects, short
                step, upstream = FusedStep(*given), case.upstream
                loss, saved = step.forward(h, w, y, options)
                if saved.selection is not None:
                    loss, upstream = saved.selection.restore(loss), saved.selection.take(upstream)
                result = step.backward(upstream, h, w, y, saved, options)
                yield _name(name, selects), loss, *result
    elif h.dtype == torch.float64:
        exact = replace(inputs, targets=Targets(y, problem.vocab, options))
        loss, stats = windows.forward(exact)
        dw = torch.empty_like(w)
        dx = windows.backward(exact, stats, (), case.upstream, problem.vocab, True, dw)
        assert dx is not None
        for name in layouts(problem):
            for selects in (False, True):
                yield _name(name, selects), loss, dx, dw


def _name(layout: str, selects: bool) -> str:
    return " of a fused step" + layout + " of counted rows" * selects
