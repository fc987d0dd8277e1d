"""Rows that do not count: neither computed nor seen, by the portable path and the host code."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

import cutefce
from cutefce.cute_kernels.config import PortableTiles
from cutefce.ops.operators import operands
from cutefce.ops.primitives import dispatch
from tests.support.backends import KERNELS
from tests.support.layouts import LAYOUTS, pinned
from tests.support.reference import Case, random_case
from tests.support.tiers import pairwise

TOKENS = 150


def masked(case: Case, kept: float) -> tuple[Case, Tensor]:
    """Return the case with some targets ignored, and which tokens count."""
    counts = torch.rand(len(case.y)) < kept
    y = torch.where(counts, case.y.clamp(min=0), -100)
    return dataclasses.replace(case, y=y), counts


def step(case: Case, upstream: Tensor | None = None, **arguments: Any) -> tuple[Tensor, ...]:
    """Return the loss, dX and dW."""
    h, w = case.h.clone().requires_grad_(), case.w.clone().requires_grad_()
    loss = cutefce.linear_cross_entropy(h, w, case.y, **arguments)
    grads = torch.autograd.grad(loss, (h, w), upstream)
    return loss.detach(), *grads


def compacted(case: Case, counts: Tensor) -> Case:
    """Return the case of the rows that count alone."""
    return Case(case.h[counts], case.w, case.y[counts], case.upstream[counts])


def test_a_cpu_multiplies_only_rows_that_count(monkeypatch: pytest.MonkeyPatch) -> None:
    case, counts = masked(random_case(TOKENS, 48, 333, dtype=torch.bfloat16), 0.2)
    sizes = []
    prepare = dispatch.primitives_for

    def record(h: Tensor, *others: Any) -> Any:
        sizes.append(len(h))
        return prepare(h, *others)

    monkeypatch.setattr(operands, "primitives_for", record)
    step(case)
    with torch.no_grad():
        cutefce.linear_cross_entropy(case.h, case.w, case.y)
    assert len(sizes) >= 2
    assert set(sizes) == {int(counts.sum())}


@pairwise(
    sizes=[(TOKENS, 48, 333), (1500, 128, 96)],
    kept=[0.99, 0.8, 0.5, 0.1],
    bad=[torch.nan, torch.inf],
    workspace=["min", None, "max"],
)
def test_what_ignored_rows_hold_does_not_matter(
    sizes: tuple[int, int, int], kept: float, bad: float, workspace: str | None
) -> None:
    """Even where all rows would be computed, for lack of memory for copies."""
    case, counts = masked(random_case(*sizes, dtype=torch.bfloat16), kept)
    want = step(compacted(case, counts), workspace=workspace)
    case.h[~counts] = bad
    loss, dx, dw = step(case, workspace=workspace)
    torch.testing.assert_close(loss, want[0])
    torch.testing.assert_close(dx[counts], want[1])
    assert not dx[~counts].any()
    torch.testing.assert_close(dw, want[2])


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32], ids=str)
def test_narrow_targets_are_counted_as_wide_ones(dtype: torch.dtype) -> None:
    """156 as uint8 is no -100; an ignore_index may be out of a dtype's range."""
    case = random_case(TOKENS, 48, 200, ignored=0)
    case.y[::3] = 156
    narrow = dataclasses.replace(case, y=case.y.to(dtype))
    out_of_range: dict[str, Any] = {"ignore_index": 65541, "token_weights": torch.ones(TOKENS)}
    for arguments in ({}, out_of_range):
        for a, b in zip(step(narrow, **arguments), step(case, **arguments), strict=True):
            assert torch.equal(a, b)


# The host code of the kernels, on models of these


@pairwise(rows=[0, 1, 40, 41, 100, 120, 121, TOKENS], smoothing=[0.0, 0.25])
def test_targets_are_added_once_wherever_the_last_token_counts(
    rows: int, smoothing: float, monkeypatch: pytest.MonkeyPatch, small_tiles: PortableTiles
) -> None:
    """With any number of empty chunks behind it, dW is that of a call of these tokens."""
    KERNELS["kernels of sm_90a"].serve(monkeypatch, small_tiles)
    case = random_case(TOKENS, 48, 333, dtype=torch.bfloat16)
    options: dict[str, Any] = {"reduction": "sum", "label_smoothing": smoothing}
    y = case.y.clamp(min=0)

    def gradient(counted: int, given: int) -> torch.Tensor:
        h, w = case.h[:given].clone().requires_grad_(), case.w.clone().requires_grad_()
        target = y[:given].masked_fill(torch.arange(given) >= counted, -100)
        h.data[counted:] = torch.nan
        with pinned(LAYOUTS["in chunks"]):
            cutefce.linear_cross_entropy(h, w, target, **options).backward()
        assert w.grad is not None
        return w.grad

    found = gradient(rows, TOKENS)
    assert bool(found.any()) == (rows > 0)
    # but for the order in which the models' matrix products add
    torch.testing.assert_close(found, gradient(rows, max(rows, 1)), rtol=2**-7, atol=2**-9)
