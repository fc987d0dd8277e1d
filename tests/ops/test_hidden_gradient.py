"""dX's sums over windows in 20 and 24 bits, and stored exponentials before recomputed ones."""

from typing import Any

import pytest
import torch

import cutefce
from bench.harness.timing import peak_bytes
from cutefce.autotune_cache.defaults import widest_window
from cutefce.cute_kernels.arch.sm90 import Sm90
from cutefce.cute_kernels.arch.sm100 import Sm100
from cutefce.cute_kernels.config import PortableTiles
from cutefce.cute_kernels.problem import LOW_BITS, Problem
from cutefce.ops.interface.options import LossOptions
from cutefce.ops.planning.memory_model import windows_bytes
from cutefce.ops.planning.planner import Plan
from cutefce.ops.primitives.portable_gradients import PortableGradients
from cutefce.ops.rows.kept_sums import joined_sums
from tests.support.kept_sums import split_sums
from tests.support.kernel_models import serve_calls
from tests.support.options import OPTIONS, PER_TOKEN, options_case
from tests.support.reference import (
    Case,
    assert_as_accurate,
    evaluate,
    fixed_plan,
    loss_of_plan,
    random_case,
)

COLUMNS = {
    "nothing stored": (0, 0),
    "some kept": (0, 64),
    "some aliased": (64, 0),
    "some aliased, some kept": (64, 128),
    "all stored": (64, 272),
}
"""Aliased and kept columns of 333."""


PLACES = "portable", "Hopper", "Hopper, all rows", "Blackwell"


@pytest.fixture(params=[None, (Sm90(), True), (Sm90(), False), (Sm100(), True)], ids=PLACES)
def anywhere(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, small_tiles: PortableTiles
) -> int:
    """Serve calls by the portable path, or by models of kernels; return the width of windows."""
    if request.param is not None:
        pytest.importorskip("cutlass")
        arch, selects = request.param
        serve_calls(monkeypatch, arch, small_tiles, selects=selects)
    return small_tiles.window


def plan_of(window: int, columns: tuple[int, int], bits: int | None) -> Plan:
    return Plan("windows", window, *columns, 150, True, True, hidden_bits=bits)


@pytest.mark.parametrize("bits", [None, *LOW_BITS])
@pytest.mark.parametrize("columns", COLUMNS.values(), ids=COLUMNS)
def test_gradients_are_as_accurate_as_unfused(
    columns: tuple[int, int], bits: int | None, anywhere: int
) -> None:
    case = random_case(150, 48, 333, dtype=torch.bfloat16)
    case, scalar = (Case(case.h, case.w, case.y, torch.full(n, -0.37)) for n in ((150,), ()))
    plan = plan_of(anywhere, columns, bits)
    got = evaluate(scalar, lambda h, w: loss_of_plan(h, w, case.y, plan, LossOptions("sum")))
    assert_as_accurate(got, case, ("dx", "dw"))


@pytest.mark.parametrize("name", OPTIONS)
def test_options(name: str, anywhere: int) -> None:
    """What is kept differs from float32 by less than the rounding of dX."""
    bits = LOW_BITS[0]
    x = options_case([name], 150, 48, 333, dtype=torch.bfloat16, ignored=0.3)
    options: dict[str, Any] = {"reduction": "none" if name in PER_TOKEN else "mean"}
    options |= x.options
    results = []
    for kept in (None, bits):
        h, w = (t.detach().clone().requires_grad_() for t in (x.case.h, x.case.w))
        with fixed_plan(plan_of(anywhere, (64, 128), kept)):
            loss = cutefce.linear_cross_entropy(h, w, x.case.y, **options)
        results.append(torch.autograd.grad(loss, (h, w), torch.ones_like(loss)))
    (dx, dw), (got, same) = results
    assert torch.equal(dw, same)
    apart = (got.double() - dx.double()).norm() / dx.double().norm()
    assert apart <= 2.0 ** -(8 + bits / 2)


@pytest.mark.parametrize("bits", [None, 4])
@pytest.mark.parametrize("columns", [(64, 0), (64, 128)])
def test_equal_bits_from_a_second_backward(
    columns: tuple[int, int], bits: int | None, anywhere: int
) -> None:
    case = random_case(150, 48, 333, dtype=torch.bfloat16)
    h, w = case.h.requires_grad_(), case.w.requires_grad_()
    loss = loss_of_plan(h, w, case.y, plan_of(anywhere, columns, bits), LossOptions())
    first, second = (torch.autograd.grad(loss, (h, w), retain_graph=True) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_bad_values_stay_in_their_rows(anywhere: int) -> None:
    case = random_case(150, 48, 333, dtype=torch.bfloat16)
    for row, value in ((3, torch.nan), (60, torch.inf), (100, torch.nan)):
        case.h[row, 5], case.y[row] = value, 7
    case.y[100] = -100
    h, w = case.h.requires_grad_(), case.w.requires_grad_()
    loss = loss_of_plan(h, w, case.y, plan_of(anywhere, (64, 64), 4), LossOptions("sum"))
    (dx,) = torch.autograd.grad(loss, h)
    bad = dx.isnan().any(1).nonzero()[:, 0].tolist()
    assert bad == [3, 60] and not dx[100].any()


@pytest.mark.parametrize("low_bits", LOW_BITS)
def test_each_window_errs_by_half_a_unit(low_bits: int) -> None:
    """Also where rows are scaled in between."""
    torch.manual_seed(0)
    gradients, scale = PortableGradients(64), torch.rand(1100)
    kept = torch.empty(1100, 24).bfloat16()
    low = torch.empty(1100, 24 * low_bits // 8, dtype=torch.uint8)
    want, allowed = torch.zeros(1100, 24).double(), torch.zeros(1100, 24).double()
    for window in range(20):
        e, w = torch.rand(1100, 40).bfloat16(), torch.randn(40, 24).bfloat16()
        gradients.keep_dx(kept, low, e, w, accumulate=window > 0)
        want += e.double() @ w.double()
        allowed += 2.0 ** -(8 + low_bits) * want.abs() + 1e-6 * (e.double() @ w.double().abs())
        if window == 9:
            gradients.scale_kept_rows(kept, low, scale)
            want *= scale[:, None]
            allowed = allowed * scale[:, None] + 2.0 ** -(8 + low_bits) * want.abs()
    errors = (joined_sums(kept, low).double() - want).abs()
    assert (errors <= 1.01 * allowed).all() and (errors > 0.1 * allowed).any()


@pytest.mark.parametrize("windows", [1, 8, 32])
def test_20_bits_suffice_for_32_windows(windows: int) -> None:
    """The error of dX is at most 1.05 of that of its rounding."""
    torch.manual_seed(0)
    parts = torch.randn(windows, 200, 500)
    exact, kept = parts.double().sum(0), torch.zeros(200, 500).bfloat16()
    low = torch.zeros(200, 250, dtype=torch.uint8)
    for part in parts:
        split_sums(kept, low, joined_sums(kept, low) + part)
    rounding = (exact.to(torch.bfloat16).double() - exact).norm()
    assert (joined_sums(kept, low).bfloat16().double() - exact).norm() <= 1.05 * rounding


@pytest.mark.parametrize(
    ("bits", "columns"), [(4, (8192, 4096)), (8, (0, 0)), (8, (8192, 0))], ids=str
)
def test_the_peak_is_predicted(bits: int, columns: tuple[int, int]) -> None:
    """Of so many tokens that blocks of rows are small beside them."""
    tokens, hidden, vocab = 8192, 128, 16001
    case = random_case(tokens, hidden, vocab, dtype=torch.bfloat16, ignored=0)
    h, w = case.h.requires_grad_(), case.w.requires_grad_()
    problem = Problem(tokens, hidden, vocab, "bfloat16", "cpu")
    config = widest_window(problem)
    aliased, kept = 0, sum(columns)
    predicted = windows_bytes(problem, config, aliased, kept, True, bits)
    plan = Plan("windows", config.window, aliased, kept, tokens, True, True, hidden_bits=bits)

    def step() -> None:
        torch.autograd.grad(loss_of_plan(h, w, case.y, plan, LossOptions()), (h, w))

    step()
    measured = peak_bytes(step, "cpu") - problem.gradient_bytes
    assert abs(predicted - measured) <= 0.05 * measured
