"""Programs of random problems: no buffers overlap, and more memory is never slower."""

import random

import pytest

from cutefce.autotune_cache.defaults import window_configs
from cutefce.cute_kernels.problem import Problem as PlannedProblem
from cutefce.ops.planning import planner
from cutefce.ops.program.cost import GPU, seconds
from cutefce.ops.program.kernel_backend import KernelBackend
from cutefce.ops.program.layout import Layout, most_aliased
from cutefce.ops.program.lower import lower
from cutefce.ops.program.place import check, peak
from cutefce.ops.program.plan import MAXIMUM, MINIMUM, plan
from cutefce.ops.program.problem import Problem, Upstream
from cutefce.ops.program.steps import Home
from tests.support.tiers import rest_slow

MIB = 1 << 20
BACKEND = KernelBackend()
SIZES = [
    (8192, 4096, 131072),
    (32768, 4096, 131072),
    (16384, 7168, 129280),
    (4096, 2048, 151936),
    (2048, 896, 151936),
    (256, 1024, 32000),
]
DRAWS = {"first": range(3), "others": range(3, 100)}


def random_problem(draw: random.Random) -> Problem:
    """Return a problem of any size, with any gradients."""
    tokens, hidden, vocab = (int(2 ** draw.uniform(*span)) for span in ((0, 16), (5, 13), (6, 18)))
    trained = draw.choice(["hw", "hwb", "h", "w", "hb", ""])
    item, sums = draw.choice([(2, 4), (2, 4), (4, 4), (8, 8)])
    return Problem(
        tokens,
        8 * (hidden // 8 + 1),
        vocab,
        item,
        sums,
        grad_hidden="h" in trained,
        grad_weight="w" in trained,
        grad_bias="b" in trained,
        upstream=draw.choice([*Upstream]),
        scales_rows=draw.random() < 0.2,
        every_class=draw.random() < 0.2,
        stores=draw.random() < 0.9,
        selects=tokens >= 512,
        into=draw.choice([0, 0, 4]) if "w" in trained else 0,
    )


def random_layout(draw: random.Random, p: Problem) -> Layout:
    """Return any layout that this problem can have."""
    window = min(256 * draw.randint(1, 64), p.vocab)
    low = draw.choice([4, 8]) if p.keeps_sums else 0
    if p.can_chunk and p.tokens > 1 and draw.random() < 0.4:
        has_windows = not (p.grad_weight or p.grad_bias) and draw.random() < 0.5
        columns = window if has_windows else p.vocab
        return Layout(draw.randint(1, p.tokens), columns, low_bits=low, in_forward=True)
    if not (p.stores and p.needs_gradients):
        return Layout(p.tokens, window)
    most = most_aliased(p, window, BACKEND.block)
    aliased = draw.choice([0, most, draw.randint(0, most) // 256 * 256])
    kept = draw.choice([0, p.vocab - aliased, draw.randint(0, p.vocab - aliased) // 256 * 256])
    return Layout(p.tokens, window, kept, aliased, draw.choice([0, low]))


@pytest.mark.parametrize("draws", rest_slow(DRAWS))
def test_no_buffers_overlap(draws: range) -> None:
    for seed in draws:
        draw = random.Random(seed)
        for _ in range(100):
            p = random_problem(draw)
            x = random_layout(draw, p)
            if p.tokens // x.chunk > 40 or p.vocab // x.window > 200:
                continue
            program = lower(p, x, BACKEND)
            check(program)
            of_brief = lower(p, x, BACKEND, brief=True)
            assert of_brief.arenas == program.arenas
            assert seconds(of_brief, GPU) == pytest.approx(seconds(program, GPU), rel=0.02)


@pytest.mark.parametrize("draws", rest_slow(DRAWS))
def test_arenas_hold_little_more_than_what_lives_at_once(draws: range) -> None:
    for seed in draws:
        draw = random.Random(seed)
        p = random_problem(draw)
        x = random_layout(draw, p)
        if p.tokens // x.chunk > 40 or p.vocab // x.window > 200:
            continue
        program = lower(p, x, BACKEND)
        for home, size in program.arenas.items():
            own = [n for n, b in program.buffers.items() if b.home is home]
            lives = {n: program.lives[n] for n in own}
            most = max(
                (
                    sum(program.buffers[n].size for n, (a, z) in lives.items() if a <= first <= z)
                    for first, _ in lives.values()
                ),
                default=0,
            )
            assert size <= 1.02 * max(most, MIB)


@pytest.mark.parametrize("sizes", rest_slow(SIZES))
@pytest.mark.parametrize("grad_weight", [True, False])
def test_more_memory_is_never_slower(sizes: tuple[int, int, int], grad_weight: bool) -> None:
    p = Problem(*sizes, grad_weight=grad_weight, selects=sizes[0] >= 512)
    before = float("inf")
    least = peak(plan(p, BACKEND, GPU, 0))
    for budget in (*range(0, 2048 * MIB, 150 * MIB), MAXIMUM):
        program = plan(p, BACKEND, GPU, budget)
        assert peak(program) <= max(budget, least)
        assert seconds(program, GPU) <= before * (1 + 1e-9)
        before = seconds(program, GPU)
    smallest = plan(p, BACKEND, GPU, MINIMUM)
    assert peak(smallest) <= 1.25 * least
    assert smallest.arenas.keys() >= {Home.KEPT, Home.FORWARD, Home.BACKWARD}


@pytest.mark.parametrize("sizes", rest_slow(SIZES[:4], default=2))
def test_plans_are_worth_those_of_the_planner(sizes: tuple[int, int, int]) -> None:
    """Of time at budgets that users have; "min" has another definition."""
    p = Problem(*sizes, selects=True)
    old = PlannedProblem(*sizes, "bfloat16", "cuda", arch="sm_90a")
    for budget in (MAXIMUM, planner.DEFAULT, 1 << 30, 640 * MIB):
        before = planner.make_plan(old, window_configs(old), budget, True)
        program = plan(p, BACKEND, GPU, budget)
        assert peak(program) <= max(budget, before.workspace_bytes)
        assert seconds(program, GPU) <= 1.05 * before.seconds
