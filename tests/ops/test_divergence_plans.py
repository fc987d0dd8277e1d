"""Plans of divergences: what they predict is what calls take."""

import random
from itertools import pairwise
from typing import Any

import pytest
import torch

import cutefce
from bench.harness.timing import peak_bytes
from cutefce.cute_kernels.problem import Problem
from cutefce.ops.budgets import MAXIMUM
from cutefce.ops.divergence import operators
from cutefce.ops.divergence.lower import lower
from cutefce.ops.divergence.plan import DivergencePlan, _families, make_plan
from cutefce.ops.divergence.problem import DivergenceProblem
from cutefce.ops.divergence.steps import seconds
from cutefce.ops.program.place import peak
from cutefce.ops.program.predicted_time import GPU
from cutefce.ops.program.steps import ARENAS
from tests.support.divergence import Heads, heads
from tests.support.sound_programs import check
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
    "total variation": {},
}
CALLS: dict[str, dict[str, Any]] = {
    "each token's KL": {"divergence": "forward_kl", "reduction": "none"},
    "total variation": {"divergence": "tv"},
}
"""Arguments of calls, where they are not those of a JSD."""
NARROW = "narrow heads, many tokens"
MIB = 1 << 20
BUDGETS = "max", "min", 12 << 20
MEMORY = [
    ("few tokens, a wide vocabulary", "student", torch.float32, "min"),
    *((size, "student", torch.bfloat16, budget) for size in SHAPES for budget in BUDGETS),
    *((size, "student", torch.float32, "min") for size in SHAPES),
    *((size, "total variation", torch.float32, budget) for size in SHAPES for budget in BUDGETS),
    *((NARROW, use, torch.bfloat16, budget) for use in USES for budget in ("min", 12 << 20)),
    (NARROW, "both", torch.float64, "max"),
]


@pytest.mark.parametrize("tokens", [2048, 2560, 4096])
def test_windows_in_dw_are_near_enough_for_the_kernel_of_rows(tokens: int) -> None:
    """It counts the elements from one to the next in 32 bits: those of the widest heads do not."""
    head = tokens, 18432, 256000, "bfloat16", "cuda"
    problem = DivergenceProblem(Problem(*head), Problem(*head), tokens)
    for budget in (1 << 28, 1 << 30, 9 << 28, 1 << 32, 1 << 33, MAXIMUM):
        layout = make_plan(problem, budget).layout
        is_one = layout.window == problem.student.vocab
        assert is_one or not layout.aliased or layout.window * 18432 < 1 << 31


@pytest.mark.parametrize("call", rest_slow([*dict.fromkeys(MEMORY)]))
def test_memory_is_what_is_predicted(call: tuple[str, str, torch.dtype, int | str]) -> None:
    size, use, dtype, workspace = call
    shape, options = SHAPES[size], {"ignored": 0, **USES[use]}
    case = heads(*shape, dtype=dtype, **options)
    form = {"divergence": "jsd", "workspace": workspace, **case.biases, **CALLS.get(use, {})}
    measured, predicted = memory_of(case, form)
    assert abs(measured - predicted) <= max(predicted / 100, MIB)
    tokens, _, vocab = shape
    if workspace == "min" and tokens > 100:
        assert measured < 2 * tokens * vocab * 4 * 3 / 4, "room for a part of the logits"


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


def memory_of(case: Heads, form: dict[str, Any]) -> tuple[int, int]:
    """Return the peak bytes of a step beyond inputs and gradients, and what its plan predicts."""
    is_every = bool((case.target != -100).all())
    given = *case.tensors, None if is_every else case.target

    def step() -> None:
        torch.autograd.grad(cutefce.linear_divergence(*given, **form).sum(), case.leaves)

    step()
    gradients = sum(x.numel() * x.element_size() for x in case.leaves)
    predicted = cutefce.plan_divergence(*given, **form).workspace_bytes
    return peak_bytes(step, "cpu") - gradients, predicted


def random_problem(draw: random.Random) -> DivergenceProblem:
    """Return a problem of any sizes on a GPU."""
    tokens, hidden, vocab = (int(2 ** draw.uniform(*span)) for span in ((0, 14), (5, 13), (6, 18)))
    dtype = draw.choice(["bfloat16", "float16", "float32"])
    sides = []
    for size in (hidden, draw.choice([hidden, 2 * hidden])):
        trained = [draw.random() < 0.6 for _ in range(2)]
        bias = draw.random() < 0.2
        side = Problem(tokens, size, vocab, dtype, "cuda", trained[0], trained[1], grad_bias=bias)
        sides.append(side)
    student, teacher = sides
    flags = [draw.random() < 0.2 for _ in range(2)]
    every = tokens + draw.choice([0, tokens])
    return DivergenceProblem(student, teacher, every, 0, flags[0], flags[1])


@pytest.mark.parametrize("draws", rest_slow([range(8), range(8, 100)]))
def test_programs_are_sound(draws: range) -> None:
    """No buffers overlap, and what plans compare are a few of the steps that run."""
    for seed in draws:
        draw = random.Random(seed)
        p = random_problem(draw)
        layouts = [x for family in _families(p) for x in family]
        for x in draw.sample(layouts, min(6, len(layouts))):
            program, brief = lower(p, x), lower(p, x, brief=True)
            if len([*program.steps()]) < 1000:
                check(program)
            placed = (b for b in program.buffers.values() if b.home in ARENAS)
            assert all(b.offset % 16 == 0 for b in placed), "kernels read multiples of 16 bytes"
            assert brief.arenas == program.arenas
            assert peak(brief) == pytest.approx(peak(program), rel=0.01, abs=MIB)
            assert seconds(brief, GPU) == pytest.approx(seconds(program, GPU), rel=0.02)


@pytest.mark.slow
def test_more_memory_is_never_slower() -> None:
    heads_of_both = (Problem(8192, 4096, 128256, "bfloat16", "cuda"),) * 2
    problem = DivergenceProblem(*heads_of_both, 8192)
    budgets = range(0, 12000 * MIB, 100 * MIB)
    plans = [make_plan(problem, budget) for budget in (*budgets, MAXIMUM)]
    for few, more in pairwise(plans):
        assert more.seconds <= few.seconds * (1 + 1e-9)
    for plan, budget in zip(plans, budgets, strict=False):
        assert plan.workspace_bytes <= max(budget, plans[0].workspace_bytes)
    assert plans[0].kept == plans[0].aliased and plans[-1].is_one_pass
    assert plans[-1].kept == 8192 and plans[-1].aliased == 0
    assert plans[0].workspace_bytes < 8192 * 128256 * 2 / 4
