"""prime-rl, which no package index has: its heads' signatures, and their values from all logits."""

import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cutefce.integrations import prime_rl as integration
from tests.support.fused_calls import fused_calls


class FusedOutputLinear(nn.Linear):
    """A stand-in with the signatures of prime-rl 0.8.0."""

    def __init__(self, in_features: int, out_features: int, chunk_size: int) -> None:
        super().__init__(in_features, out_features, bias=False)
        self.chunk_size = chunk_size

    def forward(
        self,
        hidden_states: Tensor,
        labels: Tensor | None = None,
        temperature: Tensor | None = None,
    ) -> Any:
        """Fail: the fused forward replaces it."""
        raise AssertionError


class GemmaFusedOutputLinear(nn.Linear):
    """A stand-in with the signatures of prime-rl 0.8.0."""

    def __init__(
        self, in_features: int, out_features: int, chunk_size: int, softcap: float
    ) -> None:
        super().__init__(in_features, out_features, bias=False)
        self.chunk_size, self.softcap = chunk_size, softcap

    def forward(
        self,
        hidden_states: Tensor,
        labels: Tensor | None = None,
        temperature: Tensor | None = None,
    ) -> Any:
        """Fail: the fused forward replaces it."""
        raise AssertionError


@pytest.fixture(autouse=True)
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict[str, Any]]]:
    """Make the stand-ins importable, and list the options of the fused calls."""
    parts = integration.LAYERS.split(".")
    for end in range(1, len(parts) + 1):
        name = ".".join(parts[:end])
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    for file, head in (("lm_head", FusedOutputLinear), ("lm_head_gemma", GemmaFusedOutputLinear)):
        module = ModuleType(f"{integration.LAYERS}.{file}")
        vars(module)[head.__name__] = head
        monkeypatch.setitem(sys.modules, module.__name__, module)
        monkeypatch.setattr(head, "forward", head.forward)
    monkeypatch.setattr("importlib.metadata.version", lambda _: "0.8.0")
    with fused_calls(integration, "linear_log_probs") as found:
        yield found


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_a_head_has_the_values_of_all_logits(
    softcap: float | None, calls: list[dict[str, Any]]
) -> None:
    integration.enable()
    torch.manual_seed(0)
    head = (
        FusedOutputLinear(16, 61, 4)
        if softcap is None
        else GemmaFusedOutputLinear(16, 61, 4, softcap)
    )
    nn.init.normal_(head.weight)
    hidden = torch.randn(2, 9, 16).requires_grad_()
    labels, temperature = torch.randint(61, (2, 9)), torch.rand(2, 9) + 0.5
    output = head(hidden, labels, temperature=temperature)

    leaves = [x.detach().double().requires_grad_() for x in (hidden, head.weight)]
    logits = leaves[0] @ leaves[1].T
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    log_p = (logits / temperature[..., None]).log_softmax(-1)
    expected = log_p.gather(-1, labels[..., None])[..., 0], -(log_p.exp() * log_p).sum(-1)
    assert len(calls) == 1 and {*output} == {"logprobs", "entropy"}
    for x, y in zip((output["logprobs"], output["entropy"]), expected, strict=True):
        torch.testing.assert_close(x.double(), y, rtol=0, atol=1e-5)
    factors = torch.linspace(-1, 1, 18).view(2, 9)
    found = torch.autograd.grad((factors * output["logprobs"]).sum(), [hidden, head.weight])
    gradients = torch.autograd.grad((factors * expected[0]).sum(), leaves)
    for x, y in zip(found, gradients, strict=True):
        torch.testing.assert_close(x.double(), y, rtol=0, atol=1e-5 * y.abs().max().item())


@pytest.mark.parametrize("missing", ["labels", "temperature"])
def test_a_missing_argument_is_named(missing: str) -> None:
    integration.enable()
    given = {"labels": torch.zeros(1, 2).long(), "temperature": torch.ones(1, 2)}
    del given[missing]
    with pytest.raises(ValueError, match="labels, temperature: got None, expected tensors"):
        FusedOutputLinear(4, 8, 4)(torch.randn(1, 2, 4), **given)
