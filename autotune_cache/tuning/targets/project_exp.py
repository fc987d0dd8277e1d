"""TODO."""

from collections.abc import Callable, Sequence

import torch

from cutefce.autotune_cache.table import Choice
from cutefce.autotune_cache.tuning import outputs
from cutefce.autotune_cache.tuning.cost_model import project_exp_cycles
from cutefce.autotune_cache.tuning.targets.base import PRODUCT_BYTES, Case, OnKernels, Result
from cutefce.cute_kernels.config import GemmConfig
from cutefce.cute_kernels.problem import Problem
from cutefce.ops.primitives.interface import Primitives
from cutefce.ops.strategies import windows


class ProjectExp(OnKernels):
    """`project_exp`: timed is the forward of a step with the default workspace."""

    name = "project_exp"

    def defaults(self) -> Sequence[Choice]:
        return self.arch.prebuilt_configs()

    def candidates(self, problem: Problem) -> Sequence[Choice]:
        return self.choices(problem.tokens)

    def cost(self, problem: Problem, choice: Choice) -> float:
        assert isinstance(choice, GemmConfig)
        return project_exp_cycles(problem, choice, self.num_sms)

    def found(self, case: Case, primitives: Primitives) -> dict[str, Result]:
        return outputs.of_steps(case, primitives)

    def call(self, case: Case, choice: Choice) -> Callable[[], object]:
        primitives = self.primitives(case.problem, choice)
        h, w = primitives.prepare(case.h, case.w)
        logit = primitives.target_logit(h, w, outputs.targets_of(case))
        kept = outputs.plan_of(case).kept
        exps = h.new_empty(h.shape[0], kept) if kept else None
        columns = 0, case.problem.vocab
        return lambda: primitives.project_exp(h, w, columns, logit, case.y, exps)

    def product(self, case: Case) -> Callable[[], object]:
        tokens, vocab = case.problem.tokens, case.problem.vocab
        width = min(vocab, PRODUCT_BYTES // (tokens * case.problem.item_bytes))
        logits = case.h.new_empty(tokens, width)

        def multiply() -> None:
            for first, last in windows.split_windows(vocab, 0, width):
                torch.mm(case.h, case.w[first:last].t(), out=logits[:, : last - first])

        return multiply
