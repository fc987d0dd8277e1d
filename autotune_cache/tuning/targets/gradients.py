"""What can be tuned."""

import abc
import dataclasses
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from cutefce.autotune_cache.table import Choice
from cutefce.autotune_cache.tuning import outputs
from cutefce.autotune_cache.tuning.cost_model import product_cycles
from cutefce.autotune_cache.tuning.targets.base import (
    Case,
    OnKernels,
    Result,
)
from cutefce.cute_kernels.config import GemmConfig, KernelConfigs
from cutefce.cute_kernels.problem import Problem
from cutefce.ops.primitives.interface import Primitives

SUM_ROUNDINGS = 16
"""What a sum over 2**18 products may be off, in units of the error of short ones."""
EXPS_BYTES = 16 << 30
"""What the exponentials of a gradient's product may take: of more, the first rows of the result
serve.  What is fastest depends on the length of the sums and on how many there are."""


class OfGradient(OnKernels):
    """A gradient's product: timed is that of all exponentials, or of the first result's rows."""

    def defaults(self) -> Sequence[Choice]:
        return self.arch.grad_gemm_configs()

    def found(self, case: Case, primitives: Primitives) -> dict[str, Result]:
        if case.upstream is not None:
            return outputs.of_steps(case, primitives)
        result, call = self.product_of(case, primitives)
        call()
        # results are rounded once; float32 sums lose bits in the tensor cores, all along
        roundings = 1 if result.dtype.itemsize == 2 else SUM_ROUNDINGS
        return {self.name: Result(result, roundings, of_row=True)}

    def call(self, case: Case, choice: Choice) -> Callable[[], object]:
        return self.product_of(case, self.primitives(case.problem, choice))[1]

    @abc.abstractmethod
    def exponentials(self, case: Case) -> Tensor:
        """Return random numbers in the place of those (N, V) that the result's first rows take."""

    @abc.abstractmethod
    def product_of(self, case: Case, primitives: Primitives) -> tuple[Tensor, Callable[[], object]]:
        """Return where the result will be, and the call that computes it."""


class GradHidden(OfGradient):
    """dX's sums; tried on many columns, and checked on few too."""

    name = "grad_hidden"

    def configs(self, problem: Problem, choice: Choice) -> KernelConfigs:
        assert choice is None or isinstance(choice, GemmConfig)
        return dataclasses.replace(super().configs(problem, choice), grad_hidden_short=choice)

    def candidates(self, problem: Problem) -> Sequence[Choice]:
        return (None, *self.choices(problem.tokens))

    def cost(self, problem: Problem, choice: Choice) -> float:
        if choice is None:
            return 0.0
        assert isinstance(choice, GemmConfig)
        sizes = problem.tokens, problem.hidden, problem.vocab
        return product_cycles(*sizes, choice, self.num_sms)

    def exponentials(self, case: Case) -> Tensor:
        tokens, vocab = case.problem.tokens, case.problem.vocab
        rows = _affordable(tokens, vocab, case.problem.item_bytes)
        return case.random(rows, vocab)

    def product_of(self, case: Case, primitives: Primitives) -> tuple[Tensor, Callable[[], object]]:
        exps = self.exponentials(case)
        sums = torch.empty_like(case.h[: len(exps)], dtype=torch.float32)
        return sums, lambda: primitives.add_grad_hidden(sums, exps, case.w, fresh=True)

    def product(self, case: Case) -> Callable[[], object]:
        exps = self.exponentials(case)
        out = torch.empty_like(case.h[: len(exps)])
        return lambda: torch.mm(exps, case.w, out=out)


class GradWeight(OfGradient):
    """dW, final."""

    name = "grad_weight"

    def candidates(self, problem: Problem) -> Sequence[Choice]:
        return self.choices(problem.vocab)

    def cost(self, problem: Problem, choice: Choice) -> float:
        assert isinstance(choice, GemmConfig)
        sizes = problem.vocab, problem.hidden, problem.tokens
        return product_cycles(*sizes, choice, self.num_sms)

    def exponentials(self, case: Case) -> Tensor:
        tokens, vocab = case.problem.tokens, case.problem.vocab
        columns = _affordable(vocab, tokens, case.problem.item_bytes)
        return case.random(tokens, columns)

    def product_of(self, case: Case, primitives: Primitives) -> tuple[Tensor, Callable[[], object]]:
        exps, targets = self.exponentials(case), outputs.targets_of(case)
        part = primitives.target_grad(case.h, torch.ones_like(case.y, dtype=torch.float32), targets)
        out = case.w.new_empty(exps.shape[1], case.problem.hidden)
        unit = torch.ones_like(case.y[0], dtype=torch.float32)
        return out, lambda: primitives.finish_dw(out, exps, case.h, part, 0, unit)

    def product(self, case: Case) -> Callable[[], object]:
        exps = self.exponentials(case)
        out = case.w.new_empty(exps.shape[1], case.problem.hidden)
        return lambda: torch.mm(exps.t(), case.h, out=out)


def _affordable(rows: int, numbers: int, item_bytes: int) -> int:
    """Return how many of a result's rows are computed, which are sums of so many products."""
    return min(rows, max(8, EXPS_BYTES // (numbers * item_bytes) // 8 * 8))
