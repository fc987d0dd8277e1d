"""HiddenSums, and what they serve: two products for a frozen head in chunks of tokens."""

import dataclasses
import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

import cutefce
from bench.harness.accuracy import relative_error
from bench.harness.reference import unfused
from cutefce.autotune_cache.defaults import window_configs
from cutefce.cute_kernels.arch.sm90 import Sm90
from cutefce.cute_kernels.arch.sm100 import Sm100
from cutefce.cute_kernels.config import PortableTiles
from cutefce.cute_kernels.problem import LOW_BITS, Problem
from cutefce.ops.interface.options import LossOptions
from cutefce.ops.planning.planner import Plan, make_plan
from cutefce.ops.rows.kept_sums import joined_sums
from cutefce.ops.strategies.hidden_sums import HiddenSums
from tests.support.kept_sums import split_sums
from tests.support.kernel_models import serve_calls
from tests.support.options import OPTIONS, PER_TOKEN, options_case
from tests.support.reference import (
    Case,
    fixed_plan,
    logits_case,
    loss_of_plan,
    random_case,
    wide_logits,
)


def kept(values: Tensor, low_bits: int) -> Tensor:
    """Return what is kept of float32 sums (N, D)."""
    upper = torch.empty(values.shape, dtype=torch.bfloat16)
    low = torch.empty(len(values), values.shape[1] * low_bits // 8, dtype=torch.uint8)
    split_sums(upper, low, values)
    return joined_sums(upper, low)


def as_float(bits: list[int]) -> Tensor:
    return torch.tensor(bits, dtype=torch.int64).to(torch.int32).view(torch.float32)[None]


FLOATS = st.integers(-(1 << 31), (1 << 31) - 1)
"""The bits of any float32."""
HALF_WAY = st.builds(
    lambda upper, lower: (upper << 16) + lower,
    st.integers(-(1 << 15), (1 << 15) - 1),
    st.integers(0x7F00, 0x8100),
)
"""Those of numbers near the middle between two bfloat16."""


@pytest.mark.parametrize("low_bits", LOW_BITS)
@given(bits=st.lists(FLOATS | HALF_WAY, min_size=1, max_size=64))
@example(bits=[0x17F80, 0x3F807F80, 0x7F7FFFFF, 0x3F808080])
def test_what_is_kept_of_any_sum(low_bits: int, bits: list[int]) -> None:
    """Rounding what is kept gives the rounded sum, unless that is nearly half-way to another."""
    values, half_unit = as_float(bits + bits[: len(bits) % 2]), 1 << 15 - low_bits
    got = kept(values, low_bits)
    assert torch.equal(got.isnan(), values.isnan())
    assert torch.equal(got.to(torch.bfloat16).isnan(), values.isnan())
    numbers = ~values.isnan()
    got, values = got[numbers], values[numbers]
    halves, rounded = got.to(torch.bfloat16), values.to(torch.bfloat16)
    assert not (values.isinf() & ~got.isinf()).any() and not (got.isinf() & ~rounded.isinf()).any()
    assert torch.equal(got.signbit(), values.signbit())
    beyond_half = (values.view(torch.int32) & 0xFFFF) - 0x8000
    apart = (halves.view(torch.int16).int() - rounded.view(torch.int16).int()).abs()
    assert (apart <= (beyond_half.abs() <= half_unit)).all()
    normal = got.isfinite() & (values.abs() >= torch.finfo(torch.float32).tiny)
    got, values = got[normal].double(), values[normal].double()
    assert ((got - values).abs() <= values.abs() * 2.0 ** -(8 + low_bits)).all()


@pytest.mark.parametrize("low_bits", LOW_BITS)
def test_no_bias_is_in_what_is_kept(low_bits: int) -> None:
    values = torch.rand(1000, 100) + 1
    errors = (kept(values, low_bits).double() - values.double()) / values.double()
    spread = float(errors.std()) / math.sqrt(errors.numel())
    assert abs(float(errors.mean())) < 5 * spread


def test_sums_in_the_dtype_of_the_gradient_are_the_gradient() -> None:
    gradient = torch.empty(5, 8)
    sums = HiddenSums.empty(gradient, torch.float32)
    assert not sums.low.numel()
    assert sums.room(slice(1, 3), torch.float32).data_ptr() == gradient[1:].data_ptr()


# a frozen head, a frozen model


def gradient(
    case: Case, upstream: Tensor, trained: str, plan: Plan | None, **options: Any
) -> tuple[Tensor, Tensor]:
    """Return the gradient of a frozen head's h, or of w for frozen h, and that of float64."""
    h, w = case.h.clone().requires_grad_(trained == "h"), case.w.clone()
    w.requires_grad_(trained == "w")
    reduction = "sum" if upstream.ndim == 0 else "none"
    if plan is None:
        loss = cutefce.linear_cross_entropy(h, w, case.y, reduction=reduction, **options)
    else:
        loss = loss_of_plan(h, w, case.y, plan, LossOptions(reduction))
    (got,) = torch.autograd.grad(loss, h if trained == "h" else w, upstream.to(loss.dtype))
    wide_h, wide_w = (x.detach().double() for x in (h, w))
    leaf = (wide_h if trained == "h" else wide_w).requires_grad_()
    exact = unfused(wide_h, wide_w, case.y, reduction=reduction)
    return got, torch.autograd.grad(exact, leaf, upstream.double())[0]


def assert_close(case: Case, got: Tensor, exact: Tensor, upstream: Tensor, trained: str) -> None:
    """Assert that the error is at most the project's factor of that of float32 logits."""
    if case.h.dtype != torch.bfloat16:
        assert relative_error(got, exact) < 100 * torch.finfo(case.h.dtype).eps
        return
    rows = upstream.expand(len(case.y)).float()
    wide = wide_logits(Case(case.h, case.w, case.y, rows))
    other = wide.dx if trained == "h" else wide.dw
    assert relative_error(got, exact) <= 1.35 * relative_error(other, exact)


BUDGETS: tuple[int | str | None, ...] = ("min", 1 << 20, 3 << 20, 5 << 20, None, "max")
UPSTREAMS = {"one": torch.ones(()), "0.37": torch.tensor(0.37), "each token's": None}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("upstream", UPSTREAMS.values(), ids=UPSTREAMS)
@pytest.mark.parametrize("trained", ["h", "w"])
def test_one_gradient_at_every_budget(
    trained: str, upstream: Tensor | None, dtype: torch.dtype, device: str
) -> None:
    case = random_case(700, 64, 2500, dtype=dtype, device=device)
    upstream = case.upstream if upstream is None else upstream.to(device)
    for workspace in BUDGETS:
        got, exact = gradient(case, upstream, trained, None, workspace=workspace)
        assert_close(case, got, exact, upstream, trained)


@pytest.fixture(params=list(itertools.product([Sm90(), Sm100()], [False, True])), ids=str)
def on_kernels(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, small_tiles: PortableTiles
) -> None:
    """Route calls on a CPU to models of an architecture's kernels."""
    pytest.importorskip("cutlass")
    arch, selects = request.param
    serve_calls(monkeypatch, arch, small_tiles, selects=selects)


@pytest.mark.parametrize("upstream", UPSTREAMS.values(), ids=UPSTREAMS)
@pytest.mark.parametrize("chunk", [40, 150])
def test_a_frozen_head_on_the_kernels(
    chunk: int, upstream: Tensor | None, on_kernels: None
) -> None:
    case = random_case(150, 48, 333, dtype=torch.bfloat16)
    upstream = case.upstream if upstream is None else upstream
    plan = Plan("gradients_in_forward", 64, 0, 336, chunk, True, False)
    got, exact = gradient(case, upstream, "h", plan)
    assert_close(case, got, exact, upstream, "h")


@pytest.mark.parametrize("height", [20.0, 60.0, 1e4])
def test_far_rows_of_a_chunk_are_repaired(height: float, on_kernels: None) -> None:
    torch.manual_seed(1)
    logits, y = torch.randn(40, 333), torch.randint(333, (40,))
    for row in range(0, 40, 3):
        logits[row, (int(y[row]) + 1 + 13 * row) % 333] = height
    case = logits_case(logits.bfloat16(), y)
    plan = Plan("gradients_in_forward", 64, 0, 336, 16, True, False)
    got, exact = gradient(case, case.upstream, "h", plan)
    assert relative_error(got, exact) < 2.0**-8


# log-probabilities of a frozen head


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_outputs_of_chunks_are_those_of_windows(
    dtype: torch.dtype, small_tiles: PortableTiles, device: str
) -> None:
    case = random_case(150, 48, 333, dtype=dtype, device=device)
    names = "lse", "sum_p_squared", "mean_logit", "is_top1", "argmax"
    results = []
    for strategy, chunk in (("windows", 150), ("gradients_in_forward", 40)):
        h = case.h.clone().requires_grad_()
        with fixed_plan(Plan(strategy, small_tiles.window, 0, 336, chunk, True, False)):
            got = cutefce.linear_log_probs(h, case.w, case.y, outputs=names)
        assert got.lse is not None
        loss = (got.log_probs * case.upstream + got.lse * case.upstream.flip(0)).sum()
        results.append((*(x.detach() for x in got if x is not None), *torch.autograd.grad(loss, h)))
    *windows, dx = results[0]
    *chunks, other = results[1]
    for a, b in zip(windows, chunks, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    assert relative_error(other, dx) < 4 * torch.finfo(dtype).eps


def test_entropys_gradient_has_no_chunks() -> None:
    """Its factors of exponentials are those of the backward."""
    case = random_case(1500, 64, 3000, dtype=torch.float32)
    h = case.h.requires_grad_()
    got = cutefce.linear_log_probs(h, case.w, case.y, outputs=("entropy",), workspace="min")
    assert got.entropy is not None
    dx = torch.autograd.grad(got.entropy.sum(), h)[0]
    wide = h.detach().double().requires_grad_()
    log_p = (wide @ case.w.double().t()).log_softmax(1)[case.y >= 0]
    exact = torch.autograd.grad(-(log_p.exp() * log_p).sum(), wide)[0]
    assert relative_error(dx, exact) < 1e-5


# windows inside chunks


def chunked(chunk: int, columns: int, widest: int | None = None) -> Plan:
    sizes = columns, 0, widest or columns, chunk
    return Plan("gradients_in_forward", *sizes, True, False, vocab=333)


@pytest.mark.parametrize("upstream", UPSTREAMS.values(), ids=UPSTREAMS)
@pytest.mark.parametrize(
    ("chunk", "widths"),
    [(40, (64, 64)), (150, (128, 128)), (64, (304, 304)), (64, (72, 80)), (40, (72, 128))],
    ids=str,
)
def test_windows_inside_chunks(
    chunk: int, widths: tuple[int, int], upstream: Tensor | None, on_kernels: None
) -> None:
    case = random_case(150, 48, 333, dtype=torch.bfloat16)
    upstream = case.upstream if upstream is None else upstream
    got, exact = gradient(case, upstream, "h", chunked(chunk, *widths))
    assert_close(case, got, exact, upstream, "h")
    whole, _ = gradient(case, upstream, "h", chunked(chunk, 336))
    assert relative_error(got, whole) < 2.0**-12


HIGH = {
    "in the first window": lambda rows: rows % 60,
    "in the last window": lambda rows: 320 + rows % 13,
    "in any window": lambda rows: rows * 37 % 333,
}


@pytest.mark.parametrize("height", [20.0, 60.0, 200.0])
@pytest.mark.parametrize("every", [1, 7, 39], ids=["all rows", "some rows", "one row"])
@pytest.mark.parametrize("place", HIGH.values(), ids=HIGH)
def test_far_rows_of_windows_are_computed_again(
    place: Any, every: int, height: float, on_kernels: None
) -> None:
    """Their first sums overflow, those of other chunks stay."""
    torch.manual_seed(1)
    logits, y = torch.randn(40, 333), torch.randint(333, (40,))
    rows = torch.arange(1, 40, every)
    high = place(rows)
    y[rows] = torch.where(y[rows] == high, (high + 1) % 333, y[rows])
    logits[rows, high] = height
    y[::5] = -100
    case = logits_case(logits.bfloat16(), y)
    _, exact = gradient(case, case.upstream, "h", chunked(16, 64))
    case.h[::5] = torch.nan  # of rows that do not count
    for widths in ((64, 64), (72, 128)):
        got, _ = gradient(case, case.upstream, "h", chunked(16, *widths))
        assert not got[::5].any()
        assert relative_error(got, exact) < 2.0**-8


def test_bad_logits_stay_visible_in_their_rows(on_kernels: None) -> None:
    """As without windows."""
    case = random_case(150, 48, 333, dtype=torch.bfloat16)
    for row, value in ((3, torch.nan), (60, torch.inf), (100, -torch.inf)):
        case.h[row, 5], case.y[row] = value, 7
    got, _ = gradient(case, case.upstream, "h", chunked(64, 128))
    whole, _ = gradient(case, case.upstream, "h", chunked(64, 336))
    bad = torch.zeros(150, dtype=torch.bool)
    bad[[3, 60, 100]] = True
    assert got[bad].isnan().all() and whole[bad].isnan().all()
    assert relative_error(got[~bad], whole[~bad]) < 2.0**-12


def test_equal_bits_from_a_second_backward(on_kernels: None) -> None:
    case = random_case(150, 48, 333, dtype=torch.bfloat16)
    case.h[10] *= 100
    h = case.h.requires_grad_()
    loss = loss_of_plan(h, case.w, case.y, chunked(64, 128), LossOptions("sum"))
    first, second = (torch.autograd.grad(loss, h, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)


@pytest.mark.parametrize("name", OPTIONS)
def test_options_of_windows_inside_chunks(name: str, on_kernels: None) -> None:
    x = options_case([name], 150, 48, 333, dtype=torch.bfloat16, ignored=0.3)
    options: dict[str, Any] = {"reduction": "none" if name in PER_TOKEN else "mean"}
    options |= x.options
    results = []
    for columns in (128, 336):
        h = x.case.h.detach().requires_grad_()
        with fixed_plan(chunked(64, columns)):
            loss = cutefce.linear_cross_entropy(h, x.case.w, x.case.y, **options)
        results.append(torch.autograd.grad(loss, h, torch.ones_like(loss))[0])
    assert relative_error(*results) < 2.0**-12


def test_outputs_of_windows_inside_chunks(on_kernels: None) -> None:
    case = random_case(150, 48, 333, dtype=torch.bfloat16)
    case.h[20] *= 100  # a far row
    names = "lse", "sum_p_squared", "mean_logit", "is_top1", "argmax"
    results = []
    for columns in (128, 336):
        h = case.h.clone().requires_grad_()
        with fixed_plan(chunked(64, columns)):
            got = cutefce.linear_log_probs(h, case.w, case.y, outputs=names)
        assert got.lse is not None
        loss = (got.log_probs * case.upstream + got.lse * case.upstream.flip(0)).sum()
        results.append((*(x.detach() for x in got if x is not None), *torch.autograd.grad(loss, h)))
    for a, b in zip(*(result[:-1] for result in results), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    assert relative_error(results[0][-1], results[1][-1]) < 2.0**-9


# dX rounded for an upstream gradient of 1


def rounded_step(
    x: Any, plan: Plan, upstream: float, **options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    h, w = (t.detach().clone().requires_grad_() for t in (x.h, x.w))
    with fixed_plan(plan):
        loss = cutefce.linear_cross_entropy(h, w, x.y, **options)
    dx, dw = torch.autograd.grad(loss, (h, w), torch.tensor(upstream, dtype=loss.dtype))
    return dx, dw


def rounding_plan(bits: int | None) -> Plan:
    return Plan("gradients_in_forward", 64, 0, 336, 64, True, True, hidden_bits=bits)


@pytest.mark.parametrize("name", [name for name in OPTIONS if name not in PER_TOKEN])
def test_a_rounded_dx_is_dx(name: str, on_kernels: None) -> None:
    """For a power of 2; another upstream gradient rounds it once more."""
    x = options_case([name], 150, 48, 333, dtype=torch.bfloat16, ignored=0.3)
    x.case.h[x.case.y == -100] = torch.nan
    for upstream, allowed in ((1.0, 2.0**-10), (-4.0, 2.0**-10), (0.37, 2.0**-8)):
        dx, dw = rounded_step(x.case, rounding_plan(None), upstream, **x.options)
        got, same = rounded_step(x.case, rounding_plan(0), upstream, **x.options)
        assert torch.equal(dw, same) and not got[x.case.y == -100].any()
        assert relative_error(got, dx) <= allowed


@pytest.mark.parametrize("upstream", [torch.inf, torch.nan, 0.0])
def test_ignored_rows_of_a_rounded_dx_are_0(upstream: float, on_kernels: None) -> None:
    case = random_case(150, 48, 333, dtype=torch.bfloat16)
    got, _ = rounded_step(case, rounding_plan(0), upstream)
    ignored = case.y == -100
    assert ignored.any() and not got[ignored].any()
    assert got[~ignored].isfinite().all() == (upstream == 0)


def test_a_rounded_dx_takes_no_memory_beside() -> None:
    problem = Problem(32768, 4096, 131072, "bfloat16", "cuda", arch="sm_90a")
    exact, rounds = (
        make_plan(
            dataclasses.replace(problem, random_sums=random), window_configs(problem), n, True
        )
        for random, n in ((False, 4 << 30), (True, 256 << 20))
    )
    assert (exact.in_forward, exact.hidden_bits) == (True, None)
    assert (rounds.in_forward, rounds.hidden_bits, rounds.chunk >= 768) == (True, 0, True)
