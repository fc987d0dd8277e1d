"""What is tuned: the GEMMs of `project_exp`, dX and dW, each with the call that is timed."""

import abc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from cutefce.autotune_cache.table import Candidate, candidates
from cutefce.autotune_cache.tuning.cases import Case
from cutefce.autotune_cache.tuning.outputs.steps import Way, make_targets, prepared
from cutefce.autotune_cache.tuning.runner import Runner, with_tuned
from cutefce.cute_kernels.config import KernelConfigs
from cutefce.cute_kernels.gpu import Gpu
from cutefce.cute_kernels.problem import Problem
from cutefce.ops.primitives.portable_projection import Logits
from cutefce.ops.primitives.primitives import Primitives
from cutefce.ops.rows.kept_sums import Sums

MAX_EXPS_BYTES = 16 << 30
"""Size of the exponentials above which only the first rows of a gradient are computed.  The fastest
candidate depends on the length of the sums and on their number."""


@dataclass(frozen=True)
class TuningTarget(abc.ABC):
    """One kernel on one GPU; picklable."""

    runner: Runner

    name: ClassVar[str]
    """Name in tables: a field of KernelConfigs."""

    def default(self, problem: Problem) -> Candidate:
        """Return the candidate that serves `problem` if nothing was tuned."""
        configs = self.runner.gpu.default_configs(problem.tokens, problem.hidden)
        default: Candidate = getattr(configs, self.name)
        return default

    def configs(self, candidate: Candidate) -> KernelConfigs:
        """Return the configurations of all kernels with `candidate` for this one."""
        return with_tuned(self.runner.base(), self.name, candidate)

    def candidates(self) -> Sequence[Candidate]:
        """Return what may win; nothing if the architecture does not have the kernel."""
        return candidates(self.runner.arch, self.name)

    @abc.abstractmethod
    def call(self, case: Case, primitives: Primitives) -> Callable[[], object]:
        """Return the call whose time decides."""


class ProjectExpTarget(TuningTarget):
    """The forward's GEMM, with as many stored exponentials as the default workspace holds."""

    name = "project_exp"

    def call(self, case: Case, primitives: Primitives) -> Callable[[], object]:
        inputs, plan, _ = prepared(case, primitives, Way(stored=1))
        h, w, targets, kept = inputs.h, inputs.w, inputs.targets, plan.layout.kept
        logit = primitives.projection.target_logit(h, w, targets)
        exps = h.new_empty(len(h), kept) if kept else None
        logits = Logits(h, w, (0, len(w)), logit, targets)
        return lambda: primitives.projection.project_exp(logits, exps)


class GradientTarget(TuningTarget):
    """The GEMM of a gradient, on all exponentials or for the first rows of its result."""

    @abc.abstractmethod
    def operands(self, case: Case) -> tuple[Tensor, Tensor]:
        """Return random exponentials, (M, K) of the result's first rows, and the (K, D) other."""


class GradHiddenTarget(GradientTarget):
    """float32 sums of dX."""

    name = "grad_hidden"

    def operands(self, case: Case) -> tuple[Tensor, Tensor]:
        p = case.problem
        return case.random(_affordable_rows(p.tokens, p.vocab, p.item_bytes), p.vocab), case.w

    def call(self, case: Case, primitives: Primitives) -> Callable[[], object]:
        exps, w = self.operands(case)
        sums = Sums(w.new_empty(len(exps), case.problem.hidden, dtype=torch.float32))
        add = primitives.gradients.add_hidden
        return lambda: add(sums, exps, w, accumulate=False)


class GradWeightTarget(GradientTarget):
    """The final dW, in the dtype of the weight."""

    name = "grad_weight"

    def operands(self, case: Case) -> tuple[Tensor, Tensor]:
        p = case.problem
        rows = _affordable_rows(p.vocab, p.tokens, p.item_bytes)
        return case.random(p.tokens, rows).t(), case.h

    def call(self, case: Case, primitives: Primitives) -> Callable[[], object]:
        (exps, h), gradients, ones = self.operands(case), primitives.gradients, case.upstream
        target_grad = gradients.target_grad(h, ones, make_targets(case))
        out, add = Sums(h.new_empty(len(exps), case.problem.hidden)), gradients.add_weight
        return lambda: add(out, exps.t(), h, target_grad, 0, grad_scale=ones[0])


def _affordable_rows(rows: int, inner: int, item_bytes: int) -> int:
    """Return the rows of a result whose exponentials, `inner` a row, fit MAX_EXPS_BYTES."""
    return min(rows, max(8, MAX_EXPS_BYTES // (inner * item_bytes) // 8 * 8))


def all_targets(gpu: Gpu, device: str) -> tuple[TuningTarget, ...]:
    """Return everything that can be tuned on `gpu`, which torch addresses as `device`."""
    kinds = ProjectExpTarget, GradHiddenTarget, GradWeightTarget
    every = [kind(Runner(gpu, device)) for kind in kinds]
    return tuple(target for target in every if target.candidates())
