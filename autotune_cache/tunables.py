"""What can be tuned."""

import dataclasses
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from cutefce import autotune_cache
from cutefce.autotune_cache.cost import project_exp_cycles
from cutefce.autotune_cache.table import Choice
from cutefce.autotune_cache.tunable import Case, Result, Tunable
from cutefce.cute_kernels.arch import Sm90
from cutefce.cute_kernels.kernels import Kernel, kernel_set
from cutefce.cute_kernels.problem import Problem
from cutefce.ops import planner, strategies
from cutefce.ops.cute_primitives import CutePrimitives
from cutefce.ops.primitives import Primitives, Targets
from cutefce.ops.torch_primitives import TorchPrimitives

PRODUCT_BYTES = 8 << 30
"""What the result of a plain product may take; larger ones are computed in parts."""


def all_tunables(arch: Sm90, multiprocessors: int, device: str) -> tuple[Tunable, ...]:
    """Return what can be tuned on a GPU of `arch`, which torch names `device`."""
    kinds: tuple[type[Tunable], ...] = (ProjectExp,)
    return tuple(kind(arch, multiprocessors, device) for kind in kinds)


class ProjectExp(Tunable):
    """`project_exp`: timed is the forward of a step with the default workspace."""

    name = "project_exp"

    def default(self, problem: Problem) -> Choice:
        return self.arch.default(problem.tokens)

    def defaults(self) -> Sequence[Choice]:
        return self.arch.configs()

    def candidates(self, problem: Problem) -> Sequence[Choice]:
        found: dict[object, Choice] = {}
        for config in self.arch.candidates():
            # a group of more row blocks than there are is one of all
            group = min(config.group, -(-problem.tokens // config.rows))
            found.setdefault(dataclasses.replace(config, group=group), config)
        return tuple(found.values())

    def cost(self, problem: Problem, choice: Choice) -> float:
        assert choice is not None
        return project_exp_cycles(problem, choice, self.multiprocessors)

    def kernels(self, dtype: str, choice: Choice) -> Sequence[Kernel]:
        assert choice is not None
        kernels = kernel_set(self.arch, dtype, choice)
        return [getattr(kernels, field.name) for field in dataclasses.fields(kernels)]

    def expected(self, case: Case) -> dict[str, Result]:
        return _results(case, TorchPrimitives(autotune_cache.lookup(case.problem)))

    def results(self, case: Case, choice: Choice) -> dict[str, Result]:
        return _results(case, self.primitives(case.problem, choice))

    def call(self, case: Case, choice: Choice) -> Callable[[], object]:
        primitives = self.primitives(case.problem, choice)
        h, w = primitives.prepare(case.h, case.w)
        logit = primitives.target_logit(h, w, _targets(case))
        exps = _kept(case)
        return lambda: primitives.project_exp(h, w, logit, case.y, exps)

    def product(self, case: Case) -> Callable[[], object]:
        tokens, vocab = case.problem.tokens, case.problem.vocab
        width = min(vocab, PRODUCT_BYTES // (tokens * case.problem.item_bytes))
        logits = case.h.new_empty(tokens, width)

        def multiply() -> None:
            for first, last in strategies.windows(vocab, 0, width):
                torch.mm(case.h, case.w[first:last].t(), out=logits[:, : last - first])

        return multiply

    def primitives(self, problem: Problem, choice: Choice) -> Primitives:
        """Return the primitives that are tried."""
        assert choice is not None
        tiles = autotune_cache.lookup(problem)
        return CutePrimitives(tiles, self.arch, problem.dtype, choice, self.multiprocessors)


def _targets(case: Case) -> Targets:
    return strategies.locate(case.y, case.problem.vocab, -100)


def _plan(case: Case) -> planner.Plan:
    tiles = autotune_cache.lookup(case.problem)
    return planner.make_plan(case.problem, tiles, planner.DEFAULT, scalar_upstream=False)


def _kept(case: Case) -> Tensor | None:
    """Return room for the exponentials that a step keeps, None if it keeps none."""
    kept = _plan(case).kept
    return case.h.new_empty(case.problem.tokens, kept) if kept else None


def _results(case: Case, primitives: Primitives) -> dict[str, Result]:
    """Return losses, probabilities as they are kept and as they are computed again, gradients."""
    vocab, dtype = case.problem.vocab, case.h.dtype
    h, w = primitives.prepare(case.h, case.w)
    targets, exps, window = _targets(case), _kept(case), _plan(case).window
    loss, stats = strategies.forward(primitives, h, w, targets, "none", exps)
    again = h.new_empty(h.shape[0], window)
    first, last = list(strategies.windows(vocab, 0, window))[-1]
    primitives.recompute_exp(h, w, (first, last), stats.reference, targets.index, again)
    # float16's smallest exponentials are lost, relative to totals of at most FLOAT16_TOTAL
    floor = 2.0**-28 if dtype == torch.float16 else 1e-30
    results = {
        "loss": Result(loss, 1),
        "others' share": Result(stats.sum, 1, stats.total),
        "recomputed": Result(again[:, : last - first], 1, stats.total, floor),
    }
    if exps is not None:
        # the portable path rounds again what it moves to another reference
        results["kept"] = Result(exps[:, :vocab], 2, stats.total, floor)
    if case.upstream is not None:
        kept = h.new_empty(h.shape[0], 0) if exps is None else exps
        dx, dw = strategies.backward(
            primitives, h, w, targets, stats, kept, case.upstream, window, True, True
        )
        # exponentials, scaled hidden states and the gradients themselves are rounded
        floor = torch.finfo(dtype).smallest_normal
        for name, gradient in (("dX", dx), ("dW", dw)):
            assert gradient is not None
            results[name] = Result(gradient, 3, floor=floor, of_row=True)
    return results
