"""Axolotl's plugin manager calls our plugin, which defers the model."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

pytest.importorskip("axolotl.integrations.base")
pytest.importorskip("transformers")

from axolotl.integrations.base import PluginManager
from axolotl.utils.dict import DictDefault

import cutefce
from cutefce.integrations import axolotl
from cutefce.integrations import options as setting
from tests.support.deferral import assert_same, own_step, tiny_llama

NAME = "cutefce.integrations.axolotl.CutefcePlugin"


@pytest.fixture
def manager() -> Iterator[Any]:
    PluginManager._instance = None
    manager = PluginManager.get_instance()
    manager.register(NAME)
    assert list(manager.plugins) == [NAME]
    yield manager
    PluginManager._instance = None


def test_the_manager_defers_the_model(manager: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    deferred: list[tuple[object, dict[str, Any]]] = []
    monkeypatch.setattr(cutefce, "defer", lambda *x, **options: deferred.append((x, options)))
    monkeypatch.setattr(setting, "_chosen", {})
    model = tiny_llama()
    assert manager.get_input_args() == ["cutefce.integrations.axolotl.CutefceArgs"]
    manager.post_model_build(DictDefault({}), model)
    other = {"gradient": "sampled", "samples": 64, "workspace": "min"}
    keys = {f"cutefce_{name}": x for name, x in other.items()}
    manager.post_model_build(DictDefault(keys), model)
    plain = {"gradient": "exact", "samples": 256, "workspace": None}
    assert deferred == [((model,), plain), ((model,), other)]
    assert setting.loss_options() == other


@pytest.mark.parametrize("key", axolotl.OTHERS)
def test_another_fused_loss_is_refused(
    manager: Any, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    deferred: list[object] = []
    monkeypatch.setattr(cutefce, "defer", deferred.append, raising=False)
    with pytest.raises(ValueError, match=rf"^{key}: got True, expected none beside CutefcePlugin"):
        manager.post_model_build(DictDefault({key: True}), torch.nn.Module())
    assert not deferred


def test_a_deferred_model_has_the_same_loss_and_gradients(manager: Any) -> None:
    loss, theirs = own_step(tiny_llama())
    model = tiny_llama()
    manager.post_model_build(DictDefault({}), model)
    ours, mine = own_step(model)
    torch.testing.assert_close(ours, loss, rtol=1e-5, atol=0)
    assert_same(mine, theirs)
    assert cutefce.deferral_report(model).fused == 1


KD_OPTIONS: list[dict[str, Any]] = [
    {"weight_hard_loss": 0.0, "weight_soft_loss": 1.0, "compute_ce_loss": False},
    {"weight_hard_loss": 0.3, "weight_soft_loss": 0.7, "temperature": 2.0},
    {"weight_hard_loss": 1.0, "weight_soft_loss": 0.0},
]


@pytest.fixture
def kd(manager: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the module of the loss of the `kd` plugin, whose function is put back."""
    module = pytest.importorskip("axolotl.integrations.kd.kernels.liger")
    function = module.LigerFusedLinearKLTopKLogprobFunction
    monkeypatch.setattr(function, "apply", function.apply)
    return module


def stored_top_k(classes: int = 90, count: int = 5) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return ids, log-probabilities and mask (2, 7, K) of a teacher, and labels (2, 7)."""
    values, ids = torch.randn(2, 7, classes).log_softmax(-1).topk(count)
    mask = torch.rand(2, 7, count) < 0.8
    mask[0, :3] = False  # a prompt
    labels = torch.randint(classes, (2, 7))
    labels[0, :3] = -100
    return ids, values.masked_fill(~mask, -torch.inf), mask.long(), labels


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", KD_OPTIONS)
def test_kd_is_as_accurate_as_that_of_axolotl(
    options: dict[str, Any],
    dtype: torch.dtype,
    manager: Any,
    kd: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its value has the square of the temperature, and its gradient has not."""
    torch.manual_seed(0)
    hidden, weight, bias = torch.randn(2, 7, 16), torch.randn(90, 16), torch.randn(90)
    ids, log_q, mask, labels = stored_top_k()

    def run(function: Any, kind: torch.dtype = dtype) -> list[Tensor]:
        h, w, b = (x.to(dtype).to(kind).requires_grad_() for x in (hidden, weight, bias))
        loss = function(w, h, ids, log_q.clamp(min=-1e4), mask, labels, b)
        return [loss.detach(), *torch.autograd.grad(2 * loss, (h, w, b))]

    def exact(w: Any, h: Any, ids: Any, log_q: Any, mask: Any, y: Any, b: Any) -> Tensor:
        heat = options.get("temperature", 1.0)
        logits = F.linear(h, w, b)
        log_p = (logits / heat).log_softmax(-1).gather(-1, ids)
        soft = (mask * log_q.double().exp() * (log_q - log_p)).sum()
        y = F.pad(y, (0, 1), value=-100)[:, 1:].flatten()
        hard = F.cross_entropy(logits.flatten(0, 1), y, reduction="sum")
        soft = soft + (heat**2 - 1) * soft.detach()
        loss: Tensor = options["weight_soft_loss"] * soft + options["weight_hard_loss"] * hard
        return loss

    given: dict[str, Any] = {"beta": 0.0, "compiled": False, "normalize_topk": None}
    module = kd.LigerFusedLinearKLTopKLogprobLoss(**given, **options)
    best, own = run(exact, torch.float64), run(module)
    monkeypatch.setattr(
        kd.LigerFusedLinearKLTopKLogprobFunction, "apply", lambda *_: pytest.fail("its own")
    )
    manager.post_model_build(DictDefault({"kd_trainer": True}), tiny_llama())
    ours = run(module)
    for z, x, y in zip(best, own, ours, strict=True):
        errors = [float((found.double() - z).abs().max()) for found in (x, y)]
        assert errors[1] <= 2 * errors[0] + 4 * torch.finfo(y.dtype).eps * float(z.abs().max())


@pytest.mark.parametrize("options", [{"beta": 0.5}, {"beta": 0.0, "normalize_topk": True}])
def test_other_forms_of_kd_are_left_to_axolotl(
    options: dict[str, Any], manager: Any, kd: Any
) -> None:
    torch.manual_seed(0)
    given = torch.randn(90, 16), torch.randn(2, 7, 16), *stored_top_k()
    module = kd.LigerFusedLinearKLTopKLogprobLoss(compiled=False, **options)
    expected = module(*given)
    manager.post_model_build(DictDefault({"kd_trainer": True}), tiny_llama())
    assert torch.equal(module(*given), expected)


def test_kd_is_enabled_once_for_several_models(manager: Any, kd: Any) -> None:
    for _ in range(2):
        manager.post_model_build(DictDefault({"kd_trainer": True}), tiny_llama())
