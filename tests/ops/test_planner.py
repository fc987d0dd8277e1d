"""The planner: choices, monotonicity, and independence of torch."""

import dataclasses
import itertools
import random
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import cutefce
from cutefce.autotune_cache.defaults import widest_window, window_configs
from cutefce.autotune_cache.tuning.shapes import NAMED
from cutefce.cute_kernels.arch.sm90 import Sm90
from cutefce.cute_kernels.config import PortableTiles
from cutefce.cute_kernels.integers import ceil_div, round_up
from cutefce.cute_kernels.problem import ITEM_BYTES, Problem, can_keep
from cutefce.cute_kernels.schedule.order import choose_vocab_splits, tiles_per_cluster
from cutefce.ops.interface.checks import workspace_bytes
from cutefce.ops.planning import planner, time_model
from cutefce.ops.planning.call_problem import CallProblem
from cutefce.ops.planning.chunks import plans as chunk_plans
from cutefce.ops.planning.chunks.plans import chunked_plan
from cutefce.ops.planning.chunks.windows import split_columns, window_widths
from cutefce.ops.planning.dw_aliasing import DwMemory
from cutefce.ops.planning.memory_model import chunked_bytes, windows_bytes
from cutefce.ops.planning.planner import (
    FLOOR,
    MAXIMUM,
    MEMORY_WEIGHT,
    MINIMUM,
    WORTH_MEMORY,
    WORTH_TIME,
    Plan,
    make_plan,
)
from cutefce.ops.planning.time_model import DEVICE_RATES, chunked_seconds, windows_seconds
from tests.support.tiers import rest_slow

GIB = 1 << 30
LLAMA = Problem(tokens=8192, hidden=4096, vocab=128256, dtype="bfloat16", device="cuda")
LONG = dataclasses.replace(LLAMA, tokens=32768)
CPU = Problem(tokens=2048, hidden=1024, vocab=50257, dtype="float32", device="cpu")


def plan(problem: Problem, budget: int, scalar_upstream: bool = True) -> Plan:
    return make_plan(problem, window_configs(problem), budget, scalar_upstream)


def test_the_ends_of_the_budget() -> None:
    everything, nothing = plan(LLAMA, MAXIMUM), plan(LLAMA, MINIMUM)
    assert (everything.strategy, nothing.strategy) == ("windows", "windows")
    assert everything.kept >= LLAMA.vocab and nothing.kept <= nothing.window
    assert nothing.workspace_bytes < everything.workspace_bytes / 4


def test_min_leaves_out_a_short_last_window() -> None:
    few = Problem(256, 1024, 32000, "bfloat16", "cuda", arch="sm_90a")
    small, memory = plan(few, MINIMUM), DwMemory(256, 1024, 32000, 256)
    most = memory.most_aliased(small.window // 2)
    *widths, last = memory.aliased_widths(most)
    assert last < min(widths) and memory.aliased_widths(small.aliased) == widths
    assert small.workspace_bytes <= FLOOR * plan(few, 0).workspace_bytes


def test_default_budget_keeps_everything_of_a_usual_step() -> None:
    assert plan(LLAMA, workspace_bytes(None)).kept >= LLAMA.vocab


def test_long_batches_put_gradients_in_the_forward() -> None:
    """Where exponentials of all tokens do not fit, dW's sums and those of a chunk may."""
    chosen = plan(LONG, 4 * GIB)
    assert (
        chosen.strategy == "gradients_in_forward"
        and chunk_plans.MIN_CHUNK <= chosen.chunk < LONG.tokens
    )
    assert plan(LONG, 4 * GIB, scalar_upstream=False).strategy == "windows"


OF_BUDGETS = {
    "long on kernels": dataclasses.replace(LONG, arch="sm_90a"),
    "CPU": CPU,
    "Llama on kernels": dataclasses.replace(LLAMA, arch="sm_90a"),
    "Llama": LLAMA,
    "long": LONG,
}


@pytest.mark.parametrize("problem", rest_slow(OF_BUDGETS, default=2))
@pytest.mark.parametrize("scalar_upstream", rest_slow([True, False]))
def test_time_falls_and_memory_stays_within_a_growing_budget(
    problem: Problem, scalar_upstream: bool
) -> None:
    floor = plan(problem, MINIMUM, scalar_upstream).workspace_bytes
    budgets = *range(floor, 8 * floor, floor // 4), *range(8 * floor, 40 * floor, floor)
    plans = [(budget, plan(problem, budget, scalar_upstream)) for budget in budgets]
    for budget, chosen in plans:
        assert chosen.workspace_bytes <= budget
    seconds = [chosen.seconds for _, chosen in plans]
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[-1] < seconds[0]


DRAWS = [(0, 25), *((seed, 250) for seed in range(1, 5))]
"""A seed, and how many random problems it draws."""
draws = pytest.mark.parametrize("draws", rest_slow(DRAWS))


def random_problem(r: random.Random) -> tuple[Problem, tuple[PortableTiles, ...]]:
    """Return a problem from tiny to huge, and windows from tiny to the usual ones."""
    arch = r.choice([None, None, "sm_90a", "sm_100a"])
    small, grads = r.random() < 0.3, r.choice([(True, True), (True, False), (False, True)])
    problem = CallProblem(
        tokens=int(2 ** r.uniform(0, 6 if small else 17)) - r.choice([0, 1]),
        hidden=8 * int(2 ** r.uniform(0, 3 if small else 11)),
        vocab=int(2 ** r.uniform(0, 7 if small else 19)),
        dtype=r.choice(["bfloat16", "float16"] if arch else list(ITEM_BYTES)),
        device="cuda" if arch else r.choice(["cpu", "cuda"]),
        grad_hidden=grads[0],
        grad_weight=grads[1],
        arch=arch,
        copied_hidden=r.choice([0, 2, 4]),
        copied_weight=r.choice([0, 2, 4]),
        dense_bytes=r.choice([0, 1 << 20]),
    )
    if not small:
        return problem, window_configs(problem)
    return problem, (PortableTiles(16, 16, 16, 32), PortableTiles(8, 8, 8, 32))


@draws
def test_more_memory_is_never_slower_and_less_is_never_larger(draws: tuple[int, int]) -> None:
    seed, problems = draws
    r = random.Random(seed)
    for _ in range(problems):
        problem, configs = random_problem(r)
        upstream = r.choice([True, False]), r.choice([True, False])
        largest = make_plan(problem, configs, MAXIMUM, *upstream).workspace_bytes
        budgets = [0, *sorted(int(largest * r.uniform(0, 1.2)) for _ in range(8)), MAXIMUM]
        plans = [make_plan(problem, configs, budget, *upstream) for budget in budgets]
        for budget, chosen in zip(budgets, plans, strict=True):
            assert chosen.workspace_bytes <= budget or chosen == plans[0], problem
            assert min(chosen.aliased, chosen.kept, chosen.chunk) >= 0, problem
        for smaller, larger in itertools.pairwise(plans):
            assert smaller.seconds >= larger.seconds, problem
            assert smaller.workspace_bytes <= larger.workspace_bytes, problem


@draws
def test_no_plan_is_better_than_the_chosen_one(draws: tuple[int, int]) -> None:
    """Whatever is aliased, kept and recomputed, a plan that fits is no faster."""
    seed, problems = draws
    r = random.Random(seed)
    for _ in range(problems):
        problem, configs = random_problem(r)
        if not (can_keep(problem.dtype) and problem.gradient_bytes):
            continue
        scalar_upstream = r.choice([True, False])
        every = list(all_windows(problem, configs, scalar_upstream))
        if scalar_upstream or not problem.grad_weight:
            every += all_chunks(problem, configs[0])
        least = min(workspace for workspace, _ in every)
        smallest = make_plan(problem, configs, MINIMUM, scalar_upstream)
        assert least <= smallest.workspace_bytes, problem
        for workspace, seconds in every:
            is_cheap = smallest.workspace_bytes <= WORTH_MEMORY * workspace
            assert is_cheap or smallest.seconds <= WORTH_TIME * seconds, problem
        within = [each for each in every if each[0] <= FLOOR * least]
        best = min(within, key=cost)
        if smallest.workspace_bytes > FLOOR * least:  # it is worth that
            assert smallest.seconds < best[1] / WORTH_TIME, problem
        else:
            assert cost((smallest.workspace_bytes, smallest.seconds)) <= cost(best), problem
        for workspace, _ in r.sample(every, min(8, len(every))):
            chosen = make_plan(problem, configs, workspace, scalar_upstream)
            fastest = min(seconds for took, seconds in every if took <= workspace)
            assert chosen.workspace_bytes <= workspace and chosen.seconds <= fastest, problem


def cost(plan: tuple[int, float]) -> float:
    """Return what "min" weighs of memory and time."""
    return plan[0] * plan[1] ** MEMORY_WEIGHT


def all_chunks(p: Problem, config: PortableTiles) -> Iterator[tuple[int, float]]:
    """Yield memory and time of plans of gradients in forward: few chunks, short ones, and others.

    Those of few tokens may take more: their tiles are wide.
    """
    every, most = (
        round_up(p.vocab, config.reference_block),
        ceil_div(max(p.tokens, 1), chunk_plans.MIN_CHUNK),
    )
    chunks = {family.plan(0).chunk for family in chunk_plans.chunked_plans(p, config)}
    for count in {*range(1, min(most, 8) + 1), most}:
        even = round_up(ceil_div(p.tokens, count), chunk_plans.CHUNK_ALIGNMENT)
        chunks.add(max(min(even, p.tokens), 1))
    for chunk in chunks:
        widths = {(every, every)}
        parts = range(2, p.vocab // chunk_plans.MIN_CHUNK_WINDOW + 1)
        if chunk_plans.forms_dx_alone(p):
            unit = time_model.whole_waves(p, chunk)
            for number, units in itertools.product(parts, range(-2, 3)):
                width = (p.vocab // number // unit + units) * unit
                widest = max(width, p.vocab - (number - 1) * width)
                if width > 0:
                    widths.add((width, min(round_up(widest, config.reference_block), every)))
        for width, stored in widths:
            seconds = chunked_seconds(p, chunk, width, stored)
            yield chunked_bytes(p, config, stored, chunk), seconds


def all_windows(
    p: Problem, configs: Sequence[PortableTiles], scalar_upstream: bool
) -> Iterator[tuple[int, float]]:
    """Yield memory and time of plans that keep any number of windows, at most 16.

    They alias none or all that there is room for; any number where the others are kept.
    """
    kinds: list[tuple[PortableTiles, int | None]]
    kinds = [(config, None) for config in configs[: planner.FLOAT32_WIDTHS]]
    if planner.keeps_hidden(p):
        kinds += [(config, planner.kept_hidden_bits(p, config)) for config in configs]
    for config, bits in kinds:
        width, block = config.window, config.reference_block
        memory = DwMemory(p.tokens, p.hidden, p.vocab, block)
        ends = {memory.most_aliased(n) * p.grad_weight for n in (width, config.half(width))}
        for aliased in (
            {0} | ends | {end // width * i // 15 * width for end in ends for i in range(16)}
        ):
            rest = (p.vocab - aliased - 1) // width
            stored = {rest * i // 15 * width for i in range(16)} if aliased in {0} | ends else set()
            rest_kept = {round_up(p.vocab - aliased, block)} if aliased or bits is None else set()
            for kept in stored | rest_kept:
                workspace = windows_bytes(p, config, aliased, kept, scalar_upstream, bits)
                yield workspace, windows_seconds(p, width, aliased, kept, bits)


@pytest.mark.slow
def test_a_budget_that_nearly_keeps_everything_aliases_no_negative_number() -> None:
    problem = Problem(2, 40, 100, "bfloat16", "cpu")
    tiles = PortableTiles(window=32, reference_block=16, tile_columns=16, tile_rows=8)
    for budget in range(0, 40_000, 50):
        assert 0 <= make_plan(problem, (tiles,), budget, scalar_upstream=True).aliased <= 100


SIZES = sorted({sizes for named in NAMED.values() for sizes in named})
OF_MODELS = {
    "some frozen heads": ("bfloat16", (True, False), SIZES[:: len(SIZES) // 3]),
    "both": ("bfloat16", (True, True), SIZES),
    "hidden states": ("bfloat16", (True, False), SIZES),
    "weight": ("bfloat16", (False, True), SIZES),
    "both, float16": ("float16", (True, True), SIZES),
}
"""What is trained, of heads of these sizes."""


@pytest.mark.parametrize("given", rest_slow(OF_MODELS))
def test_bytes_are_a_limit_down_to_the_smallest_plan_of_a_model(
    given: tuple[str, tuple[bool, bool], list[tuple[int, int, int]]],
) -> None:
    dtype, grads, every = given
    for sizes in every:
        problem = Problem(*sizes, dtype, "cuda", *grads, arch="sm_90a")
        for scalar_upstream in (True, False):
            small, least = (plan(problem, n, scalar_upstream) for n in (MINIMUM, 0))
            assert least.workspace_bytes <= small.workspace_bytes
            for part in (0.1, 0.7, 0.9, 1, 1.1, 2):
                budget = int(part * small.workspace_bytes)
                chosen = plan(problem, budget, scalar_upstream)
                assert chosen == least or chosen.workspace_bytes <= budget
                assert least.workspace_bytes <= chosen.workspace_bytes
                assert chosen.seconds <= (small if part >= 1 else least).seconds


def test_the_plan_of_a_call_can_be_read() -> None:
    h, w = torch.randn(4, 500, 64, requires_grad=True), torch.randn(16001, 64, requires_grad=True)
    everything = cutefce.plan(h, w, reduction="none", workspace="max")
    nothing = cutefce.plan(h, w, reduction="none", workspace="min")
    assert "windows, 100% kept" in str(everything)
    assert "windows, 0% kept, 100% computed again" in str(nothing)
    assert nothing.workspace_bytes < everything.workspace_bytes
    assert f"{nothing.workspace_bytes / 2**20:.1f} MiB" in str(nothing)


def test_a_float32_weight_beside_16_bits_is_planned() -> None:
    h = torch.randn(6, 8, dtype=torch.bfloat16, requires_grad=True)
    plan = cutefce.plan(h, torch.randn(40, 8, requires_grad=True))
    assert plan.grad_weight and plan.aliased == 0


FROZEN_HEADS = {
    "Llama": Problem(8192, 4096, 131072, "bfloat16", "cuda", grad_weight=False, arch="sm_90a"),
    "Gemma": Problem(8192, 2304, 256000, "bfloat16", "cuda", grad_weight=False, arch="sm_90a"),
}
"""Heads whose weight is not trained."""


def products(p: Problem, chosen: Plan) -> float:
    """Return the predicted time of a plan over that of three products of all tokens."""
    flop_rate, *_ = time_model.DEVICE_RATES[p.device]
    return chosen.seconds * flop_rate / (6 * p.tokens * p.hidden * p.vocab)


@pytest.mark.parametrize("scalar_upstream", [True, False])
@pytest.mark.parametrize(
    ("name", "mib", "most"), [("Llama", 110, 0.75), ("Llama", 280, 0.70), ("Gemma", 280, 0.70)]
)
def test_a_frozen_head_takes_two_products_in_little_memory(
    name: str, mib: int, most: float, scalar_upstream: bool
) -> None:
    problem = FROZEN_HEADS[name]
    chosen = plan(problem, mib << 20, scalar_upstream)
    assert chosen.workspace_bytes <= mib << 20
    assert chosen.in_forward and products(problem, chosen) <= most
    trained = dataclasses.replace(problem, grad_weight=True)
    assert not plan(trained, mib << 20, scalar_upstream).in_forward


def test_chunks_of_a_frozen_head_grow_with_the_budget() -> None:
    plans = [plan(FROZEN_HEADS["Llama"], mib << 20) for mib in (80, 110, 280, 600)]
    sizes = [chosen.chunk * chosen.kept for chosen in plans if chosen.in_forward]
    assert len(sizes) == 4 and sizes == sorted(set(sizes))


def test_windows_inside_chunks_are_printed() -> None:
    chosen = plan(FROZEN_HEADS["Llama"], 280 << 20)
    assert chosen.has_windows
    text = f"chunks of {chosen.chunk} tokens, up to {chosen.kept} columns at a time"
    assert text in str(chosen)
    everything = plan(FROZEN_HEADS["Llama"], 3 << 29)
    assert not everything.has_windows and "131072 columns at a time" in str(everything)


@pytest.mark.parametrize("seed", range(4))
def test_windows_inside_a_chunk_cover_every_column_once(seed: int) -> None:
    r = random.Random(seed)
    for _ in range(500):
        vocab, most, unit = r.randint(1, 300000), r.randint(2, 40), 64 * r.randint(1, 400)
        width, widest = window_widths(vocab, most, unit)
        windows = list(split_columns(vocab, width, round_up(widest, 256)))
        starts, ends = zip(*windows, strict=True)
        assert (0, *ends) == (*starts, vocab) and len(windows) <= most
        assert all(start % unit == 0 for start in starts)
        assert max(last - first for first, last in windows) <= round_up(widest, 256)
        for other in range(unit, vocab, unit):  # no other width needs less memory
            assert max(other, vocab - (most - 1) * other) >= min(widest, vocab)


def waves(p: Problem, chosen: Plan) -> int:
    """Return how many tiles the busiest cluster of an H200 computes in the windows of a chunk."""
    config, clusters, total = Sm90().default(p.tokens), 66, 0
    row_blocks = ceil_div(chosen.chunk, config.rows)
    for first, last in split_columns(p.vocab, chosen.window, chosen.kept):
        splits = choose_vocab_splits(chosen.chunk, last - first, config, clusters)
        tiles = ceil_div(last - first, config.columns)
        given = row_blocks, tiles, splits, config.raster_group, clusters
        total += max(tiles_per_cluster(*given))
    return total


@pytest.mark.parametrize(
    ("name", "mib", "chunk", "most"), [("Llama", 64, 512, 21), ("Llama", 110, 1024, 42)]
)
def test_windows_inside_chunks_end_where_waves_do(
    name: str, mib: int, chunk: int, most: int
) -> None:
    problem = FROZEN_HEADS[name]
    chosen = plan(problem, mib << 20)
    assert chosen.chunk == chunk and chosen.has_windows
    assert waves(problem, chosen) == most
    replanned = planner.replan_for_shard(chosen, problem, window_configs(problem), 0, True)
    assert replanned == chosen
    even = round_up(ceil_div(problem.vocab, problem.vocab // chosen.window), 256)
    assert waves(problem, dataclasses.replace(chosen, window=even, kept=even)) > most + 2


@pytest.mark.parametrize("problem", FROZEN_HEADS.values(), ids=FROZEN_HEADS)
def test_windows_inside_chunks_take_as_many_waves_as_all_columns(problem: Problem) -> None:
    """One more at most: clusters compute two tiles or more, even of a narrow last window."""
    config = Sm90().default(problem.tokens)
    for mib in range(50, 300, 25):
        chosen = plan(problem, mib << 20)
        assert chosen.in_forward and chosen.has_windows
        tiles = ceil_div(problem.vocab, config.columns) * ceil_div(chosen.chunk, config.rows)
        assert 0 <= waves(problem, chosen) - ceil_div(tiles, 66) <= 1, (mib, str(chosen))


@pytest.mark.parametrize("arch", [None, "sm_100a"])
def test_windows_inside_chunks_need_kernels_that_skip_rows(arch: str | None) -> None:
    problem = dataclasses.replace(FROZEN_HEADS["Llama"], arch=arch)
    for mib in (80, 110, 280, 600):
        chosen = plan(problem, mib << 20)
        assert not (chosen.in_forward and chosen.has_windows)


def test_factors_of_exponentials_need_windows() -> None:
    problem = FROZEN_HEADS["Llama"]
    configs, budget = window_configs(problem), 280 << 20
    chosen = make_plan(problem, configs, budget, scalar_upstream=False, scales_exps=True)
    assert chosen.strategy == "windows"
    with_bias = dataclasses.replace(problem, grad_bias=True)
    assert plan(with_bias, budget, scalar_upstream=False).strategy == "windows"


@pytest.mark.parametrize("problem", FROZEN_HEADS.values(), ids=FROZEN_HEADS)
def test_the_least_for_frozen_hidden_states_is_half_of_a_window(
    problem: Problem,
) -> None:
    """Rows of dW are finished one window after the other, and its memory holds no sums.

    Kernels that select rows also hold a copy of the hidden states.
    """
    p = dataclasses.replace(problem, grad_hidden=False, grad_weight=True)
    least = plan(p, 0)
    assert (least.strategy, least.kept, least.aliased > 0) == ("windows", 0, True)
    config = next(config for config in window_configs(p) if config.window == least.window)
    half, memory = config.half(config.window), DwMemory(p.tokens, p.hidden, p.vocab, 256)
    buffer = memory.buffer_columns(least.aliased, half)
    assert half / 2 < buffer <= half
    taken = p.tokens * (buffer + p.hidden) * p.item_bytes
    assert taken <= least.workspace_bytes <= taken + (4 << 20)


def test_float16_keeps_nothing() -> None:
    """Its range is too small for exponentials relative to the target."""
    chosen = plan(dataclasses.replace(LLAMA, dtype="float16"), MAXIMUM)
    assert (chosen.strategy, chosen.kept) == ("windows", 0)


def test_no_gradients_keep_nothing() -> None:
    chosen = plan(dataclasses.replace(LLAMA, grad_hidden=False, grad_weight=False), MAXIMUM)
    assert (chosen.strategy, chosen.kept) == ("windows", 0)
    assert chosen.workspace_bytes < GIB / 4


def test_kept_columns_are_whole_windows_or_all() -> None:
    config = widest_window(LLAMA)
    for budget in range(GIB // 2, 3 * GIB, GIB // 9):
        chosen = plan(LLAMA, budget, scalar_upstream=False)
        aliased, kept = chosen.aliased, chosen.kept
        assert aliased + kept >= LLAMA.vocab or kept % config.window == 0
        assert aliased % config.reference_block == kept % config.reference_block == 0


def test_the_memory_of_dw_is_used_before_exponentials_are_recomputed() -> None:
    """Where N <= D, most exponentials fit there; without a gradient of w, none do."""
    wide = dataclasses.replace(LLAMA, hidden=8192)
    for problem, least in ((LLAMA, 0.4), (wide, 0.8)):
        floor = plan(problem, MINIMUM).workspace_bytes
        plans = [plan(problem, budget) for budget in range(floor, 3 * floor, floor // 9)]
        aliasing = next(chosen for chosen in plans if chosen.aliased)
        assert aliasing.aliased >= least * problem.vocab > aliasing.kept
        assert f"{aliasing.aliased / problem.vocab:.0%} in the memory of dW" in str(aliasing)
        assert plan(problem, MAXIMUM).aliased == 0
        frozen = dataclasses.replace(problem, grad_weight=False)
        assert all(plan(frozen, chosen.workspace_bytes).aliased == 0 for chosen in plans)


def test_only_columns_that_exceed_the_budget_are_aliased() -> None:
    """Each aliased window needs separate GEMMs."""
    window_bytes = widest_window(LLAMA).window * LLAMA.tokens * LLAMA.item_bytes
    aliased = []
    for budget in range(GIB, 5 * GIB // 2, GIB // 8):
        chosen = plan(LLAMA, budget, scalar_upstream=False)
        if chosen.aliased and chosen.aliased + chosen.kept >= LLAMA.vocab:
            assert chosen.workspace_bytes <= budget < chosen.workspace_bytes + window_bytes
            aliased.append(chosen.aliased)
    assert aliased == sorted(aliased, reverse=True) and aliased[0] > aliased[-1]


@pytest.mark.parametrize("tokens", rest_slow([4096, 1, 64, 1024, 2048, 8192, 16384, 32768], 3))
@pytest.mark.parametrize("vocab", rest_slow([128256, 32768, 65536, 262144]))
def test_narrower_windows_save_time_and_memory(tokens: int, vocab: int) -> None:
    problem = dataclasses.replace(LLAMA, tokens=tokens, vocab=vocab, arch="sm_90a")
    configs = window_configs(problem)
    smallest = make_plan(problem, configs[:1], MINIMUM, scalar_upstream=True)
    floor, least = plan(problem, MINIMUM).workspace_bytes, smallest.workspace_bytes
    assert floor <= FLOOR * least
    for budget in range(least, 3 * least, least // 8):
        widest = make_plan(problem, configs[:1], budget, scalar_upstream=True)
        chosen = plan(problem, budget)
        assert chosen.seconds <= widest.seconds and chosen.workspace_bytes <= max(budget, floor)


def test_a_narrower_window_serves_where_a_wider_one_is_too_large() -> None:
    problem = dataclasses.replace(LLAMA, tokens=2048, arch="sm_90a")
    configs = window_configs(problem)
    budget = make_plan(problem, configs[:1], 0, scalar_upstream=True).workspace_bytes - 1
    chosen = plan(problem, budget)
    assert chosen.workspace_bytes <= budget
    assert chosen.window < configs[0].window


def test_aliasing_takes_no_memory_of_its_own() -> None:
    """The scaled hidden states are in the place of those that are selected later."""
    problem = dataclasses.replace(LLAMA, arch="sm_90a")
    for scalar_upstream in (True, False):
        assert plan(problem, 0, scalar_upstream).aliased > 0


@pytest.mark.parametrize(("mib", "most"), [(90, 1.28), (120, 1.26)])
def test_little_memory_keeps_sums_of_dx(mib: int, most: float) -> None:
    """Beside selected hidden states, four bits of each sum, and exponentials of few columns."""
    problem = dataclasses.replace(LLAMA, arch="sm_90a", vocab=131072)
    chosen = plan(problem, mib << 20)
    assert chosen.workspace_bytes <= mib << 20 and products(problem, chosen) <= most
    assert chosen.hidden_bits == 4
    for other in ({"dtype": "float16"}, {"ranks": 2}):
        assert plan(dataclasses.replace(problem, **other), mib << 20).hidden_bits is None


def test_many_windows_keep_more_bits() -> None:
    config = window_configs(dataclasses.replace(LLAMA, arch="sm_90a"))[-1]
    few, many = (dataclasses.replace(LLAMA, tokens=n) for n in (8192, 65536))
    assert (planner.kept_hidden_bits(few, config), planner.kept_hidden_bits(many, config)) == (4, 8)
    assert planner.kept_hidden_bits(dataclasses.replace(few, hidden=4095), config) == 8


@pytest.mark.parametrize("vocab", [1, 7, 8, 1000, 1025, 32001, 50257, 151669])
@pytest.mark.parametrize("device", ["cpu", "cuda", "xpu"])
def test_lookup_is_legal_and_no_wider_than_the_vocabulary(vocab: int, device: str) -> None:
    config = widest_window(dataclasses.replace(CPU, vocab=vocab, device=device))
    assert (
        config.window % config.tile_columns == 0
        and config.tile_columns % config.reference_block == 0
    )
    assert config.reference_block <= vocab + 7


@pytest.mark.parametrize("wrong", [{"window": 100}, {"reference_block": 24}])
def test_illegal_tiles_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"(window|tile_columns): got \d+, expected a multiple"):
        PortableTiles(
            **({"window": 64, "tile_columns": 32, "tile_rows": 32, "reference_block": 16} | wrong)
        )


def test_planner_needs_no_torch() -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "import importlib.util as u; find = u.find_spec\n"
        "u.find_spec = lambda name, *a: None if name == 'torch' else find(name, *a)\n"
        "from cutefce.ops.planning.planner import MINIMUM; print(MINIMUM)"
    )
    root = Path(cutefce.__file__).parents[1]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True)
    assert (done.stdout.strip(), done.returncode) == ("-1", 0), done.stderr


def test_a_plan_in_chunks_prints_them() -> None:
    chosen = plan(LONG, 4 * GIB)
    assert f"chunks of {chosen.chunk} tokens" in str(chosen) and " GiB" not in str(chosen)
    assert "chunks of 0 tokens" in str(dataclasses.replace(chosen, tokens=0))


def test_a_plan_above_its_budget_says_so() -> None:
    assert "no plan takes as little as the workspace of 1.0 MiB" in str(plan(LLAMA, 1 << 20))
    for budget in (MINIMUM, MAXIMUM, GIB):
        assert "no plan" not in str(plan(LLAMA, budget))


def test_a_sampled_plan_above_a_budget_says_what_helps() -> None:
    h, w = torch.empty(8, 16, requires_grad=True), torch.empty(50, 16, requires_grad=True)
    text = str(cutefce.plan(h, w, gradient="sampled", workspace=1))
    assert text.endswith("predicted; fewer samples take less, another workspace does not")
    assert "fewer" not in str(cutefce.plan(h, w, gradient="sampled"))


def test_a_small_plan_is_printed_in_bytes_and_microseconds() -> None:
    tiny = plan(Problem(8, 8, 50, "float32", "cpu"), 1)
    assert tiny.workspace_bytes < 1 << 20 and tiny.seconds < 1e-3
    cost = f"{tiny.workspace_bytes} bytes, {tiny.seconds * 1e6:.1f} µs predicted"
    assert f"50 columns at a time: {cost}" in str(tiny)
    assert str(tiny).endswith("the workspace of 1 bytes")


def test_plans_that_add_to_a_buffer_in_the_forward_have_no_sums() -> None:
    shape, more = (32768, 4096, 131072), {"wide_grad_weight": True, "accumulates": True}
    ours: dict[str, Any] = {"arch": "sm_90a", **more}
    p = CallProblem(*shape, "bfloat16", "cuda", knows_upstream=True, **ours)
    without = dataclasses.replace(p, knows_upstream=False)
    for budget, ratio in ((300 << 20, 1.2), (1 << 30, 1.05)):
        plan, other = (make_plan(x, window_configs(x), budget, True) for x in (p, without))
        assert plan.adds_in_forward and plan.workspace_bytes <= budget
        products = 6 * p.tokens * p.hidden * p.vocab / DEVICE_RATES["cuda"][0]
        assert plan.seconds <= ratio * products < other.seconds
    config = window_configs(p)[0]
    first, second = (chunked_plan(x, config, 1024) for x in (p, without))
    # 24 bits of each of dW's sums, and 4 of dX's beside 16
    saved = 3 * p.vocab * p.hidden + p.tokens * p.hidden // 2
    assert second.workspace_bytes - first.workspace_bytes == saved
