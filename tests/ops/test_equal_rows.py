"""Outputs that a row alone decides: equal rows have equal bits, whatever their targets are."""

from typing import Any

import pytest
import torch
from torch import Tensor

import cutefce
from cutefce.cute_kernels.arch import ARCHS
from cutefce.cute_kernels.arch.base import Arch
from cutefce.cute_kernels.config import PortableTiles
from cutefce.ops.planning.planner import Plan
from tests.support.kernel_models import serve_calls
from tests.support.options import OptionsCase, model_logits, options_case, row_values
from tests.support.reference import PLANS, fixed_plan, logits_case

OUTPUTS = "lse", "entropy", "sum_p_squared"
OPTIONS: dict[str, list[str]] = {
    "plain": [],
    "linear_bias": ["linear_bias"],
    "logit_scale": ["logit_scale"],
    "negative logit_scale": ["negative logit_scale"],
    "temperature": ["temperature"],
    "temperature ()": ["temperature ()"],
    "temperature (N,)": ["temperature (N,)"],
    "softcap": ["softcap"],
    "all": ["linear_bias", "logit_scale", "temperature (N,)", "softcap"],
}
each_option = pytest.mark.parametrize("names", OPTIONS.values(), ids=list(OPTIONS))


def equal_rows(names: list[str], *sizes: int, **more: Any) -> tuple[OptionsCase, Tensor]:
    """Return a case, and which of its rows (N,) are equal and count: about a half, in all places.

    Products of its integers are exact, so that their bits do not depend on a row's place.  A fifth
    of the targets are the largest logit, a seventh the smallest.
    """
    x = options_case(names, *sizes, **more)
    h, w, y = x.case.h, x.case.w, x.case.y
    for operand, size in ((h, 2), (w, 3)):
        operand.copy_(torch.randint(-size, size + 1, operand.shape))
    rows = torch.randperm(len(y)) < max(16, len(y) // 2)
    h[rows] = h[rows][0]
    divisor = x.options.get("temperature")
    if isinstance(divisor, Tensor) and divisor.ndim:
        divisor[rows] = divisor[rows][0]
    u = model_logits(h.double() @ w.double().t(), **x.options)
    ignored = y == -100
    y[::5], y[::7] = u.argmax(1)[::5], u.argmin(1)[::7]
    y[ignored] = -100
    return x, rows.to(y.device) & ~ignored


def assert_equal_bits(
    x: OptionsCase, rows: Tensor, outputs: tuple[str, ...] = OUTPUTS, **more: Any
) -> None:
    """Assert that the outputs of `rows` are equal, and right."""
    if "target_indices" not in more:
        more["target"] = x.case.y
        assert len({*x.case.y[rows].tolist()}) > 4
    h, w = (leaf.requires_grad_() for leaf in x.leaves[:2])
    found = cutefce.linear_log_probs(h, w, outputs=outputs, **x.options, **more)
    u = model_logits(x.case.h.double() @ x.case.w.double().t(), **x.options)
    truth = row_values(u, x.case.y)
    for name in outputs:
        values = getattr(found, name).detach()[rows]
        assert len({*values.tolist()}) == 1, name
        torch.testing.assert_close(values.double(), getattr(truth, name)[rows], rtol=1e-5, atol=0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@each_option
def test_rows_of_other_targets(names: list[str], dtype: torch.dtype, device: str) -> None:
    for sizes in ((64, 24, 1030), (700, 8, 333)):
        x, rows = equal_rows(names, *sizes, dtype=dtype, device=device)
        for workspace in ("max", "min", None):
            assert_equal_bits(x, rows, workspace=workspace)


@pytest.mark.parametrize("outputs", [("entropy",), ("sum_p_squared",), (*OUTPUTS, "argmax")])
def test_some_of_the_outputs(outputs: tuple[str, ...], device: str) -> None:
    x, rows = equal_rows([], 300, 24, 777, dtype=torch.bfloat16, device=device)
    found = tuple(name for name in outputs if name != "argmax")
    more = cutefce.linear_log_probs(x.case.h, x.case.w, x.case.y, outputs=outputs)
    for name in found:
        assert len({*getattr(more, name)[rows].tolist()}) == 1
    assert_equal_bits(x, rows, found)


@pytest.mark.parametrize("plan", [*PLANS.values()], ids=list(PLANS))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_plan(
    dtype: torch.dtype, plan: tuple[str, int, int, int], small_tiles: PortableTiles, device: str
) -> None:
    """Chunks of tokens, of which the last is shorter, are those of a frozen weight."""
    in_chunks = plan[0] != "windows"
    outputs = ("lse", "sum_p_squared") if in_chunks else OUTPUTS
    made = Plan(plan[0], small_tiles.window, *plan[1:], True, not in_chunks, False)
    x, rows = equal_rows(["temperature (N,)"], 150, 48, 333, dtype=dtype, device=device)
    with fixed_plan(made):
        assert_equal_bits(x, rows, outputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@each_option
def test_rows_of_several_classes(names: list[str], dtype: torch.dtype, device: str) -> None:
    x, rows = equal_rows(names, 64, 24, 333, dtype=dtype, device=device)
    index = torch.randint(333, (64, 3), device=device)
    index[:, 0] = x.case.y
    assert_equal_bits(x, rows, target_indices=index)


@pytest.mark.parametrize("selects", [False, True], ids=["all rows", "selected rows"])
@pytest.mark.parametrize("arch", [ARCHS[0], ARCHS[1]], ids=lambda arch: arch.name)
@each_option
def test_the_kernels_host_code(
    names: list[str],
    arch: Arch,
    selects: bool,
    small_tiles: PortableTiles,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    serve_calls(monkeypatch, arch, small_tiles, selects=selects)
    x, rows = equal_rows(names, 150, 48, 333, dtype=torch.bfloat16, ignored=0.3)
    index = torch.randint(333, (150, 3))
    index[:, 0] = x.case.y
    for workspace in ("max", "min", 200_000):
        assert_equal_bits(x, rows, workspace=workspace)
        assert_equal_bits(x, rows, workspace=workspace, target_indices=index)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("height", [3.0, 16.0, 40.0, 80.0, 1e4])
@pytest.mark.parametrize("kernels", [False, True], ids=["portable", "kernels"])
def test_an_entropy_near_0_keeps_its_digits(
    kernels: bool,
    height: float,
    dtype: torch.dtype,
    small_tiles: PortableTiles,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where one probability is almost 1, for the target of it and for all others."""
    if kernels:
        serve_calls(monkeypatch, ARCHS[0], small_tiles, selects=False)
    logits = torch.zeros(96, 96)
    logits[:, 7], logits[:, 50:52] = height, torch.tensor([-2.0, height - 9])
    case = logits_case(logits.to(dtype), torch.arange(96))
    found = cutefce.linear_log_probs(case.h, case.w, case.y, outputs=("entropy",))
    assert found.entropy is not None
    assert len({*found.entropy.tolist()}) == 1
    log_p = case.h.double().log_softmax(1)
    exact = -(log_p.exp() * log_p).sum(1)
    torch.testing.assert_close(found.entropy.double(), exact, rtol=1e-5, atol=0)
    torch.testing.assert_close(found.log_probs.double(), log_p.diagonal(), rtol=1e-5, atol=0)


@pytest.mark.parametrize("kernels", [False, True], ids=["portable", "kernels"])
def test_targets_of_probability_0(
    kernels: bool, small_tiles: PortableTiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values are finite beside a log-probability of -inf; those of a row without any are NaN."""
    if kernels:
        serve_calls(monkeypatch, ARCHS[0], small_tiles, selects=False)
    logits = torch.randn(1, 96).repeat(96, 1).bfloat16()
    case = logits_case(logits, torch.arange(96))
    bias = torch.where(torch.arange(96) % 3 == 0, -torch.inf, 0.0)
    found = cutefce.linear_log_probs(
        case.h, case.w, case.y, outputs=("entropy", "sum_p_squared"), linear_bias=bias
    )
    log_p = (logits.double() + bias).log_softmax(1)
    terms = torch.where(log_p == -torch.inf, 0, log_p.exp() * log_p)
    for values, want in ((found.entropy, -terms.sum(1)), (found.sum_p_squared, log_p.exp() ** 2)):
        assert values is not None and len({*values.tolist()}) == 1
        exact = want if want.ndim == 1 else want.sum(1)
        torch.testing.assert_close(values.double(), exact, rtol=1e-5, atol=0)
    assert bool((found.log_probs[::3] == -torch.inf).all())
    none = torch.full((96,), -torch.inf)
    found = cutefce.linear_log_probs(
        case.h, case.w, case.y, outputs=("entropy", "sum_p_squared"), linear_bias=none
    )
    for values in (found.entropy, found.sum_p_squared):
        assert values is not None and bool(values.isnan().all())


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_row_that_is_not_finite_stays_alone(value: float, small_tiles: PortableTiles) -> None:
    x, rows = equal_rows([], 150, 48, 333)
    row = int(rows.nonzero()[5, 0])
    x.case.h[row, 5], rows[row] = value, False
    found = cutefce.linear_log_probs(x.case.h, x.case.w, x.case.y, outputs=OUTPUTS)
    assert found.entropy is not None and bool(found.entropy[row].isnan())
    for name in OUTPUTS:
        assert len({*getattr(found, name)[rows].tolist()}) == 1
