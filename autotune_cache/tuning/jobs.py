"""What is tuned: the GEMMs of `project_exp`, dX and dW, each with the call that is timed."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from cutefce.autotune_cache.table import TUNED, Candidate, Key, candidates, key_of
from cutefce.autotune_cache.tuning.cases import Case, full_case
from cutefce.autotune_cache.tuning.outputs.steps import Way, make_targets, prepared
from cutefce.autotune_cache.tuning.runner import Runner
from cutefce.autotune_cache.tuning.shapes import Sizes
from cutefce.autotune_cache.tuning.timing import Call
from cutefce.cute_kernels.config import KernelConfigs
from cutefce.cute_kernels.integers import round_up
from cutefce.cute_kernels.parts import STEP, parts_of
from cutefce.cute_kernels.problem import Problem
from cutefce.cute_kernels.spec.kernel import KernelSpec
from cutefce.ops.primitives.portable_projection import Logits
from cutefce.ops.primitives.primitives import Primitives
from cutefce.ops.rows.kept_sums import Sums


@dataclass(frozen=True)
class Job:
    """One GEMM of one problem on one GPU; picklable."""

    runner: Runner
    kernel: str
    """Name in tables: a field of KernelConfigs."""
    problem: Problem

    def __str__(self) -> str:
        p = self.problem
        return f"{p.tokens}x{p.hidden}x{p.vocab} {self.kernel}"

    @property
    def key(self) -> Key:
        """The key of the problem in a table."""
        return key_of(self.kernel, self.problem)

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        """What may win: the default first, then the others that the architecture lists."""
        p = self.problem
        default = getattr(self.runner.gpu.default_configs(p.tokens, p.hidden), self.kernel)
        return tuple(dict.fromkeys((default, *candidates(self.runner.gpu.arch, self.kernel))))

    def configs(self, candidate: Candidate) -> KernelConfigs:
        """Return the configurations of all kernels with `candidate` for this one.

        That of dX is also the one for few columns, which small vocabularies have.
        """
        changed: dict[str, Any] = {self.kernel: candidate}
        if self.kernel == "grad_hidden":
            changed["grad_hidden_short"] = candidate
        return dataclasses.replace(self.runner.base(), **changed)

    def kernels(self) -> list[KernelSpec]:
        """Return the kernels that trials launch."""
        every, dtype, parts = map(self.configs, self.candidates), self.problem.dtype, parts_of(STEP)
        return [x for configs in every for x in self.runner.kernels(dtype, configs, parts)]

    def calls(self, some: Sequence[Candidate]) -> dict[Candidate, Call]:
        """Return the calls whose times decide, of some candidates, on the same random inputs."""
        p, case = self.problem, full_case(self.problem, self.runner.device)
        columns = 0 if self.kernel == "project_exp" else round_up(p.vocab, 8)
        exps = case.h.new_empty(p.tokens, columns).uniform_()[:, : p.vocab]
        every = {x: self.runner.primitives(p, self.configs(x)) for x in some}
        return {x: self._call(case, exps, primitives) for x, primitives in every.items()}

    def _call(self, case: Case, exps: Tensor, primitives: Primitives) -> Call:
        """Return the GEMM of sums of dX, or of the final dW, from `exps` (N, V), or of the forward.

        That stores as many exponentials as the default workspace holds.
        """
        p, gradients = case.problem, primitives
        if self.kernel == "project_exp":
            inputs, plan, _ = prepared(case, primitives, Way(stored=1))
            h, w, targets, kept = inputs.h, inputs.w, inputs.targets, plan.layout.kept
            logit = primitives.target_logit(h, w, targets)
            stored = h.new_empty(p.tokens, kept) if kept else None
            logits = Logits(h, w, (0, p.vocab), logit, targets)
            return partial(primitives.project_exp, logits, stored)
        if self.kernel == "grad_hidden":
            sums = Sums(case.w.new_empty(p.tokens, p.hidden, dtype=torch.float32))
            return partial(gradients.add_hidden, sums, exps, case.w, accumulate=False)
        target_grad = gradients.target_grad(case.h, case.upstream, make_targets(case))
        dw, scale = Sums(torch.empty_like(case.w)), case.upstream[0]
        return partial(gradients.add_weight, dw, exps, case.h, target_grad, 0, grad_scale=scale)


def jobs_of(runner: Runner, shapes: Sequence[Sizes], dtype: str) -> list[Job]:
    """Return the jobs of the problems of these shapes: of each kernel that the GPU has."""
    kernels = [kernel for kernel in TUNED if candidates(runner.gpu.arch, kernel)]
    return [Job(runner, x, runner.problem(sizes, dtype)) for sizes in shapes for x in kernels]
