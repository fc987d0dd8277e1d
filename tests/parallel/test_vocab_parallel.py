"""A loss that ranks share equals the loss on one device."""

import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import cutefce
from bench.harness.accuracy import relative_error
from tests.support.layouts import (
    CHUNKS,
    COLUMNS,
    LAYOUTS,
    SMALL_TILES,
    WINDOWS,
    Layout,
    pinned,
    windows_in_chunks,
)
from tests.support.ranks import Ranks, each_value, group
from tests.support.reference import Case, Result, assert_as_accurate, logits_case, random_case
from tests.support.tiers import rest_slow

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


def share_in_layout(
    case: Case, sizes: tuple[int, ...], sequence_parallel: bool, layout: Layout
) -> Share:
    """Run in a layout."""
    h, w = leaves(case, sizes, sequence_parallel)
    sharing = {**options_of(sizes, sequence_parallel), "reduction": layout.reduction}
    with pinned(layout):
        loss = cutefce.linear_cross_entropy(h, w, case.y, **sharing)
        return gradients(case, loss, h, w)


def joined(results: list[Share], sequence_parallel: bool) -> Result:
    """Return the whole of what ranks returned, after a look at what must be the same."""
    losses, dxs, dws = zip(*results, strict=True)
    assert all(torch.equal(loss, losses[0]) for loss in losses)
    if not sequence_parallel:
        assert all(torch.equal(dx, dxs[0]) for dx in dxs)
    return Result(losses[0], torch.cat(dxs) if sequence_parallel else dxs[0], torch.cat(dws))


Sharing = tuple[tuple[int, ...], bool]
"""Rows of the ranks' weights, and whether each has a part of the tokens."""

SHARINGS: dict[str, Sharing] = {f"tp {name}": (sizes, False) for name, sizes in SHARDS.items()}
SHARINGS |= {f"sp {name}": (SHARDS[name], True) for name in ("2 ranks", "4 ranks")}


@each_value(sharing=SHARINGS, reduction=["mean", "sum", "none"], workspace=["max", "min"])
def test_reductions_equal_torch(
    sharing: Sharing, reduction: str, workspace: str, ranks: Ranks
) -> None:
    case = random_case(60, 16, 333, dtype=torch.float64, ignored=0.3)
    options = {"reduction": reduction, "workspace": workspace}
    results = ranks.run(len(sharing[0]), shared, case, *sharing, options)
    got = joined(results, sharing[1])
    h, w = case.h.requires_grad_(), case.w.requires_grad_()
    want = F.cross_entropy(F.linear(h, w), case.y, reduction=reduction)
    torch.testing.assert_close(got.loss, want)
    upstream = case.upstream if want.ndim else None
    torch.testing.assert_close((got.dx, got.dw), torch.autograd.grad(want, (h, w), upstream))


@each_value(layout=LAYOUTS, sharing=SHARINGS, dtype=[torch.bfloat16, torch.float32])
def test_every_layout(layout: Layout, sharing: Sharing, dtype: torch.dtype, ranks: Ranks) -> None:
    case = random_case(152, 48, 333, dtype=dtype)
    if layout.in_chunks:
        case.upstream.fill_(1.0)
    results = ranks.run(len(sharing[0]), share_in_layout, case, *sharing, layout)
    names = ("dx", "dw") if layout.in_chunks else ("loss", "dx", "dw")
    assert_as_accurate(joined(results, sharing[1]), case, names)


def times_upstream(case: Case, sizes: tuple[int, ...], sequence_parallel: bool) -> list[Tensor]:
    """Return dX for an upstream gradient of 0.37: everything kept, and formed in the forward."""
    results = []
    for layout in (WINDOWS["everything kept"], dataclasses.replace(CHUNKS["in chunks"], chunk=80)):
        h, w = leaves(case, sizes, sequence_parallel)
        sharing = options_of(sizes, sequence_parallel)
        with pinned(layout):
            loss = cutefce.linear_cross_entropy(h, w, case.y, reduction="sum", **sharing)
            results.append(torch.autograd.grad(loss * 0.37, h)[0])
    return results


@pytest.mark.parametrize("sequence_parallel", rest_slow([True, False]))
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
    sharing = options_of(sizes, sequence_parallel)
    with pinned(windows_in_chunks(chunk=40, window=columns)):
        losses = cutefce.linear_cross_entropy(h, w.detach(), case.y, reduction="none", **sharing)
        return torch.autograd.grad(losses, h, case.upstream)[0]


@each_value(
    sharing=SHARINGS, dtype=[torch.float32, torch.bfloat16], columns=[COLUMNS, SMALL_TILES.window]
)
def test_a_frozen_head_needs_no_scalar_loss(
    sharing: Sharing, dtype: torch.dtype, columns: int, ranks: Ranks
) -> None:
    case = random_case(152, 48, 333, dtype=dtype)
    parts = ranks.run(len(sharing[0]), frozen_share, case, *sharing, columns)
    got = Result(case.upstream, torch.cat(parts) if sharing[1] else parts[0], case.w)
    assert_as_accurate(got, case, ("dx",))


def shared_on_gpu(case: Case, *arguments: Any) -> Share:
    on_gpu = (x.cuda() for x in (case.h, case.w, case.y, case.upstream))
    loss, dx, dw = shared(Case(*on_gpu), *arguments)
    return loss.cpu(), dx.cpu(), dw.cpu()


@pytest.mark.gpu
@each_value(
    given=[
        ("max", torch.bfloat16),
        ("min", torch.bfloat16),
        (1 << 20, torch.bfloat16),
        ("max", torch.float16),
    ],
    sharing=SHARINGS,
)
def test_gpus_share_a_loss(
    given: tuple[int | str, torch.dtype], sharing: Sharing, gpu_ranks: Ranks
) -> None:
    if len(sharing[0]) > len(gpu_ranks.pipes):
        pytest.skip(f"needs {len(sharing[0])} GPUs")
    workspace, dtype = given
    case = random_case(152, 48, 333, dtype=dtype)
    options = {"reduction": "none", "workspace": workspace}
    results = gpu_ranks.run(len(sharing[0]), shared_on_gpu, case, *sharing, options)
    assert_as_accurate(joined(results, sharing[1]), case)


FAR_LAYOUTS = {
    "nothing kept": Layout(),
    "some kept": Layout(kept=32),
    "everything kept": Layout(kept=COLUMNS),
    "in chunks": Layout(in_chunks=True, kept=COLUMNS, chunk=16),
}


@each_value(
    layout=FAR_LAYOUTS, height=[20.0, 60.0, 110.0, 1e30], dtype=[torch.bfloat16, torch.float32]
)
def test_rows_far_above_their_target_on_one_rank(
    layout: Layout, height: float, dtype: torch.dtype, ranks: Ranks
) -> None:
    """The target's rank, the far logit's rank, and a third must use one reference."""
    torch.manual_seed(1)
    logits, y = torch.randn(40, 97), torch.randint(97, (40,))
    for row in range(0, 40, 2):
        column = (int(y[row]) + 1 + 13 * row) % 97
        logits[row, column if column != y[row] else column - 1] = height
    case, sizes = logits_case(logits.to(dtype), y), (40, 17, 40)
    got = joined(ranks.run(3, share_in_layout, case, sizes, False, layout), False)
    assert bool(torch.isfinite(got.loss).all() and torch.isfinite(got.dx).all())
    names = ("dx", "dw") if layout.in_chunks else ("loss", "dx", "dw")
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


COMPILED = {
    "sp, dynamic": (2, True, True, "min"),
    "tp, dynamic": (2, False, True, "max"),
    "tp": (2, False, False, "min"),
    "sp": (2, True, False, "max"),
    "3 ranks, dynamic": (3, False, True, "min"),
}
"""Ranks, whether they have parts of the tokens, whether shapes are dynamic, and workspaces."""


@pytest.mark.slow
@pytest.mark.parametrize("given", COMPILED.values(), ids=COMPILED)
def test_compiled_equals_eager(given: tuple[int, bool, bool, str], ranks: Ranks) -> None:
    count, sequence_parallel, dynamic, workspace = given
    sizes = SHARDS[f"{count} ranks"]
    for results in ranks.run(count, compiled_share, sizes, sequence_parallel, workspace, dynamic):
        for eager, compiled in zip(results[::2], results[1::2], strict=True):
            assert all(torch.equal(a, b) for a, b in zip(eager, compiled, strict=True))
