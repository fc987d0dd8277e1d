"""Tuning target for the width of windows.

Narrow windows alias more of dW's buffer, wide ones have longer GEMMs.  The plan models that
roughly; a step with the smallest workspace, which has the most windows, measures it.
"""

from collections.abc import Callable, Sequence

import torch

from cutefce.autotune_cache import defaults
from cutefce.autotune_cache.table import WINDOW, Candidate
from cutefce.autotune_cache.tuning.outputs import step as outputs
from cutefce.autotune_cache.tuning.targets.base import (
    MAX_LOGITS_BYTES,
    CheckedOutput,
    TuningCase,
    TuningTarget,
)
from cutefce.cute_kernels.config import KernelConfigs, PortableTiles
from cutefce.cute_kernels.kernel_set import kernel_set
from cutefce.cute_kernels.problem import Problem
from cutefce.cute_kernels.spec import KernelSpec
from cutefce.ops.primitives.dispatch import kernel_primitives
from cutefce.ops.primitives.interface import AnyPrimitives
from cutefce.ops.rows.blocks import blocks


class WindowTarget(TuningTarget):
    """Times a step with the smallest workspace; widths that need more memory are no candidates."""

    name = WINDOW

    def defaults(self) -> Sequence[Candidate]:
        return ()  # a width adds no kernels to verify

    def default(self, problem: Problem) -> Candidate:
        return outputs.smallest_plan(problem, defaults.window_configs(problem)).layout.window

    def candidates(self, problem: Problem) -> Sequence[Candidate]:
        configs = defaults.window_configs(problem)
        plans = [outputs.smallest_plan(problem, (config,)) for config in configs]
        limit = plans[0].workspace_bytes
        return [plan.layout.window for plan in plans if plan.workspace_bytes <= limit]

    def cost(self, problem: Problem, candidate: Candidate) -> float:
        return outputs.smallest_plan(problem, (_tiles(problem, candidate),)).seconds

    def configs(self, problem: Problem, candidate: Candidate) -> KernelConfigs:
        return self.default_configs(self.reference_problem(problem.dtype))

    def kernels(self, problem: Problem, candidate: Candidate) -> Sequence[KernelSpec]:
        timed = kernel_set(self.arch, problem.dtype, self.default_configs(problem))
        return *super().kernels(problem, candidate), *timed.all()

    def tiles(self, problem: Problem, candidate: Candidate) -> PortableTiles:
        return _tiles(problem, candidate)

    def compute(self, case: TuningCase, primitives: AnyPrimitives) -> dict[str, CheckedOutput]:
        return outputs.smallest_step_outputs(case, primitives)

    def call(self, case: TuningCase, candidate: Candidate) -> Callable[[], object]:
        # timed with the kernels of the problem, verified with those of the reference problem
        tiles, configs = self.tiles(case.problem, candidate), self.default_configs(case.problem)
        kernels = kernel_set(self.arch, case.problem.dtype, configs)
        primitives = kernel_primitives(tiles, kernels, self.gpu.num_sms)
        return lambda: outputs.smallest_step(case, primitives)

    def cublas(self, case: TuningCase) -> Callable[[], object]:
        problem, (h, w) = case.problem, (case.h, case.w)
        columns = min(problem.vocab, MAX_LOGITS_BYTES // (problem.tokens * problem.item_bytes))
        width = max(8, columns // 8 * 8)
        exps = h.new_empty(problem.tokens, width).uniform_()
        dx, dw = torch.empty_like(h), torch.empty_like(w)

        def multiply() -> None:
            for columns in blocks(problem.vocab, width):
                some = exps[:, : columns.stop - columns.start]
                torch.mm(h, w[columns].t(), out=some)
                torch.mm(some, w[columns], out=dx)
                torch.mm(some.t(), h, out=dw[columns])

        return multiply


def _tiles(problem: Problem, candidate: Candidate) -> PortableTiles:
    """Return the default tiles with windows of a width, at most that of the vocabulary."""
    assert isinstance(candidate, int)
    widest = defaults.widest_window(problem)
    return defaults.with_window(widest, min(candidate, widest.window))
