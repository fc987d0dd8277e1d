"""The operator as torch sees it: options, layouts, autograd, compilation, autocast."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo.testing
import torch.nn.functional as F
from torch import Tensor

import cutefce
from tests.support.reference import (
    ours,
    random_case,
)
from tests.support.tiers import rest_slow


def leaves(case: Any) -> tuple[Tensor, Tensor]:
    return case.h.detach().requires_grad_(), case.w.detach().requires_grad_()


@pytest.mark.parametrize("lead", [(), (7,), (2, 5), (2, 1, 4)])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8])
def test_leading_shapes_and_integer_targets(
    lead: tuple[int, ...], dtype: torch.dtype, device: str
) -> None:
    h = torch.randn(*lead, 8, dtype=torch.float64, device=device)
    w = torch.randn(30, 8, dtype=torch.float64, device=device)
    y = torch.randint(30, lead, device=device)
    got = cutefce.linear_cross_entropy(h, w, y.to(dtype), reduction="none")
    want = F.cross_entropy(F.linear(h, w).reshape(-1, 30), y.reshape(-1), reduction="none")
    torch.testing.assert_close(got, want.reshape(lead))


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.t().contiguous().t(),
    "wide pitch": lambda x: F.pad(x, (0, 3))[:, : x.shape[1]],
    "every second column": lambda x: x.repeat_interleave(2, 1)[:, ::2],
    "one row, expanded": lambda x: x[:1].expand_as(x),
    "one column, expanded": lambda x: x[:, :1].expand_as(x),
}


@pytest.mark.parametrize("workspace", rest_slow(["min", "max"]))
@pytest.mark.parametrize(
    ("h_layout", "w_layout"),
    [
        pair
        for pair in itertools.product(LAYOUTS, LAYOUTS)
        if "contiguous" in pair or len({*pair}) == 1
    ],
)
def test_layouts(h_layout: str, w_layout: str, workspace: str, device: str) -> None:
    case = random_case(40, 16, 100, dtype=torch.float64, device=device)
    h = LAYOUTS[h_layout](case.h).detach().requires_grad_()
    w = LAYOUTS[w_layout](case.w).detach().requires_grad_()
    y = case.y.repeat_interleave(2)[::2]
    for _ in range(2):
        got = cutefce.linear_cross_entropy(h, w, y, workspace=workspace)
        want = F.cross_entropy(F.linear(h, w), y)
        torch.testing.assert_close(
            torch.autograd.grad(got, (h, w)), torch.autograd.grad(want, (h, w))
        )


@pytest.mark.parametrize(
    "upstream",
    [
        lambda n: torch.zeros(n),
        lambda n: torch.full((n,), -2.5),
        lambda n: torch.randn(n),
        lambda n: torch.randn(()).expand(n),
        lambda n: torch.randn(2 * n)[::2],
        lambda n: torch.randn(n, n)[:, 1],
    ],
    ids=["zero", "negative", "per token", "expanded", "strided", "a column"],
)
@pytest.mark.parametrize("workspace", ["max", "min"])
def test_upstream_gradients(upstream: Any, workspace: str, device: str) -> None:
    case = random_case(40, 16, 100, dtype=torch.float64, device=device)
    h, w = leaves(case)
    g = upstream(40).double().to(device)
    got = cutefce.linear_cross_entropy(h, w, case.y, reduction="none", workspace=workspace)
    want = F.cross_entropy(F.linear(h, w), case.y, reduction="none")
    torch.testing.assert_close(
        torch.autograd.grad(got, (h, w), g), torch.autograd.grad(want, (h, w), g)
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_casts_as_linear_does(dtype: torch.dtype, device: str) -> None:
    case = random_case(50, 16, 333, device=device)
    h, w = leaves(case)
    with torch.autocast(device, dtype=dtype):
        loss = torch.ops.cutefce.loss(h, w, case.y)
    cast = cutefce.linear_cross_entropy(h.to(dtype), w.to(dtype), case.y)
    assert torch.equal(loss, cast) and loss.dtype == torch.float32
    for a, b in zip(
        torch.autograd.grad(loss, (h, w)), torch.autograd.grad(cast, (h, w)), strict=True
    ):
        assert torch.equal(a, b) and a.dtype == torch.float32
    with torch.autocast(device, dtype=dtype):
        assert ours_dtype(h.double(), w.double(), case.y) == torch.float64


def ours_dtype(h: Tensor, w: Tensor, y: Tensor) -> torch.dtype:
    return cutefce.linear_cross_entropy(h, w, y).dtype


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("ignored", [0.0, 0.2])
def test_the_loss_can_be_changed_in_place(ignored: float, reduction: str, device: str) -> None:
    case = random_case(10, 8, 30, dtype=torch.bfloat16, device=device, ignored=ignored)
    h, w = leaves(case)
    loss = cutefce.linear_cross_entropy(h, w, case.y, reduction=reduction)
    scaled = torch.autograd.grad((loss / 4).sum(), (h, w), retain_graph=True)
    changed = torch.autograd.grad(loss.div_(4).sum(), (h, w))
    assert all(torch.equal(a, b) for a, b in zip(scaled, changed, strict=True))


@pytest.mark.gpu
def test_out_of_range_targets_are_nan_on_a_gpu() -> None:
    case = random_case(20, 8, 100, device="cuda", ignored=0)
    case.y[4], case.y[7] = 100, -7
    got = ours(case)
    bad = torch.zeros(20, dtype=torch.bool, device="cuda")
    bad[[4, 7]] = True
    assert bool(got.loss.isnan().eq(bad).all()) and bool(got.dx[bad].isnan().all())
    assert bool(torch.isfinite(got.dx[~bad]).all()) and bool(got.dw.isnan().any())
