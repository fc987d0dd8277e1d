"""verl: values and gradients of its fused forward are those of the model's own logits."""

import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("verl")
from verl.models.transformers import monkey_patch
from verl.utils.kernel import linear_cross_entropy as kernel

from bench.harness.tiny_models import VOCAB, build, tiny_config
from cutefce.integrations import verl as integration
from cutefce.integrations.report import integration_report
from cutefce.integrations.support.logit_options import logit_options
from tests.support.fused_calls import fused_calls, sampled_calls
from tests.support.ranks import Ranks, group

MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {},
    "mixtral": {},
    "cohere": {"logit_scale": 0.3},
    "granite": {"logits_scaling": 8.0},
    "gemma2": {"final_logit_softcapping": 2.0},
    "phi": {},  # its head has a bias
    "falcon_h1": {"lm_head_multiplier": 0.25},
}
SCALES = {"cohere": 0.3, "granite": 1 / 8, "falcon_h1": 0.25}


@pytest.fixture(autouse=True)
def calls() -> Iterator[list[dict[str, Any]]]:
    """Yield the options of the fused calls."""
    with fused_calls(integration, "linear_log_probs") as found:
        yield found


def small_model(name: str, **options: Any) -> Any:
    """Return a model of a class of its own, whose forward verl may replace."""
    model = build(tiny_config(name, **MODELS[name] | options)).train()
    own = type(model)
    model.__class__ = type(own.__name__, (own,), {})
    with torch.no_grad():
        for x in model.parameters():  # of norms and of heads' biases too
            x.add_(0.1 * torch.randn_like(x))
    return model


def gradients(
    leaves: Iterable[Tensor], log_probs: Tensor, entropy: Tensor, coefficient: float
) -> list[Tensor]:
    """Return those of a sum of both, weighted by token."""
    factors = torch.linspace(-1, 1, log_probs.numel()).view_as(log_probs)
    total = (factors * log_probs).sum()
    if coefficient:
        total = total + coefficient * (factors * entropy).sum()
    return [*torch.autograd.grad(total, [*leaves])]


def assert_equal(found: list[Tensor], expected: list[Tensor]) -> None:
    for x, y in zip(found, expected, strict=True):
        assert x.shape == y.shape
        atol = 1e-5 * y.detach().abs().max().item() + 1e-8
        torch.testing.assert_close(x, y, rtol=0, atol=atol)


@pytest.mark.parametrize("name", MODELS)
def test_a_model_has_the_values_of_its_own_logits(name: str, calls: list[dict[str, Any]]) -> None:
    model, coefficient = small_model(name), 0.0 if name == "gemma2" else 0.1
    tokens = torch.randint(VOCAB, (2, 9))
    logits = model(tokens).logits / 0.7
    log_p = logits.log_softmax(-1)
    own = log_p.gather(-1, tokens.roll(-1, -1)[..., None])[..., 0], -(log_p.exp() * log_p).sum(-1)
    expected = [*own, *gradients(model.parameters(), *own, coefficient)]
    monkey_patch.patch_forward_with_backends(model, True, "triton")
    output = model(tokens, return_dict=True, temperature=0.7)
    found = output.log_probs, output.entropy
    assert_equal([*found, *gradients(model.parameters(), *found, coefficient)], expected)
    (options,) = calls
    assert options["logit_scale"] == SCALES.get(name, 1.0)
    assert options["softcap"] == (2.0 if name == "gemma2" else None)
    assert ("linear_bias" in options) == (name == "phi")
    assert not any("patch_forward_with_backends" in path for path in integration_report())


def test_two_models_of_one_class_keep_their_options(calls: list[dict[str, Any]]) -> None:
    first, tokens = small_model("cohere"), torch.randint(VOCAB, (2, 9))
    second = type(first)(tiny_config("cohere", logit_scale=0.5))
    for model in (first, second):
        monkey_patch.patch_forward_with_backends(model, True, "triton")
    for model in (first, second):
        model(tokens, return_dict=True)
    assert [options["logit_scale"] for options in calls] == [0.3, 0.5]


def test_a_model_that_verl_did_not_patch_has_its_own_options(calls: list[dict[str, Any]]) -> None:
    first, tokens = small_model("cohere"), torch.randint(VOCAB, (2, 9))
    second = type(first)(tiny_config("cohere", logit_scale=0.5))
    expected = second(tokens).logits.log_softmax(-1)
    monkey_patch.patch_forward_with_backends(first, True, "triton")
    found = second(tokens, return_dict=True).log_probs
    torch.testing.assert_close(found, expected.gather(-1, tokens.roll(-1, -1)[..., None])[..., 0])
    assert calls[0]["logit_scale"] == 0.5


def test_without_fused_kernels_a_model_keeps_its_forward(calls: list[dict[str, Any]]) -> None:
    model = small_model("llama")
    monkey_patch.patch_forward_with_backends(model, False, "triton")
    assert model(torch.randint(VOCAB, (2, 9))).logits.shape == (2, 9, VOCAB)
    assert not calls


def test_entropy_of_capped_logits_has_no_gradient() -> None:
    model = small_model("gemma2")
    monkey_patch.patch_forward_with_backends(model, True, "triton")
    output = model(torch.randint(VOCAB, (2, 9)), return_dict=True)
    with pytest.raises(NotImplementedError, match="softcap: got one with 'entropy'"):
        gradients(model.parameters(), output.log_probs, output.entropy, 0.1)


@pytest.mark.parametrize("change", ["logits", "hidden states", "shape"])
def test_what_a_model_does_to_its_logits_is_served_or_named(change: str) -> None:
    model = small_model("llama")
    own = type(model).forward

    def forward(self: Any, *arguments: Any, **keywords: Any) -> Any:
        if change == "hidden states":
            head = self.lm_head.forward
            self.lm_head.forward = lambda hidden: head(hidden / 2)
        output = own(self, *arguments, **keywords)
        output.logits = {"logits": output.logits + 1, "shape": output.logits[..., :-1]}.get(
            change, output.logits
        )
        return output

    type(model).forward = forward
    with pytest.raises(NotImplementedError, match=r"LlamaForCausalLM: got"):
        monkey_patch.patch_forward_with_backends(model, True, "triton")


def test_a_key_that_the_model_ignores_is_ignored() -> None:
    model = small_model("llama", logit_scale=0.5, final_logit_softcapping=3.0)
    expected = {"logit_scale": 1.0, "softcap": None}
    assert logit_options(model, type(model).forward) == expected


def values_on_a_rank(hidden: Tensor, weight: Tensor, labels: Tensor, gathers: bool) -> list[Tensor]:
    """Return values of all tokens, and gradients of this rank's hidden states and classes."""
    from megatron.core.tensor_parallel import mappings

    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment,return-value]
    pair, rank = group(2), group(2).rank()
    rows, classes = (x.chunk(2)[rank].clone().requires_grad_() for x in (hidden, weight))
    whole = mappings.gather_from_sequence_parallel_region(rows, group=pair) if gathers else rows
    values = integration.linear_cross_entropy(whole, classes, labels, 0.7, "none", pair)
    return [*(x.detach() for x in values), *gradients((rows, classes), *values, 0.1)]


@pytest.mark.slow
def test_ranks_of_megatron_have_the_values_of_one(two: Ranks) -> None:
    pytest.importorskip("megatron.core")
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 1, 16, generator=generator) for n in (10, 62))
    labels = torch.randint(62, (1, 10), generator=generator)
    given = hidden, weight[:, 0], labels
    leaves = [x.clone().requires_grad_() for x in given[:2]]
    log_probs, entropy = kernel.linear_cross_entropy(*leaves, labels, 0.7, "none")
    expected = [log_probs, entropy, *gradients(leaves, log_probs, entropy, 0.1)]
    first, second = two.run(2, values_on_a_rank, *given, True)
    for found in (first, second):
        assert_equal(found[:2], expected[:2])
    assert_equal([torch.cat(x) for x in zip(first[2:], second[2:], strict=True)], expected[2:])
    outcomes = two.outcomes(2, values_on_a_rank, *given, False)
    assert all(
        failed and "hidden: got states that were not gathered" in x for failed, x in outcomes
    )


def test_another_reduction_is_named() -> None:
    arguments = torch.randn(3, 4), torch.randn(5, 4), torch.arange(3)
    with pytest.raises(ValueError, match="reduction: got 'mean', expected 'none'"):
        kernel.linear_cross_entropy(*arguments, 1.0, "mean")


@pytest.mark.slow
def test_verl_imports_it_by_name() -> None:
    code = (
        "import verl\n"
        "from verl.utils.kernel.linear_cross_entropy import linear_cross_entropy as found\n"
        "print(found.__module__)"
    )
    named = {"VERL_USE_EXTERNAL_MODULES": "cutefce.integrations.verl"}
    result = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | named,
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout.split()[-1] == "cutefce.integrations.verl"


def test_gradients_are_sampled_if_the_setting_says_so() -> None:
    with sampled_calls(integration, "linear_log_probs"):
        integration.linear_cross_entropy(torch.randn(5, 8), torch.randn(99, 8), torch.arange(5))
