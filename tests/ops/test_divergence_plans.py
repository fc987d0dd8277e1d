"""Plans of divergences: what they predict is what calls take."""

from itertools import pairwise
from typing import Any

import pytest
import torch

import cutefce
from bench.harness.timing import peak_bytes
from cutefce.cute_kernels.problem import Problem
from cutefce.ops.divergence import operators
from cutefce.ops.planning.budget import MAXIMUM
from cutefce.ops.planning.divergence.planner import make_plan
from cutefce.ops.planning.divergence.problem import DivergencePlan, DivergenceProblem
from tests.support.divergence import heads
from tests.support.tiers import rest_slow

SHAPES = {
    "a small model": (512, (128, 192), 16001),
    "narrow heads, many tokens": (1500, (32, 48), 4003),
    "few tokens, a wide vocabulary": (60, (256, 128), 25013),
}
USES: dict[str, dict[str, Any]] = {
    "student": {"trained": "student"},
    "both": {},
    "biases": {"biases": True},
    "half ignored": {"ignored": 0.5},
    "each token's KL": {"trained": "student"},
}
CALLS: dict[str, dict[str, Any]] = {
    "each token's KL": {"divergence": "forward_kl", "reduction": "none"},
}
"""Arguments of calls, where they are not those of a JSD."""
NARROW = "narrow heads, many tokens"
BUDGETS = "max", "min", 12 << 20
MEMORY = [
    ("few tokens, a wide vocabulary", "student", torch.float32, "min"),
    *((size, "student", torch.bfloat16, budget) for size in SHAPES for budget in BUDGETS),
    *((size, "student", torch.float32, "min") for size in SHAPES),
    *((NARROW, use, torch.bfloat16, budget) for use in USES for budget in ("min", 12 << 20)),
    (NARROW, "both", torch.float64, "max"),
]


@pytest.mark.parametrize("call", rest_slow([*dict.fromkeys(MEMORY)]))
def test_memory_is_what_is_predicted(call: tuple[str, str, torch.dtype, int | str]) -> None:
    size, use, dtype, workspace = call
    shape, options = SHAPES[size], {"ignored": 0, **USES[use]}
    case = heads(*shape, dtype=dtype, **options)
    form = {"divergence": "jsd", "workspace": workspace, **case.biases, **CALLS.get(use, {})}
    given = *case.tensors, case.target if options["ignored"] else None

    def step() -> None:
        torch.autograd.grad(cutefce.linear_divergence(*given, **form).sum(), case.leaves)

    step()
    gradients = sum(x.numel() * x.element_size() for x in case.leaves)
    predicted = cutefce.plan_divergence(*given, **form).workspace_bytes
    measured = peak_bytes(step, "cpu") - gradients
    assert 0.95 * predicted <= measured <= predicted
    tokens, _, vocab = shape
    if workspace == "min" and tokens > 100:
        assert measured < 2 * tokens * vocab * 4 / 2, "room for half of the logits"


PLANNED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "some tokens": ({}, {}),
    "the student alone": ({"trained": "student"}, {"divergence": "reverse_kl"}),
    "biases": ({"biases": True}, {"divergence": "jsd", "beta": 1.0}),
    "each token's": ({}, {"reduction": "none", "divergence": "jsd"}),
    "temperatures of tokens": ({}, {"temperature": (1.0, torch.rand(200) + 0.5)}),
    "few bytes": ({"ignored": 0}, {"workspace": 1, "temperature": 0.7}),
}


@pytest.mark.parametrize("name", PLANNED)
def test_a_plan_is_that_of_the_call(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn, options = PLANNED[name]
    case = heads(200, (16, 12), 3001, **drawn)
    made: list[DivergencePlan] = []

    def spy(problem: DivergenceProblem, budget: int) -> DivergencePlan:
        made.append(make_plan(problem, budget))
        return made[-1]

    monkeypatch.setattr(operators, "make_plan", spy)
    counts = case.target != -100
    for target, ignored in ((case.target, None), (counts, 3), (torch.where(counts, 7, 5), 5)):
        form = {"ignore_index": ignored, "workspace": 1 << 20, **case.biases, **options}
        plan = cutefce.plan_divergence(*case.tensors, target, **form)
        cutefce.linear_divergence(*case.tensors, target, **form).sum().backward()
        assert [plan, plan] == made[-2:]
        assert plan.tokens == counts.sum()
        assert (plan.budget is None) == (plan.workspace_bytes <= form["workspace"])


def test_plans_print_what_they_take() -> None:
    case = heads(200, (16, 12), 3001, ignored=0)
    plan = cutefce.plan_divergence(*case.tensors, workspace="max")
    predicted = f"{plan.workspace_bytes / 2**20:.1f} MiB, {plan.seconds * 1e3:.1f} ms predicted"
    assert plan.workspace_bytes >= 1 << 20 and plan.seconds >= 1e-3
    tiles = "one pass of 200 tokens x 3001 classes, 100% kept, backward of 200 x 3001"
    assert str(plan) == f"{tiles}: {predicted}" and plan.seconds > 0
    with torch.no_grad():
        plan = cutefce.plan_divergence(*case.tensors, workspace=0)
    assert "kept" not in str(plan)
    assert str(plan).endswith("no plan takes as little as the workspace of 0 bytes")


def test_tensors_on_meta_are_planned_for_a_gpu() -> None:
    h = torch.empty(8, 1024, 4096, dtype=torch.bfloat16, device="meta", requires_grad=True)
    w = torch.empty(131072, 4096, dtype=torch.bfloat16, device="meta", requires_grad=True)
    plan = cutefce.plan_divergence(h, w, h.detach(), w.detach())
    assert plan.kept == 8192 and plan.is_one_pass and plan.aliased == 0
    # factors, dX's sums beside dX, and scaled hidden states
    least = (8192 * 131072 + 2 * 8192 * 4096) * 2
    assert least <= plan.workspace_bytes <= 1.01 * least
    with pytest.raises(ValueError, match="target: got one on meta"):
        cutefce.plan_divergence(h, w, h, w, torch.empty(8, 1024, dtype=torch.long, device="meta"))


@pytest.mark.slow
def test_more_memory_is_never_slower() -> None:
    heads_of_both = (Problem(8192, 4096, 128256, "bfloat16", "cuda"),) * 2
    problem = DivergenceProblem(*heads_of_both, 8192)
    plans = [make_plan(problem, budget << 20) for budget in range(0, 12000, 100)]
    plans.append(make_plan(problem, MAXIMUM))
    for few, more in pairwise(plans):
        assert more.cost <= few.cost
    for plan, budget in zip(plans, range(0, 12000, 100), strict=False):
        assert plan.workspace_bytes <= max(budget << 20, plans[0].workspace_bytes)
    assert plans[0].kept == plans[0].aliased and plans[-1].is_one_pass
    assert plans[-1].kept == 8192 and plans[-1].aliased == 0
    assert plans[0].workspace_bytes < 8192 * 128256 * 2 / 4
