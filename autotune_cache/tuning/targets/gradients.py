"""Tuning targets for the GEMMs of dX and dW."""

import abc
import dataclasses
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from cutefce.autotune_cache.ahead import with_gradients
from cutefce.autotune_cache.table import Candidate
from cutefce.autotune_cache.tuning.cost_model import gemm_cycles
from cutefce.autotune_cache.tuning.outputs import step as outputs
from cutefce.autotune_cache.tuning.targets.base import CheckedOutput, TuningCase, TuningTarget
from cutefce.cute_kernels.config import GemmConfig, KernelConfigs
from cutefce.cute_kernels.problem import Problem
from cutefce.ops.primitives.interface import AnyPrimitives

LONG_SUM_ROUNDINGS = 16
"""Error of a float32 sum of 2**18 terms, in units of the error of short sums."""
MAX_EXPS_BYTES = 16 << 30
"""Size of the exponentials above which only the first rows of the result are computed.  The fastest
candidate depends on the length of the sums and on their number."""


class GradGemmTarget(TuningTarget):
    """Times the GEMM of a gradient on all exponentials, or the first rows of its result."""

    def compute(self, case: TuningCase, primitives: AnyPrimitives) -> dict[str, CheckedOutput]:
        if case.upstream is not None:
            return outputs.step_outputs(case, primitives, self.parts)
        result, call = self.gemm(case, primitives)
        call()
        # a 16-bit result is rounded once; float32 sums lose bits in the tensor cores at every step
        roundings = 1 if result.dtype.itemsize == 2 else LONG_SUM_ROUNDINGS
        return {self.name: CheckedOutput(result, roundings, relative_to_row=True)}

    def call(self, case: TuningCase, candidate: Candidate) -> Callable[[], object]:
        return self.gemm(case, self.primitives(case.problem, candidate))[1]

    @abc.abstractmethod
    def exps(self, case: TuningCase) -> Tensor:
        """Return random exponentials: the part of (N, V) for the rows of the result in use."""

    @abc.abstractmethod
    def gemm(
        self, case: TuningCase, primitives: AnyPrimitives
    ) -> tuple[Tensor, Callable[[], object]]:
        """Return the result's buffer and the call that fills it."""


class GradHiddenTarget(GradGemmTarget):
    """float32 sums of dX; timed on many columns, verified on few as well."""

    name = "grad_hidden"

    def defaults(self) -> Sequence[Candidate]:
        return self.arch.grad_hidden_configs()

    def configs(self, problem: Problem, candidate: Candidate) -> KernelConfigs:
        assert candidate is None or isinstance(candidate, GemmConfig)
        configs = super().configs(problem, candidate)
        return dataclasses.replace(configs, grad_hidden_short=candidate)

    def candidates(self, problem: Problem) -> Sequence[Candidate]:
        return (None, *self.distinct_configs(problem.tokens))

    def cost(self, problem: Problem, candidate: Candidate) -> float:
        if candidate is None:
            return 0.0
        assert isinstance(candidate, GemmConfig)
        sizes = problem.tokens, problem.hidden, problem.vocab
        return gemm_cycles(*sizes, candidate, self.gpu.num_sms)

    def exps(self, case: TuningCase) -> Tensor:
        tokens, vocab = case.problem.tokens, case.problem.vocab
        return case.random(_affordable_rows(tokens, vocab, case.problem.item_bytes), vocab)

    def gemm(
        self, case: TuningCase, primitives: AnyPrimitives
    ) -> tuple[Tensor, Callable[[], object]]:
        exps = self.exps(case)
        sums = torch.empty_like(case.h[: len(exps)], dtype=torch.float32)
        add = primitives.gradients.add_grad_hidden
        return sums, lambda: add(sums, exps, case.w, accumulate=False)

    def cublas(self, case: TuningCase) -> Callable[[], object]:
        exps = self.exps(case)
        out = torch.empty_like(case.h[: len(exps)])
        return lambda: torch.mm(exps, case.w, out=out)


class GradWeightTarget(GradGemmTarget):
    """The final dW, in the dtype of the weight."""

    name = "grad_weight"

    def defaults(self) -> Sequence[Candidate]:
        return self.arch.grad_weight_configs()

    def configs(self, problem: Problem, candidate: Candidate) -> KernelConfigs:
        """Do what `TuningTarget.configs` does.

        Defaults have every configuration of kept sums and, without a `base`, of `exps`.
        """
        configs = super().configs(problem, candidate)
        for default in with_gradients(self.arch, configs.project_exp):
            if default.grad_weight == candidate:
                exps = default.exps if self.base is None else configs.exps
                return dataclasses.replace(configs, kept_sums=default.kept_sums, exps=exps)
        return configs

    def candidates(self, problem: Problem) -> Sequence[Candidate]:
        return self.distinct_configs(problem.vocab)

    def cost(self, problem: Problem, candidate: Candidate) -> float:
        assert isinstance(candidate, GemmConfig)
        sizes = problem.vocab, problem.hidden, problem.tokens
        return gemm_cycles(*sizes, candidate, self.gpu.num_sms)

    def exps(self, case: TuningCase) -> Tensor:
        tokens, vocab = case.problem.tokens, case.problem.vocab
        return case.random(tokens, _affordable_rows(vocab, tokens, case.problem.item_bytes))

    def gemm(
        self, case: TuningCase, primitives: AnyPrimitives
    ) -> tuple[Tensor, Callable[[], object]]:
        exps, targets = self.exps(case), outputs.make_targets(case)
        ones = torch.ones_like(case.y, dtype=torch.float32)
        gradients = primitives.gradients
        target_grad = gradients.target_grad(case.h, ones, targets)
        out = case.w.new_empty(exps.shape[1], case.problem.hidden)
        return out, lambda: gradients.finish_dw(out, exps, case.h, target_grad, 0, ones[0])

    def cublas(self, case: TuningCase) -> Callable[[], object]:
        exps = self.exps(case)
        out = case.w.new_empty(exps.shape[1], case.problem.hidden)
        return lambda: torch.mm(exps.t(), case.h, out=out)


def _affordable_rows(rows: int, inner: int, item_bytes: int) -> int:
    """Return the rows of a result whose exponentials, `inner` a row, fit MAX_EXPS_BYTES."""
    return min(rows, max(8, MAX_EXPS_BYTES // (inner * item_bytes) // 8 * 8))
