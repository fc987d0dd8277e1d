"""OpenRLHF's actors: log-probabilities and entropies are those of its own functions."""

import sys
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import cutefce
from bench.harness.tiny_models import VOCAB, build, tiny_config
from cutefce.integrations import openrlhf as integration
from cutefce.integrations import options as setting
from cutefce.integrations.report import integration_report
from tests.integrations.test_surroundings import (
    deepspeed_config,
    gathered_parameters,
    start_deepspeed,
)
from tests.support import deferral
from tests.support.deferral import gradients
from tests.support.packages import module_without
from tests.support.ranks import Ranks
from tests.support.tiers import rest_slow

pytest.importorskip("deepspeed")
pytest.importorskip("peft")
packing: Any = ModuleType("openrlhf.models.ring_attn_utils")  # needs FlashAttention
packing.gather_and_pad_tensor = packing.unpad_and_slice_tensor = None
sys.modules[packing.__name__] = packing
with mock.patch("torch.compile", lambda function: function):  # an entropy, which takes a compiler
    actors = module_without("openrlhf.models.actor", "openrlhf.models")
integration.enable()

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("llama", {}),
    "scaled": ("cohere", {"logit_scale": 0.3}),
    "bias": ("phi", {}),
    "capped": ("gemma2", {"final_logit_softcapping": 2.0}),
}


def actor_of(name: str, deferred: bool, dtype: torch.dtype = torch.float32, T: float = 1.0) -> Any:
    """Return an actor in training, without dropout."""
    kind, options = MODELS[name]
    model = build(tiny_config(kind, **options)).train().to(dtype)
    actor = actors.Actor(model, temperature=T)
    actor.packing_samples = False
    if not deferred:
        cutefce.undefer(model)
    return actor


def values(actor: Any, with_entropy: bool = True) -> list[Tensor]:
    """Return log-probabilities of actions, and entropies, of sequences with padding."""
    tokens = torch.randint(VOCAB, (3, 9), generator=torch.Generator().manual_seed(1))
    mask = (torch.arange(9) < torch.tensor([9, 6, 7])[:, None]).long()
    found, output = actor(
        tokens, mask[:, 3:], mask, return_output=True, return_entropy=with_entropy
    )
    return [found, output.entropy] if with_entropy else [found]


def step(actor: Any, with_entropy: bool = True) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Return the values, and the gradients of a sum of them."""
    found = values(actor, with_entropy)
    sums = [(torch.linspace(-1, 1, x.numel()).view_as(x) * x).sum() for x in found]
    torch.stack(sums).sum().backward()
    return [x.detach() for x in found], gradients(actor)


def assert_same(ours: Any, theirs: Any, tolerance: float = 1e-5) -> None:
    for x, y in zip(ours[0], theirs[0], strict=True):
        assert x.dtype == y.dtype == torch.float32
        torch.testing.assert_close(x, y, rtol=tolerance, atol=tolerance)
    deferral.assert_same(ours[1], theirs[1], tolerance)


@pytest.mark.parametrize("temperature", rest_slow([0.7, 1.0]))
@pytest.mark.parametrize("name", rest_slow([*MODELS]))
def test_values_and_gradients_are_those_of_openrlhf(name: str, temperature: float) -> None:
    with_entropy = name != "capped"
    actor = actor_of(name, True, T=temperature)
    ours = step(actor, with_entropy)
    report = cutefce.deferral_report(actor)
    assert report == cutefce.DeferralReport(1 + with_entropy, {})
    calls = integration_report()
    assert calls[integration.LOG_PROBS].fused and integration.ACTOR not in calls
    assert_same(ours, step(actor_of(name, False, T=temperature), with_entropy))


def test_logits_of_16_bits_are_divided_as_a_copy() -> None:
    actor = actor_of("plain", True, torch.bfloat16, T=0.7)
    ours = step(actor)
    assert cutefce.deferral_report(actor) == cutefce.DeferralReport(2, {})
    exact = actor_of("plain", False, torch.bfloat16, T=0.7)
    assert_same(ours, step(exact), 2e-2)


def test_the_gradient_of_an_entropy_of_capped_logits_is_openrlhfs() -> None:
    actor = actor_of("capped", True, T=0.7)
    assert_same(step(actor), step(actor_of("capped", False, T=0.7)))
    report = cutefce.deferral_report(actor)
    assert report.fused == 0 and "linear_log_probs: entropy of capped logits" in report.fallbacks


@pytest.mark.parametrize("name", ["plain", "capped"])
def test_a_reference_has_no_logits_without_gradients(name: str) -> None:
    actor = actor_of(name, True).eval()
    with torch.no_grad():
        ours, theirs = values(actor), values(actor_of(name, False).eval())
    assert cutefce.deferral_report(actor) == cutefce.DeferralReport(2, {})
    for x, y in zip(ours, theirs, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)


def test_other_logits_and_a_temperature_of_the_function_are_served() -> None:
    logits, labels = torch.randn(2, 5, 7), torch.randint(7, (2, 5))
    expected = (logits / 0.7).log_softmax(-1).gather(-1, labels[..., None])[..., 0]
    found = actors.log_probs_from_logits(logits.clone(), labels, 0.7)
    torch.testing.assert_close(found, expected)
    head = torch.nn.Linear(4, 7)
    hidden = torch.randn(2, 5, 4)
    expected = (head(hidden) / 0.7).log_softmax(-1).gather(-1, labels[..., None])[..., 0]
    cutefce.defer(head)
    torch.testing.assert_close(actors.log_probs_from_logits(head(hidden), labels, 0.7), expected)
    assert cutefce.deferral_report(head).fused == 1


def train(stage: int, deferred: bool) -> Any:
    """Return values without gradients, parameters after two steps on two ranks, and the report."""
    deepspeed = start_deepspeed()
    actor = actor_of("plain", deferred, T=0.7)
    optimizer = torch.optim.SGD(actor.model.parameters(), lr=0.1)
    model = actor.model
    config = deepspeed_config(stage)
    actor.model, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    with torch.no_grad():
        before = values(actor)
    for _ in range(2):
        found = values(actor)
        actor.model.backward(found[0].mean() - 0.1 * found[1].mean())
        actor.model.step()
    report = cutefce.deferral_report(model) if deferred else None
    return [*before, gathered_parameters(model)], report


@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 3])
def test_deepspeed_trains_as_without(stage: int, two: Ranks) -> None:
    (ours, report), *_ = two.run(2, train, stage, True)
    (theirs, _), *_ = two.run(2, train, stage, False)
    torch.testing.assert_close(ours[:2], theirs[:2], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours[2], theirs[2], rtol=0, atol=1e-6)
    if stage == 3:
        assert report.fused == 0
        assert report.fallbacks["DeepSpeed ZeRO-3: a loss outside of the model"] == 2
    else:
        assert report == cutefce.DeferralReport(6, {})


def test_gradients_are_sampled_if_the_setting_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(setting, "_chosen", {})
    setting.set_options(gradient="sampled", samples=32)
    head = actor_of("plain", True).model.lm_head
    assert head.loss_options == {"gradient": "sampled", "samples": 32, "workspace": None}
