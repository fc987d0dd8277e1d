"""NeMo-RL, which no package index has: its function's signature, and its values from all logits."""

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from cutefce.integrations import gradients as setting
from cutefce.integrations import nemo_rl as integration
from tests.support.fused_calls import fused_calls
from tests.support.ranks import Ranks, group


@pytest.fixture
def framework(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Return a stand-in for the module with the function, of the signature in NeMo-RL 0.6.0."""

    def from_parallel_hidden_states_to_logprobs(
        tensor_parallel_hidden_states: Tensor,
        output_weight_layer: Tensor,
        runtime_gather_output: bool,
        target: Tensor,
        vocab_start_index: int,
        vocab_end_index: int,
        tp_group: dist.ProcessGroup,
        inference_only: bool = False,
        cp_group: dist.ProcessGroup | None = None,
        chunk_size: int | None = None,
    ) -> None:
        """More parameters than eight: they are NeMo-RL's."""

    found = ModuleType("nemo_rl.distributed.model_utils")
    vars(found)["from_parallel_hidden_states_to_logprobs"] = from_parallel_hidden_states_to_logprobs
    for name in ("nemo_rl", "nemo_rl.distributed"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, found.__name__, found)
    monkeypatch.setattr("importlib.metadata.version", lambda _: "0.6.0+abc1234")
    return found


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    """Return hidden states (s, b, D), a weight (V, D) and token ids (b, s)."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(10, 3, 16, generator=generator)
    weight = torch.randn(62, 16, generator=generator)
    return hidden, weight, torch.randint(62, (3, 10), generator=generator)


def gradients(values: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    factors = torch.linspace(-1, 1, values.numel(), dtype=values.dtype).view_as(values)
    return [*torch.autograd.grad((factors * values).sum(), leaves)]


def expected() -> list[Tensor]:
    """Return log-probabilities (b, s - 1) and gradients, from all logits in float64."""
    hidden, weight, target = inputs()
    leaves = [x.double().requires_grad_() for x in (hidden, weight)]
    log_p = (leaves[0] @ leaves[1].T).log_softmax(-1).transpose(0, 1)
    values = log_p[:, :-1].gather(-1, target[:, 1:, None])[..., 0]
    return [values.detach(), *gradients(values, leaves)]


def values_on_a_rank(count: int, first_class: int | None = None) -> list[Tensor]:
    """Return log-probabilities, and gradients of this rank's hidden states and classes."""
    hidden, weight, target = inputs()
    tp, rank = group(count), group(count).rank()
    rows, classes = (x.chunk(count)[rank].clone().requires_grad_() for x in (hidden, weight))
    first = rank * len(classes) if first_class is None else first_class
    values = integration.log_probs(
        rows,
        classes,
        None,
        target,
        vocab_start_index=first,
        vocab_end_index=first + len(classes),
        tp_group=tp,
        cp_group=group(1) if rank == 0 else None,
        chunk_size=4,
    )
    return [values.detach(), *gradients(values, [rows, classes])]


@pytest.mark.parametrize("count", [1, 2])
def test_ranks_have_the_values_of_all_logits(count: int, ranks: Ranks) -> None:
    found = ranks.run(count, values_on_a_rank, count)
    values, *both = expected()
    for result in found:
        torch.testing.assert_close(result[0].double(), values, rtol=0, atol=1e-5)
    for x, y in zip(zip(*(result[1:] for result in found), strict=True), both, strict=True):
        atol = 1e-5 * y.abs().max().item()
        torch.testing.assert_close(torch.cat(x).double(), y, rtol=0, atol=atol)


def test_other_classes_are_named(ranks: Ranks) -> None:
    ((failed, text),) = ranks.outcomes(1, values_on_a_rank, 1, 3)
    assert failed and "vocab_start_index, vocab_end_index: got 3 and 65, expected 0" in text


def context_parallel() -> None:
    pair: Any = group(2)
    hidden, weight, target = inputs()
    integration.log_probs(hidden, weight, None, target, 0, 62, pair, cp_group=pair)


def test_context_parallelism_is_named(ranks: Ranks) -> None:
    for failed, text in ranks.outcomes(2, context_parallel):
        assert failed and "cp_group: got 2 ranks" in text


def test_it_is_enabled_once(framework: ModuleType) -> None:
    integration.enable()
    assert framework.from_parallel_hidden_states_to_logprobs is integration.log_probs
    with pytest.raises(RuntimeError, match="enabled already"):
        integration.enable()


def test_other_parameters_are_refused(framework: ModuleType) -> None:
    vars(framework)["from_parallel_hidden_states_to_logprobs"] = lambda hidden, weight: None
    with pytest.raises(RuntimeError, match=r"got parameters \(hidden, weight\)"):
        integration.enable()


def sampled_on_a_rank() -> tuple[str, int]:
    """Return the options of the call under a setting that samples gradients."""
    setting.set_gradients("sampled", samples=32)
    try:
        with fused_calls(integration, "linear_log_probs") as calls:
            values_on_a_rank(1)
    finally:
        setting.set_gradients()
    return calls[0]["gradient"], calls[0]["samples"]


def test_gradients_are_sampled_if_the_setting_says_so(ranks: Ranks) -> None:
    assert ranks.run(1, sampled_on_a_rank) == [("sampled", 32)]
