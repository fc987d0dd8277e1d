"""What is tuned: the GEMMs of `project_exp`, dX and dW, each with the call that is timed."""

import dataclasses
from collections.abc import Mapping, Sequence
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
        """Return the configurations of all kernels with `candidate` for this one."""
        changed: dict[str, Any] = {self.kernel: candidate}
        return dataclasses.replace(self.runner.base(), **changed)

    def kernels(self) -> list[KernelSpec]:
        """Return the kernels that trials launch."""
        every, dtype, parts = map(self.configs, self.candidates), self.problem.dtype, parts_of(STEP)
        return [x for configs in every for x in self.runner.kernels(dtype, configs, parts)]

    def calls(self, some: Sequence[Candidate]) -> dict[Candidate, Call]:
        """Return the calls whose times decide, of some candidates, on random inputs."""
        make = {
            "project_exp": _project_exp,
            "grad_hidden": _grad_hidden,
            "grad_weight": _grad_weight,
        }[self.kernel]
        every = {x: self.runner.primitives(self.problem, self.configs(x)) for x in some}
        return make(full_case(self.problem, self.runner.device), every)


def jobs_of(runner: Runner, shapes: Sequence[Sizes], dtype: str) -> list[Job]:
    """Return the jobs of the problems of these shapes: of each kernel that the GPU has."""
    kernels = [kernel for kernel in TUNED if candidates(runner.gpu.arch, kernel)]
    return [Job(runner, x, runner.problem(sizes, dtype)) for sizes in shapes for x in kernels]


def _project_exp(case: Case, every: Mapping[Candidate, Primitives]) -> dict[Candidate, Call]:
    """Return the forward's GEMM: it stores as many exponentials as the default workspace holds."""
    calls: dict[Candidate, Call] = {}
    for candidate, primitives in every.items():
        inputs, plan, _ = prepared(case, primitives, Way(stored=1))
        h, w, targets, kept = inputs.h, inputs.w, inputs.targets, plan.layout.kept
        logit = primitives.projection.target_logit(h, w, targets)
        exps = h.new_empty(len(h), kept) if kept else None
        operands = h, w, (0, len(w)), logit, targets, exps
        calls[candidate] = partial(primitives.projection.project_exp, *operands)
    return calls


def _grad_hidden(case: Case, every: Mapping[Candidate, Primitives]) -> dict[Candidate, Call]:
    """Return float32 sums of dX, of all exponentials."""
    p, w = case.problem, case.w
    exps = _random(w, p.tokens, p.vocab)
    sums = Sums(w.new_empty(p.tokens, p.hidden, dtype=torch.float32))
    return {
        candidate: partial(primitives.gradients.add_hidden, sums, exps, w, accumulate=False)
        for candidate, primitives in every.items()
    }


def _grad_weight(case: Case, every: Mapping[Candidate, Primitives]) -> dict[Candidate, Call]:
    """Return the final dW, in the dtype of the weight, of all exponentials."""
    p, h, ones = case.problem, case.h, case.upstream
    exps = _random(h, p.tokens, p.vocab)
    out = Sums(h.new_empty(p.vocab, p.hidden))
    calls: dict[Candidate, Call] = {}
    for candidate, primitives in every.items():
        target_grad = primitives.gradients.target_grad(h, ones, make_targets(case))
        operands = out, exps, h, target_grad, 0
        calls[candidate] = partial(primitives.gradients.add_weight, *operands, grad_scale=ones[0])
    return calls


def _random(like: Tensor, rows: int, columns: int) -> Tensor:
    """Return (rows, columns) random numbers in [0, 1), with rows that kernels can read."""
    return like.new_empty(rows, round_up(columns, 8)).uniform_()[:, :columns]
