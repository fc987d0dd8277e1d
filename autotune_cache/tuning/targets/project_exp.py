"""Tuning target for `project_exp`."""

from collections.abc import Callable, Sequence

import torch

from cutefce.autotune_cache.table import Candidate
from cutefce.autotune_cache.tuning.cost_model import project_exp_cycles
from cutefce.autotune_cache.tuning.outputs import step as outputs
from cutefce.autotune_cache.tuning.targets.base import (
    MAX_LOGITS_BYTES,
    CheckedOutput,
    TuningCase,
    TuningTarget,
)
from cutefce.cute_kernels.config import GemmConfig
from cutefce.cute_kernels.problem import Problem
from cutefce.ops.primitives.interface import AnyPrimitives
from cutefce.ops.rows.blocks import blocks


class ProjectExpTarget(TuningTarget):
    """Times the forward of a step with the default workspace."""

    name = "project_exp"

    def defaults(self) -> Sequence[Candidate]:
        return self.arch.prebuilt_configs()

    def candidates(self, problem: Problem) -> Sequence[Candidate]:
        return *self.distinct_configs(problem.tokens), *self.arch.swapped_search_space()

    def cost(self, problem: Problem, candidate: Candidate) -> float:
        assert isinstance(candidate, GemmConfig)
        return project_exp_cycles(problem, candidate, self.gpu.num_sms)

    def compute(self, case: TuningCase, primitives: AnyPrimitives) -> dict[str, CheckedOutput]:
        return outputs.step_outputs(case, primitives, self.parts)

    def call(self, case: TuningCase, candidate: Candidate) -> Callable[[], object]:
        projection = self.primitives(case.problem, candidate).projection
        h, w = projection.prepare(case.h, case.w)
        targets = outputs.make_targets(case)
        logit = projection.target_logit(h, w, targets)
        kept = outputs.kept_columns(case)
        exps = h.new_empty(h.shape[0], kept) if kept else None
        columns = 0, case.problem.vocab
        return lambda: projection.project_exp(h, w, columns, logit, targets, exps)

    def cublas(self, case: TuningCase) -> Callable[[], object]:
        tokens, vocab = case.problem.tokens, case.problem.vocab
        width = min(vocab, MAX_LOGITS_BYTES // (tokens * case.problem.item_bytes))
        logits = case.h.new_empty(tokens, width)

        def multiply() -> None:
            for columns in blocks(vocab, width):
                torch.mm(case.h, case.w[columns].t(), out=logits[:, : columns.stop - columns.start])

        return multiply
