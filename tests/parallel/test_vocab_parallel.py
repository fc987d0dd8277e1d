"""A loss that ranks share equals the loss on one device."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import cutefce
from bench.harness.accuracy import relative_error
from cutefce.ops.interface.options import LossOptions, Sharding
from cutefce.ops.planning.dw_aliasing import DwMemory
from cutefce.ops.planning.planner import Plan
from tests.conftest import SMALL_TILES
from tests.support.ranks import Ranks, group
from tests.support.reference import (
    PLANS,
    Case,
    Result,
    assert_as_accurate,
    logits_case,
    loss_of_plan,
    random_case,
)

SHARDS = {
    "2 ranks": (167, 166),
    "2 ranks, very unequal": (1, 332),
    "3 ranks": (100, 133, 100),
    "4 ranks": (64, 200, 5, 64),
}


Share = tuple[Tensor, Tensor, Tensor]
"""Loss, dX and dW of one rank."""


def part(x: Tensor, sizes: tuple[int, ...]) -> Tensor:
    """Return this rank's rows of x, which is cut into `sizes`."""
    first = sum(sizes[: group(len(sizes)).rank()])
    return x[first : first + sizes[group(len(sizes)).rank()]]


def leaves(case: Case, sizes: tuple[int, ...], sequence_parallel: bool) -> tuple[Tensor, Tensor]:
    """Return this rank's h and w, which require gradients."""
    count = len(sizes)
    h = part(case.h, (len(case.h) // count,) * count) if sequence_parallel else case.h
    return h.clone().requires_grad_(), part(case.w, sizes).clone().requires_grad_()


def options_of(sizes: tuple[int, ...], sequence_parallel: bool) -> dict[str, Any]:
    return {
        "group": group(len(sizes)),
        "shards": sizes,
        "sequence_parallel": sequence_parallel,
    }


def gradients(case: Case, loss: Tensor, h: Tensor, w: Tensor) -> Share:
    dx, dw = torch.autograd.grad(loss, (h, w), case.upstream if loss.ndim else None)
    return loss.detach(), dx, dw


def shared(
    case: Case, sizes: tuple[int, ...], sequence_parallel: bool, options: dict[str, Any]
) -> Share:
    h, w = leaves(case, sizes, sequence_parallel)
    sharing = options_of(sizes, sequence_parallel)
    loss = cutefce.linear_cross_entropy(h, w, case.y, **sharing, **options)
    return gradients(case, loss, h, w)


def planned_share(
    case: Case,
    sizes: tuple[int, ...],
    sequence_parallel: bool,
    strategy: str,
    aliased: int,
    kept: int,
    chunk: int,
) -> Share:
    """Run a given plan; aliased and kept columns are at most what there is room for, and all."""
    h, w = leaves(case, sizes, sequence_parallel)
    piece = min(SMALL_TILES.reference_block, -(-len(w) // 8) * 8)
    memory = DwMemory(len(case.h), w.shape[1], len(w), SMALL_TILES.reference_block)
    aliased = min(aliased, memory.most_aliased(SMALL_TILES.reference_block))
    kept = min(kept, -(-(len(w) - aliased) // piece) * piece)
    reduction = "none" if strategy == "windows" else "sum"
    plan = strategy, SMALL_TILES.window, aliased, kept, chunk
    sharding = Sharding(group(len(sizes)).group_name, list(sizes), sequence_parallel)
    loss = loss_of_plan(h, w, case.y, Plan(*plan, True, True), LossOptions(reduction), sharding)
    return gradients(case, loss, h, w)


def joined(results: list[Share], sequence_parallel: bool) -> Result:
    """Return the whole of what ranks returned, after a look at what must be the same."""
    losses, dxs, dws = zip(*results, strict=True)
    assert all(torch.equal(loss, losses[0]) for loss in losses)
    if not sequence_parallel:
        assert all(torch.equal(dx, dxs[0]) for dx in dxs)
    return Result(losses[0], torch.cat(dxs) if sequence_parallel else dxs[0], torch.cat(dws))


LAYOUTS = {f"tp {name}": (sizes, False) for name, sizes in SHARDS.items()}
LAYOUTS |= {f"sp {name}": (SHARDS[name], True) for name in ("2 ranks", "4 ranks")}
layouts = pytest.mark.parametrize(
    ("sizes", "sequence_parallel"), LAYOUTS.values(), ids=list(LAYOUTS)
)


@layouts
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("workspace", ["max", "min"])
def test_reductions_equal_torch(
    sizes: tuple[int, ...], sequence_parallel: bool, reduction: str, workspace: str, ranks: Ranks
) -> None:
    case = random_case(60, 16, 333, dtype=torch.float64, ignored=0.3)
    options = {"reduction": reduction, "workspace": workspace}
    results = ranks.run(len(sizes), shared, case, sizes, sequence_parallel, options)
    got = joined(results, sequence_parallel)
    h, w = case.h.requires_grad_(), case.w.requires_grad_()
    want = F.cross_entropy(F.linear(h, w), case.y, reduction=reduction)
    torch.testing.assert_close(got.loss, want)
    upstream = case.upstream if want.ndim else None
    torch.testing.assert_close((got.dx, got.dw), torch.autograd.grad(want, (h, w), upstream))


@pytest.mark.parametrize(
    ("layout", "dtype"),
    [*((layout, torch.bfloat16) for layout in LAYOUTS), ("tp 3 ranks", torch.float32)],
    ids=str,
)
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_every_strategy(
    plan: tuple[str, int, int, int], layout: str, dtype: torch.dtype, ranks: Ranks
) -> None:
    sizes, sequence_parallel = LAYOUTS[layout]
    case = random_case(152, 48, 333, dtype=dtype)
    if plan[0] != "windows":
        case.upstream.fill_(1.0)
    results = ranks.run(len(sizes), planned_share, case, sizes, sequence_parallel, *plan)
    names = ("loss", "dx", "dw") if plan[0] == "windows" else ("dx", "dw")
    assert_as_accurate(joined(results, sequence_parallel), case, names)


def times_upstream(case: Case, sizes: tuple[int, ...], sequence_parallel: bool) -> list[Tensor]:
    """Return dX for an upstream gradient of 0.37: everything kept, and formed in the forward."""
    results = []
    for strategy in ("windows", "gradients_in_forward"):
        h, w = leaves(case, sizes, sequence_parallel)
        plan = strategy, SMALL_TILES.window, 0, 336, 80
        sharding = Sharding(group(len(sizes)).group_name, list(sizes), sequence_parallel)
        loss = loss_of_plan(h, w, case.y, Plan(*plan, True, True), LossOptions("sum"), sharding)
        results.append(torch.autograd.grad(loss * 0.37, h)[0])
    return results


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_gradients_in_forward_are_rounded_once(sequence_parallel: bool, ranks: Ranks) -> None:
    # rounded before they are multiplied, they would be off by 1.4 times as much
    case, sizes = random_case(1500, 64, 333, dtype=torch.bfloat16), SHARDS["2 ranks"]
    results = ranks.run(2, times_upstream, case, sizes, sequence_parallel)
    h = case.h.double().requires_grad_()
    loss = cutefce.linear_cross_entropy(h, case.w.double(), case.y, reduction="sum")
    exact = torch.autograd.grad(loss * 0.37, h)[0]
    parts = exact.chunk(2) if sequence_parallel else (exact, exact)
    for (windows, chunks), part_of_exact in zip(results, parts, strict=True):
        error = relative_error(windows, part_of_exact)
        assert relative_error(chunks, part_of_exact) <= 1.05 * error


def frozen_share(
    case: Case, sizes: tuple[int, ...], sequence_parallel: bool, columns: int
) -> Tensor:
    """Return dX of a frozen head's losses of each token, by chunks in windows of `columns`."""
    h, w = leaves(case, sizes, sequence_parallel)
    plan = Plan("gradients_in_forward", SMALL_TILES.window, 0, columns, 40, True, False)
    sharding = Sharding(group(len(sizes)).group_name, list(sizes), sequence_parallel)
    losses = loss_of_plan(h, w.detach(), case.y, plan, LossOptions("none"), sharding)
    return torch.autograd.grad(losses, h, case.upstream)[0]


@layouts
@pytest.mark.parametrize("columns", [336, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_frozen_head_needs_no_scalar_loss(
    sizes: tuple[int, ...], sequence_parallel: bool, dtype: torch.dtype, columns: int, ranks: Ranks
) -> None:
    case = random_case(152, 48, 333, dtype=dtype)
    parts = ranks.run(len(sizes), frozen_share, case, sizes, sequence_parallel, columns)
    got = Result(case.upstream, torch.cat(parts) if sequence_parallel else parts[0], case.w)
    assert_as_accurate(got, case, ("dx",))


def shared_on_gpu(case: Case, *arguments: Any) -> Share:
    on_gpu = (x.cuda() for x in (case.h, case.w, case.y, case.upstream))
    loss, dx, dw = shared(Case(*on_gpu), *arguments)
    return loss.cpu(), dx.cpu(), dw.cpu()


@pytest.mark.gpu
@layouts
@pytest.mark.parametrize(
    ("workspace", "dtype"),
    [
        ("max", torch.bfloat16),
        ("min", torch.bfloat16),
        (1 << 20, torch.bfloat16),
        ("max", torch.float16),
    ],
    ids=str,
)
def test_gpus_share_a_loss(
    sizes: tuple[int, ...],
    sequence_parallel: bool,
    workspace: int | str,
    dtype: torch.dtype,
    gpu_ranks: Ranks,
) -> None:
    if len(sizes) > len(gpu_ranks.pipes):
        pytest.skip(f"needs {len(sizes)} GPUs")
    case = random_case(152, 48, 333, dtype=dtype)
    options = {"reduction": "none", "workspace": workspace}
    results = gpu_ranks.run(len(sizes), shared_on_gpu, case, sizes, sequence_parallel, options)
    assert_as_accurate(joined(results, sequence_parallel), case)


@pytest.mark.parametrize(
    ("logit_std", "dtype"),
    [
        (0.1, torch.float32),
        (40, torch.float32),
        (4, torch.bfloat16),
        (40, torch.bfloat16),
        (4, torch.float16),
    ],
    ids=str,
)
@layouts
def test_logit_scales(
    sizes: tuple[int, ...],
    sequence_parallel: bool,
    logit_std: float,
    dtype: torch.dtype,
    ranks: Ranks,
) -> None:
    case = random_case(152, 48, 333, dtype=dtype, logit_std=logit_std)
    options = {"reduction": "none"}
    results = ranks.run(len(sizes), shared, case, sizes, sequence_parallel, options)
    assert_as_accurate(joined(results, sequence_parallel), case)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("height", [20.0, 60.0, 110.0, 1e30])
@pytest.mark.parametrize(
    ("strategy", "kept"),
    [("windows", 0), ("windows", 32), ("windows", 336), ("gradients_in_forward", 336)],
)
def test_rows_far_above_their_target_on_one_rank(
    strategy: str, kept: int, height: float, dtype: torch.dtype, ranks: Ranks
) -> None:
    """The target's rank, the far logit's rank, and a third must use one reference."""
    torch.manual_seed(1)
    logits, y = torch.randn(40, 97), torch.randint(97, (40,))
    for row in range(0, 40, 2):
        column = (int(y[row]) + 1 + 13 * row) % 97
        logits[row, column if column != y[row] else column - 1] = height
    case, sizes = logits_case(logits.to(dtype), y), (40, 17, 40)
    plan = strategy, 0, kept, 16
    got = joined(ranks.run(3, planned_share, case, sizes, False, *plan), False)
    assert bool(torch.isfinite(got.loss).all() and torch.isfinite(got.dx).all())
    names = ("loss", "dx", "dw") if strategy == "windows" else ("dx", "dw")
    assert_as_accurate(got, case, names, saturated=True)


def compiled_share(
    sizes: tuple[int, ...], sequence_parallel: bool, workspace: int | str, dynamic: bool
) -> list[Share]:
    """Return loss, dX and dW, eager and compiled in turns."""
    sharing = options_of(sizes, sequence_parallel)

    def step(h: Tensor, w: Tensor, y: Tensor) -> Tensor:
        loss: Tensor = cutefce.linear_cross_entropy(h * 2, w, y, workspace=workspace, **sharing) + 1
        return loss

    torch.compiler.reset()
    results = []
    compiled = torch.compile(step, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for tokens in (48, 72, 32):
        case = random_case(tokens, 16, 333)
        for function in (step, compiled):
            h, w = leaves(case, sizes, sequence_parallel)
            results.append(gradients(case, function(h, w, case.y), h, w))
    return results


@pytest.mark.parametrize(
    ("count", "sequence_parallel", "dynamic", "workspace"),
    [
        (2, False, True, "max"),
        (2, False, False, "min"),
        (2, True, True, "min"),
        (2, True, False, "max"),
        (3, False, True, "min"),
    ],
)
def test_compiled_equals_eager(
    count: int, sequence_parallel: bool, dynamic: bool, workspace: str, ranks: Ranks
) -> None:
    sizes = SHARDS[f"{count} ranks"]
    for results in ranks.run(count, compiled_share, sizes, sequence_parallel, workspace, dynamic):
        for eager, compiled in zip(results[::2], results[1::2], strict=True):
            assert all(torch.equal(a, b) for a, b in zip(eager, compiled, strict=True))
