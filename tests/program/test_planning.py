"""Programs of random problems: no buffers overlap, and more memory is never slower."""

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

import cutefce
from cutefce.ops.budgets import MAXIMUM, MINIMUM
from cutefce.ops.program.fastest import FREE, WORTH
from cutefce.ops.program.layout import Layout, most_aliased
from cutefce.ops.program.place import peak
from cutefce.ops.program.plan import _families, lower, plan, planned, rounded_tokens
from cutefce.ops.program.predicted_time import GPU, seconds
from cutefce.ops.program.problem import LossProblem, Upstream
from tests.support.sound_programs import check
from tests.support.tiers import rest_slow

MIB = 1 << 20
SIZES = [
    (8192, 4096, 131072),
    (32768, 4096, 131072),
    (16384, 7168, 129280),
    (4096, 2048, 151936),
    (2048, 896, 151936),
    (256, 1024, 32000),
]


ON_HOPPER: dict[str, Any] = {"dtype": "bfloat16", "device": "cuda", "arch": "sm_90a"}


DRAWS = {"first": range(3), "others": range(3, 100)}


def random_problem(draw: random.Random, arch: str | None = "sm_90a") -> LossProblem:
    """Return a problem of any size, with any gradients, on a GPU or without `arch` on a CPU."""
    tokens, hidden, vocab = (int(2 ** draw.uniform(*span)) for span in ((0, 16), (5, 13), (6, 18)))
    trained = draw.choice(["hw", "hwb", "h", "w", "hb", ""])
    dtype = draw.choice(["bfloat16", "bfloat16", "float32", "float64"])
    return LossProblem(
        tokens,
        8 * (hidden // 8 + 1),
        vocab,
        dtype,
        "cpu" if arch is None else "cuda",
        arch=arch,
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


def random_layout(draw: random.Random, p: LossProblem) -> Layout:
    """Return any layout that this problem can have."""
    window = min(256 * draw.randint(1, 64), p.vocab)
    low = draw.choice([4, 8]) if p.accumulates_wider else 0
    if p.can_chunk and p.tokens > 1 and draw.random() < 0.4:
        has_windows = not (p.grad_weight or p.grad_bias) and draw.random() < 0.5
        columns = window if has_windows else p.vocab
        return Layout(draw.randint(1, p.tokens), columns, low_bits=low, in_chunks=True)
    if not (p.stores and p.needs_gradients):
        return Layout(p.tokens, window)
    most = most_aliased(p, window)
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
            program = lower(p, x)
            check(program)
            of_brief = lower(p, x, brief=True)
            assert of_brief.arenas == program.arenas
            assert seconds(of_brief) == pytest.approx(seconds(program), rel=0.02)
            assert peak(of_brief) == pytest.approx(peak(program), rel=0.01, abs=MIB)


@pytest.mark.parametrize("sizes", rest_slow(SIZES))
@pytest.mark.parametrize("grad_weight", [True, False])
def test_more_memory_is_never_slower(sizes: tuple[int, int, int], grad_weight: bool) -> None:
    p = LossProblem(*sizes, **ON_HOPPER, grad_weight=grad_weight, selects=sizes[0] >= 512)
    grows(p, range(0, 2048 * MIB, 150 * MIB))


def grows(p: LossProblem, budgets: range) -> None:
    """Check the plans of a problem with budgets that grow."""
    least = plan(p, 0)
    time, memory = float("inf"), 0
    for budget in (*budgets, MAXIMUM):
        found = plan(p, budget)
        assert found.workspace_bytes <= max(budget, least.workspace_bytes)
        assert found.seconds <= time * (1 + 1e-9) and found.workspace_bytes >= memory
        time, memory = found.seconds, found.workspace_bytes
    smallest = plan(p, MINIMUM)
    most, of = WORTH
    assert smallest.workspace_bytes <= least.workspace_bytes * most / of + FREE
    assert smallest.seconds <= least.seconds and smallest.budget is None


@pytest.mark.parametrize("draws", rest_slow(DRAWS))
def test_no_layout_is_better_than_the_plan(draws: range) -> None:
    """At budgets beside what layouts take, where plans change.

    A layout leaves memory for a rounded number of tokens.  Of a few tokens more columns may take
    less memory: a fiftieth, or 1 MiB, is left out.
    """
    for seed in draws:
        draw = random.Random(seed)
        p = random_problem(draw, draw.choice([None, "sm_90a"]))
        if draw.random() < 0.3:
            p = replace(p, soft=draw.choice([4, 64]), into=0)
        families = [*_families(p, may_chunk=True)]
        some = [x for f in families for x in (*f[:2], *f[1:-1:9], *f[-2:])]
        plans = [planned(p, x) for x in dict.fromkeys(some)]
        least = min(x.workspace_bytes for x in plans)
        sizes = sorted({x.workspace_bytes for x in plans})
        time, memory = float("inf"), 0
        for size in sizes[:: len(sizes) // 8 + 1]:
            for budget in (size - 1, size):
                found = plan(p, budget)
                assert found.workspace_bytes <= max(1.02 * max(budget, least), MIB)
                assert found.seconds <= time * (1 + 1e-9)
                assert 1.02 * found.workspace_bytes >= memory or memory <= MIB
                time, memory = found.seconds, found.workspace_bytes
                given = max(budget * p.tokens // rounded_tokens(p.tokens), least)
                fitting = [x.seconds for x in plans if x.workspace_bytes <= given]
                assert time <= 1.02 * min(fitting)


H, W = (torch.empty(n, 4096, dtype=torch.bfloat16, device="meta") for n in (8192, 131072))
PRODUCTS = 6 * 8192 * 4096 * 131072 / GPU.flops


def of_llama(mib: int | str | None, frozen: bool = False, **options: Any) -> Any:
    """Return the plan of a Llama head of 8192 tokens on a Hopper GPU."""
    h, w = H.detach().requires_grad_(), W.detach().requires_grad_(not frozen)
    budget = mib << 20 if isinstance(mib, int) else mib
    return cutefce.plan(h, w, workspace=budget, **options)


def test_the_ends_of_the_budget() -> None:
    everything, default, least = of_llama("max"), of_llama(None), of_llama("min")
    assert everything.layout.kept >= 131072 and default == everything
    assert not least.layout.in_chunks and least.layout.aliased > 0
    assert least.workspace_bytes <= 135 * MIB and least.seconds <= 1.28 * PRODUCTS
    assert of_llama(900).layout.in_chunks and of_llama(900).seconds <= 1.09 * PRODUCTS
    assert 0 < of_llama(1024).layout.kept < 65536 and of_llama(1024).seconds <= 1.07 * PRODUCTS
    of_tokens = of_llama(1024, reduction="none")
    assert not of_tokens.layout.in_chunks, "losses have gradients of their own"


@pytest.mark.parametrize(("mib", "most"), [(110, 0.8), (140, 0.75), (300, 0.7)])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_frozen_head_takes_two_products_in_little_memory(
    mib: int, most: float, reduction: str
) -> None:
    found = of_llama(mib, frozen=True, reduction=reduction)
    assert found.layout.in_chunks and found.workspace_bytes <= mib * MIB
    assert found.seconds <= most * PRODUCTS


def test_a_buffer_whose_upstream_gradient_is_known_needs_no_sums() -> None:
    p = LossProblem(*SIZES[1], **ON_HOPPER, selects=True, into=4, upstream=Upstream.KNOWN)
    products = 6 * p.tokens * p.hidden * p.vocab / GPU.flops
    for mib, ratio in ((300, 1.3), (1024, 1.1)):
        found = plan(p, mib * MIB)
        assert found.adds_in_forward and "dW in the caller's buffer" in str(found)
        assert found.workspace_bytes <= mib * MIB and found.seconds <= ratio * products


def test_what_a_plan_prints() -> None:
    h, w = torch.randn(4, 500, 64, requires_grad=True), torch.randn(16001, 64, requires_grad=True)
    everything = cutefce.plan(h, w, reduction="none", workspace="max")
    nothing = cutefce.plan(h, w, reduction="none", workspace="min")
    assert "windows, 100% kept" in str(everything) and "computed again" in str(nothing)
    assert f"{nothing.workspace_bytes / 2**20:.1f} MiB" in str(nothing)
    assert "no plan takes as little as the workspace of 1.0 MiB" in str(of_llama(1))
    assert "no plan" not in str(of_llama(900)) and "chunks of" in str(of_llama(900))
    tiny = cutefce.plan(h[:, :2], w[:50].detach(), workspace=1)
    cost = f"{tiny.workspace_bytes} bytes, {tiny.seconds * 1e6:.1f} µs predicted"
    assert cost in str(tiny) and str(tiny).endswith("the workspace of 1 bytes")


def test_a_sampled_plan_above_a_budget_says_what_helps() -> None:
    how: dict[str, Any] = {"dtype": torch.bfloat16, "device": "meta", "requires_grad": True}
    h, w = torch.empty(8, 16, **how), torch.empty(50, 16, **how)
    text = str(cutefce.plan(h, w, gradient="sampled", workspace=1))
    assert text.endswith("predicted; fewer samples take less, another workspace does not")
    assert "fewer" not in str(cutefce.plan(h, w, gradient="sampled"))
