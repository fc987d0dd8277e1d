"""The width of windows, which can be tuned as kernels can.

Narrow windows lend more of dW's place, and wide ones have longer products.  The planner's model of
that is rough; a step with the smallest workspace, which walks the most windows, tells.
"""

from collections.abc import Callable, Sequence

import torch

from cutefce.autotune_cache import defaults
from cutefce.autotune_cache.table import WINDOW, Choice
from cutefce.autotune_cache.tuning import outputs
from cutefce.autotune_cache.tuning.targets.base import PRODUCT_BYTES, Case, OnKernels, Result
from cutefce.cute_kernels.config import KernelConfigs, PortableTiles
from cutefce.cute_kernels.problem import Problem
from cutefce.cute_kernels.spec import KernelSpec, kernel_set
from cutefce.ops.primitives.cute import CutePrimitives
from cutefce.ops.primitives.interface import Primitives
from cutefce.ops.strategies import windows


class Window(OnKernels):
    """Columns of a window, of widths with which no step takes more memory than with the widest."""

    name = WINDOW

    def defaults(self) -> Sequence[Choice]:
        return ()  # verified are kernels

    def default(self, problem: Problem) -> Choice:
        return outputs.smallest_plan(problem, defaults.window_configs(problem)).window

    def candidates(self, problem: Problem) -> Sequence[Choice]:
        configs = defaults.window_configs(problem)
        plans = [outputs.smallest_plan(problem, (config,)) for config in configs]
        most = plans[0].workspace_bytes
        return [plan.window for plan in plans if plan.workspace_bytes <= most]

    def cost(self, problem: Problem, choice: Choice) -> float:
        return outputs.smallest_plan(problem, (_of_width(problem, choice),)).seconds

    def configs(self, problem: Problem, choice: Choice) -> KernelConfigs:
        return self.default_configs(self.typical(problem.dtype))

    def kernels(self, problem: Problem, choice: Choice) -> Sequence[KernelSpec]:
        own = kernel_set(self.arch, problem.dtype, self.default_configs(problem))
        return *super().kernels(problem, choice), *own.all()

    def tiles(self, problem: Problem, choice: Choice) -> PortableTiles:
        return _of_width(problem, choice)

    def found(self, case: Case, primitives: Primitives) -> dict[str, Result]:
        return outputs.of_smallest_step(case, primitives)

    def call(self, case: Case, choice: Choice) -> Callable[[], object]:
        # as a step of the problem runs; what is checked is the typical problem's
        tiles, configs = self.tiles(case.problem, choice), self.default_configs(case.problem)
        gpu = self.arch, case.problem.dtype, configs, self.num_sms
        return lambda: outputs.smallest_step(case, CutePrimitives(tiles, *gpu))

    def product(self, case: Case) -> Callable[[], object]:
        problem, (h, w) = case.problem, (case.h, case.w)
        most = min(problem.vocab, PRODUCT_BYTES // (problem.tokens * problem.item_bytes))
        width = max(8, most // 8 * 8)
        exps = h.new_empty(problem.tokens, width).uniform_()
        dx, dw = torch.empty_like(h), torch.empty_like(w)

        def multiply() -> None:
            for first, last in windows.split_windows(problem.vocab, 0, width):
                some = exps[:, : last - first]
                torch.mm(h, w[first:last].t(), out=some)
                torch.mm(some, w[first:last], out=dx)
                torch.mm(some.t(), h, out=dw[first:last])

        return multiply


def _of_width(problem: Problem, choice: Choice) -> PortableTiles:
    """Return the tile configuration with windows of a width, or with one of all columns."""
    assert isinstance(choice, int)
    widest = defaults.widest_window(problem)
    return defaults.with_window(widest, min(choice, widest.window))
