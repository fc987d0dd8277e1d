"""Outputs that a row alone decides: equal rows have equal bits, whatever their targets are."""

from typing import Any

import torch
from torch import Tensor

import cutefce
from tests.support.backends import Backend, on_backends
from tests.support.layouts import LAYOUTS, Layout, pinned
from tests.support.options import OptionsCase, model_logits, options_case
from tests.support.outputs import row_values
from tests.support.reference import logits_case
from tests.support.tiers import pairwise

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
    x: OptionsCase,
    rows: Tensor,
    outputs: tuple[str, ...] = OUTPUTS,
    frozen: bool = False,
    **more: Any,
) -> None:
    """Assert that the outputs of `rows` are equal, and right."""
    if "target_indices" not in more:
        more["target"] = x.case.y
        assert len({*x.case.y[rows].tolist()}) > 4
    h, w = x.leaves[:2]
    w.requires_grad_(not frozen)
    found = cutefce.linear_log_probs(h, w, outputs=outputs, **x.options, **more)
    u = model_logits(x.case.h.double() @ x.case.w.double().t(), **x.options)
    truth = row_values(u, x.case.y)
    for name in outputs:
        values = getattr(found, name).detach()[rows]
        assert len({*values.tolist()}) == 1, name
        torch.testing.assert_close(values.double(), getattr(truth, name)[rows], rtol=1e-5, atol=0)


@pairwise(
    names=OPTIONS,
    dtype=[torch.float64, torch.float32, torch.bfloat16],
    sizes=[(64, 24, 1030), (700, 8, 333)],
    workspace=["max", "min", None],
)
def test_rows_of_other_targets(
    names: list[str],
    dtype: torch.dtype,
    sizes: tuple[int, int, int],
    workspace: str | None,
    device: str,
) -> None:
    x, rows = equal_rows(names, *sizes, dtype=dtype, device=device)
    assert_equal_bits(x, rows, workspace=workspace)


@on_backends(few_backends=True, float32=True, layout=LAYOUTS)
def test_every_layout(layout: Layout, backend: Backend) -> None:
    """Chunks of tokens, of which the last is shorter, are those of a frozen weight."""
    outputs = ("lse", "sum_p_squared") if layout.in_chunks else OUTPUTS
    how: dict[str, Any] = {"dtype": backend.dtype, "device": backend.device}
    x, rows = equal_rows(["temperature (N,)"], 150, 48, 333, **how)
    with pinned(layout):
        assert_equal_bits(x, rows, outputs, frozen=layout.in_chunks)


@on_backends(names=OPTIONS, workspace=["max", "min", 200_000], classes=[1, 3])
def test_the_kernels_host_code(
    names: list[str], workspace: int | str, classes: int, backend: Backend
) -> None:
    how: dict[str, Any] = {"dtype": backend.dtype, "device": backend.device}
    x, rows = equal_rows(names, 150, 48, 333, ignored=0.3, **how)
    given: dict[str, Any] = {"workspace": workspace}
    if classes > 1:
        given["target_indices"] = torch.randint(333, (150, classes), device=backend.device)
        given["target_indices"][:, 0] = x.case.y
    assert_equal_bits(x, rows, **given)


@on_backends(few_backends=True, float32=True, height=[3.0, 16.0, 40.0, 80.0, 1e4])
def test_an_entropy_near_0_keeps_its_digits(height: float, backend: Backend) -> None:
    """Where one probability is almost 1, for the target of it and for all others."""
    logits = torch.zeros(96, 96)
    logits[:, 7], logits[:, 50:52] = height, torch.tensor([-2.0, height - 9])
    case = logits_case(logits.to(backend.dtype), torch.arange(96), backend.device)
    found = cutefce.linear_log_probs(case.h, case.w, case.y, outputs=("entropy",))
    assert found.entropy is not None
    assert len({*found.entropy.tolist()}) == 1
    log_p = case.h.double().log_softmax(1)
    exact = -(log_p.exp() * log_p).sum(1)
    torch.testing.assert_close(found.entropy.double(), exact, rtol=1e-5, atol=0)
    torch.testing.assert_close(found.log_probs.double(), log_p.diagonal(), rtol=1e-5, atol=0)


def test_targets_of_probability_0(backend: Backend) -> None:
    """Values are finite beside a log-probability of -inf; those of a row without any are NaN."""
    logits = torch.randn(1, 96).repeat(96, 1).bfloat16().to(backend.device)
    case = logits_case(logits, torch.arange(96), backend.device)
    bias = torch.where(torch.arange(96) % 3 == 0, -torch.inf, 0.0).to(backend.device)
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
    none = torch.full((96,), -torch.inf, device=backend.device)
    found = cutefce.linear_log_probs(
        case.h, case.w, case.y, outputs=("entropy", "sum_p_squared"), linear_bias=none
    )
    for values in (found.entropy, found.sum_p_squared):
        assert values is not None and bool(values.isnan().all())
