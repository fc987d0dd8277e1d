"""Axolotl's plugin manager calls our plugin, which defers the model."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("axolotl.integrations.base")
pytest.importorskip("transformers")

import transformers
from axolotl.integrations.base import PluginManager
from axolotl.utils.dict import DictDefault

import cutefce
from cutefce.integrations import axolotl

NAME = "cutefce.integrations.axolotl.CutefcePlugin"


@pytest.fixture
def manager() -> Iterator[Any]:
    PluginManager._instance = None
    manager = PluginManager.get_instance()
    manager.register(NAME)
    assert list(manager.plugins) == [NAME]
    yield manager
    PluginManager._instance = None


def tiny_llama() -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "vocab_size": 160}
    heads = {"num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.08)
    return model.train()


def test_the_manager_defers_the_model(manager: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    deferred: list[object] = []
    monkeypatch.setattr(cutefce, "defer", deferred.append, raising=False)
    model = tiny_llama()
    manager.post_model_build(DictDefault({}), model)
    assert len(deferred) == 1 and deferred[0] is model


@pytest.mark.parametrize("key", axolotl.OTHERS)
def test_another_fused_loss_is_refused(
    manager: Any, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    deferred: list[object] = []
    monkeypatch.setattr(cutefce, "defer", deferred.append, raising=False)
    with pytest.raises(ValueError, match=rf"^{key}: got True, expected none beside CutefcePlugin"):
        manager.post_model_build(DictDefault({key: True}), torch.nn.Module())
    assert not deferred


@pytest.mark.skipif(not hasattr(cutefce, "defer"), reason="cutefce.defer is not part of this build")
def test_a_deferred_model_has_the_same_loss_and_gradients(
    manager: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, fused = tiny_llama(), tiny_llama()
    manager.post_model_build(DictDefault({}), fused)
    ids = torch.randint(160, (2, 9))
    losses = [model(ids, labels=ids).loss for model in (plain, fused)]
    for loss in losses:
        loss.backward()
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-5, atol=0)
    expected = dict(plain.named_parameters())
    for name, parameter in fused.named_parameters():
        reference = expected[name].grad
        error = (parameter.grad - reference).abs().max()
        assert error <= 1e-5 * reference.abs().max() + 1e-8, name
    assert cutefce.deferral_report(fused).fused == 1
