"""One setting gives the calls of every integration their gradients and their budget."""

import importlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from cutefce.integrations import options
from cutefce.integrations.options import set_options
from tests.support.backends import KERNELS
from tests.support.fused_calls import fused_calls
from tests.support.layouts import SMALL_TILES

SAMPLED: dict[str, Any] = {"gradient": "sampled", "samples": 32, "workspace": 1 << 20}


@pytest.fixture(autouse=True)
def setting(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(options, "_chosen", {})
    yield


def test_the_setting_is_checked_and_kept() -> None:
    assert options.loss_options() == options.workspace_options() == {}
    set_options(workspace="min")
    assert options.loss_options() == {"gradient": "exact", "samples": 256, "workspace": "min"}
    set_options(gradient="sampled", samples=32, workspace=1 << 20)
    wrong: dict[str, Any]
    for wrong in ({"gradient": "some"}, {"samples": 2}, {"workspace": "least"}, {"workspace": -1}):
        with pytest.raises(ValueError, match=f"^{next(iter(wrong))}: got"):
            set_options(**wrong)
    for wrong in ({"samples": "many"}, {"workspace": 0.5}):
        with pytest.raises(TypeError, match=f"^{next(iter(wrong))}: got"):
            set_options(**wrong)
    with pytest.raises(TypeError, match=r"^sample: got 32 .*did you mean `samples`"):
        set_options(sample=32)
    with pytest.raises(TypeError, match=r"^accum_dtype: got 'bfloat16' .*expected no such argum"):
        set_options(accum_dtype="bfloat16")
    assert options.loss_options() == SAMPLED
    assert options.workspace_options() == {"workspace": 1 << 20}
    set_options(gradient="exact")
    assert options.loss_options() == SAMPLED | {"gradient": "exact"}
    set_options(workspace=None)
    assert options.loss_options() == {"gradient": "exact", "samples": 32, "workspace": None}


def of_trl(h: Tensor, w: Tensor, y: Tensor) -> Tensor:
    log_probs: Tensor = module("trl").log_probs(h, w, None, y, 1.0, 64, own=pytest.fail)[0]
    return log_probs


def of_liger(h: Tensor, w: Tensor, y: Tensor) -> Tensor:
    loss: Tensor = module("liger").fused_linear_cross_entropy(h, w, y, reduction="none")
    return loss


def of_ligers_jsd(h: Tensor, w: Tensor, y: Tensor) -> Tensor:
    given = h, w, h, w, y, None, None, 1.0, 0.0
    loss: Tensor = module("liger").fused_linear_jsd(*given)
    return loss


def of_axolotls_kd(h: Tensor, w: Tensor, y: Tensor) -> Tensor:
    top = torch.zeros(len(h), 1, 1)
    given = h[:, None], w, y[:, None, None], top, top + 1, y[:, None], None, 0.0, 1.0
    options = {"normalize_topk": False}
    loss: Tensor = module("axolotl_kd").fused_linear_topk_kl(*given, **options)
    return loss


def of_prime_rl(h: Tensor, w: Tensor, y: Tensor) -> Tensor:
    head = SimpleNamespace(weight=w)
    found = module("prime_rl").forward(head, h[None], y[None], torch.ones(1, len(y)))
    log_probs: Tensor = found["logprobs"]
    return log_probs


def test_calls_of_soft_targets_have_the_setting() -> None:
    """Although their gradients are exact."""
    set_options(**SAMPLED)
    with fused_calls(module("axolotl_kd")) as calls:
        of_axolotls_kd(torch.randn(5, 8), torch.randn(60, 8), torch.randint(60, (5,)))
    assert SAMPLED.items() <= calls[0].items()


def module(name: str) -> Any:
    return importlib.import_module(f"cutefce.integrations.{name}")


@pytest.mark.parametrize(
    "integration",
    [of_trl, of_liger, of_ligers_jsd, of_prime_rl],
)
def test_gradients_are_sampled(integration: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice with one seed the same, with another one or exact ones not; the values are exact."""
    KERNELS["kernels of sm_90a"].serve(monkeypatch, SMALL_TILES)
    torch.manual_seed(0)
    h, y = torch.randn(50, 8).bfloat16(), torch.randint(600, (50,))
    w = torch.randn(600, 8).bfloat16().requires_grad_()

    def run(seed: int) -> tuple[Tensor, Tensor]:
        torch.manual_seed(seed)
        value = integration(h, w, y).sum()
        return value.detach(), torch.autograd.grad(value, w)[0]

    exact = run(1)
    set_options(**SAMPLED)
    sampled, again, other = run(1), run(1), run(2)
    torch.testing.assert_close(sampled[0], exact[0], rtol=1e-6, atol=0)
    assert torch.equal(sampled[1], again[1])
    assert not torch.equal(sampled[1], exact[1]) and not torch.equal(sampled[1], other[1])
