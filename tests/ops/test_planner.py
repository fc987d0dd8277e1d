"""The planner: choices, monotonicity, and independence of torch."""

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import cutefce
from cutefce.autotune_cache.defaults import widest_window, window_configs
from cutefce.cute_kernels.config import PortableTiles
from cutefce.cute_kernels.problem import Problem
from cutefce.ops.interface.checks import workspace_bytes
from cutefce.ops.planning.planner import FLOOR, MAXIMUM, MINIMUM, Plan, make_plan

GIB = 1 << 30
LLAMA = Problem(tokens=8192, hidden=4096, vocab=128256, dtype="bfloat16", device="cuda")
LONG = dataclasses.replace(LLAMA, tokens=32768)
CPU = Problem(tokens=2048, hidden=1024, vocab=50257, dtype="float32", device="cpu")


def plan(problem: Problem, budget: int, scalar_upstream: bool = True) -> Plan:
    return make_plan(problem, window_configs(problem), budget, scalar_upstream)


def test_the_ends_of_the_budget() -> None:
    everything, nothing = plan(LLAMA, MAXIMUM), plan(LLAMA, MINIMUM)
    assert (everything.strategy, nothing.strategy) == ("windows", "windows")
    assert everything.kept >= LLAMA.vocab and nothing.kept == 0
    assert nothing.workspace_bytes < everything.workspace_bytes / 4


def test_default_budget_keeps_everything_of_a_usual_step() -> None:
    assert plan(LLAMA, workspace_bytes(None)).kept >= LLAMA.vocab


def test_long_batches_put_gradients_in_the_forward() -> None:
    """Where exponentials of all tokens do not fit, dW's sums and those of a chunk may."""
    chosen = plan(LONG, 4 * GIB)
    assert chosen.strategy == "gradients_in_forward" and 256 <= chosen.chunk < LONG.tokens
    assert plan(LONG, 4 * GIB, scalar_upstream=False).strategy == "windows"


@pytest.mark.parametrize(
    "problem",
    [LLAMA, LONG, CPU, *(dataclasses.replace(p, arch="sm_90a") for p in (LLAMA, LONG))],
    ids=["Llama", "long", "CPU", "Llama on kernels", "long on kernels"],
)
@pytest.mark.parametrize("scalar_upstream", [True, False])
def test_time_falls_and_memory_stays_within_a_growing_budget(
    problem: Problem, scalar_upstream: bool
) -> None:
    floor = plan(problem, MINIMUM, scalar_upstream).workspace_bytes
    plans = [
        (budget, plan(problem, budget, scalar_upstream))
        for budget in range(floor, 40 * floor, floor // 7)
    ]
    for budget, chosen in plans:
        assert chosen.workspace_bytes <= budget
    seconds = [chosen.seconds for _, chosen in plans]
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[-1] < seconds[0]


def test_the_plan_of_a_call_can_be_read() -> None:
    h, w = torch.randn(4, 500, 64, requires_grad=True), torch.randn(16001, 64, requires_grad=True)
    everything = cutefce.plan(h, w, reduction="none", workspace="max")
    nothing = cutefce.plan(h, w, reduction="none", workspace="min")
    assert "windows, 100% kept" in str(everything)
    assert "windows, 0% kept" in str(nothing)
    assert nothing.workspace_bytes < everything.workspace_bytes
    assert f"{nothing.workspace_bytes / 2**20:.1f} MiB" in str(nothing)
    with pytest.raises(ValueError, match="w: got shape"):
        cutefce.plan(h, w[0])


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
        assert aliased % config.window == 0 and kept % config.reference_block == 0


def test_the_memory_of_dw_is_used_before_exponentials_are_recomputed() -> None:
    """Where N <= D, most exponentials fit there; without a gradient of w, none do."""
    wide = dataclasses.replace(LLAMA, hidden=8192)
    for problem, least in ((LLAMA, 0.4), (wide, 0.8)):
        floor = plan(problem, MINIMUM).workspace_bytes
        plans = [plan(problem, budget) for budget in range(floor, 3 * floor, floor // 9)]
        aliasing = next(chosen for chosen in plans if chosen.aliased)
        assert aliasing.aliased >= least * problem.vocab and aliasing.kept == 0
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


@pytest.mark.parametrize("tokens", [1, 64, 1024, 2048, 4096, 8192, 16384, 32768])
@pytest.mark.parametrize("vocab", [32768, 65536, 128256, 262144])
def test_narrower_windows_save_time_and_memory(tokens: int, vocab: int) -> None:
    problem = dataclasses.replace(LLAMA, tokens=tokens, vocab=vocab, arch="sm_90a")
    configs = window_configs(problem)
    smallest = make_plan(problem, configs[:1], MINIMUM, scalar_upstream=True)
    assert plan(problem, MINIMUM).workspace_bytes <= FLOOR * smallest.workspace_bytes
    savings = []
    for budget in range(smallest.workspace_bytes, 3 * smallest.workspace_bytes, 4 << 20):
        widest = make_plan(problem, configs[:1], budget, scalar_upstream=True)
        chosen = plan(problem, budget)
        assert chosen.seconds <= widest.seconds and chosen.workspace_bytes <= budget
        savings.append(1 - chosen.seconds / widest.seconds)
    if 1024 <= tokens <= 2048 and vocab <= 65536:  # more of them have room where dW will be
        assert max(savings) > 0.05


def test_a_narrower_window_serves_where_a_wider_one_is_too_large() -> None:
    problem = dataclasses.replace(LLAMA, tokens=2048, arch="sm_90a")
    configs = window_configs(problem)
    budget = make_plan(problem, configs[:1], MINIMUM, scalar_upstream=True).workspace_bytes - 1
    chosen = plan(problem, budget)
    assert chosen.workspace_bytes <= budget
    assert chosen.window < configs[0].window


def test_nothing_is_aliased_where_that_alone_takes_too_much() -> None:
    """What dW's place keeps needs s_i h_i, another N·D."""
    problem = dataclasses.replace(LLAMA, arch="sm_90a")
    smallest, larger = (plan(problem, budget) for budget in (MINIMUM, 192 << 20))
    assert smallest.aliased == smallest.kept == larger.kept == 0 < larger.aliased
    assert smallest.workspace_bytes < larger.workspace_bytes
    assert larger.seconds < smallest.seconds


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
    assert (done.stdout.strip(), done.returncode) == ("0", 0), done.stderr


def test_a_plan_survives_packing_and_prints() -> None:
    plan = Plan("gradients_in_forward", 64, 0, 336, 40, True, False, 333, 1 << 20, 0.5)
    (packed,) = plan.pack()
    restored = Plan.from_arguments(packed)
    assert restored.pack() == plan.pack()
    assert restored.in_forward and (restored.grad_hidden, restored.grad_weight) == (True, False)
    assert "chunks of 40 tokens" in str(plan) and "chunks of 40 tokens" in str(restored)
