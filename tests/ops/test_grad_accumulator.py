"""GradAccumulator: float32 sums in a gradient's memory, and their rounding."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import cutefce
from bench.harness.accuracy import relative_error
from cutefce.ops.interface.options import LossOptions
from cutefce.ops.planning.planner import Plan
from cutefce.ops.primitives.portable_gradients import scale_rows
from cutefce.ops.strategies.grad_accumulator import GradAccumulator
from tests.support.reference import loss_of_plan, random_case


def some_sums(rows: int, dtype: torch.dtype) -> tuple[GradAccumulator, torch.Tensor]:
    wide = torch.promote_types(dtype, torch.float32)
    sums = GradAccumulator.empty(torch.empty(rows, 8, dtype=dtype), wide)
    values = torch.randn(rows, 8, dtype=wide)
    for place, part in sums.parts():
        part.copy_(values[place])
    return sums, values


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@given(rows=st.one_of(st.integers(0, 600), st.integers(500, 5000)))
def test_each_sum_is_scaled_and_rounded_once(dtype: torch.dtype, rows: int) -> None:
    sums, values = some_sums(rows, dtype)
    expected = (values * 0.37).to(dtype)
    got = sums.finish(scale_rows, torch.tensor(0.37))
    assert torch.equal(got, expected)
    assert got.data_ptr() == sums.gradient.data_ptr()


@given(rows=st.integers(0, 3000))
def test_rows_are_where_they_were_put(rows: int) -> None:
    sums, values = some_sums(rows, torch.bfloat16)
    parts = list(sums.parts())
    assert [i for place, _ in parts for i in range(place.start, place.stop)] == [*range(rows)]
    assert all(torch.equal(part, values[place]) for place, part in parts)


@pytest.mark.parametrize("upstream", [1.0, 0.37])
def test_gradients_in_forward_are_rounded_once(upstream: float, device: str) -> None:
    # rounded before they are multiplied, they would be off by 1.4 times as much
    case = random_case(1500, 64, 3000, dtype=torch.bfloat16, device=device)
    leaves = case.h.requires_grad_(), case.w.requires_grad_()
    errors = []
    for plan in (("windows", 4096, 0, 3072, 1500), ("gradients_in_forward", 4096, 0, 3072, 400)):
        loss = loss_of_plan(*leaves, case.y, Plan(*plan, True, True), LossOptions("sum"))
        got = torch.autograd.grad(loss * upstream, leaves)
        h, w = wide = [x.detach().double().requires_grad_() for x in leaves]
        exact = torch.autograd.grad(
            cutefce.linear_cross_entropy(h, w, case.y, reduction="sum") * upstream, wide
        )
        errors.append([relative_error(a, b) for a, b in zip(got, exact, strict=True)])
    for windows, chunks in zip(*errors, strict=True):
        assert chunks <= 1.05 * windows
