"""NeMo-RL, which no package index has: its functions' signatures, and values from all logits."""

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import cutefce
from cutefce.integrations import nemo_rl as integration
from tests.support.deferral import gradients as gradients_of
from tests.support.fused_calls import sampled_calls
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
        target,
        vocab_start_index=first,
        vocab_end_index=first + len(classes),
        tp_group=tp,
        cp_group=group(1) if rank == 0 else None,
    )
    return [values.detach(), *gradients(values, [rows, classes])]


@pytest.mark.parametrize("count", [1, 2])
def test_ranks_have_the_values_of_all_logits(count: int, two: Ranks) -> None:
    found = two.run(count, values_on_a_rank, count)
    values, *both = expected()
    for result in found:
        torch.testing.assert_close(result[0].double(), values, rtol=0, atol=1e-5)
    for x, y in zip(zip(*(result[1:] for result in found), strict=True), both, strict=True):
        atol = 1e-5 * y.abs().max().item()
        torch.testing.assert_close(torch.cat(x).double(), y, rtol=0, atol=atol)


def test_other_classes_are_named(two: Ranks) -> None:
    ((failed, text),) = two.outcomes(1, values_on_a_rank, 1, 3)
    assert failed and "vocab_start_index, vocab_end_index: got 3 and 65, expected 0" in text


def context_parallel() -> None:
    pair: Any = group(2)
    hidden, weight, target = inputs()
    integration.log_probs(hidden, weight, target, 0, 62, pair, cp_group=pair)


def test_context_parallelism_is_named(two: Ranks) -> None:
    for failed, text in two.outcomes(2, context_parallel):
        assert failed and "cp_group: got 2 ranks" in text


def test_the_function_is_replaced(framework: ModuleType) -> None:
    integration.enable()
    found = framework.from_parallel_hidden_states_to_logprobs
    assert vars(found)["__wrapped__"] is integration.log_probs


def sampled_on_a_rank() -> None:
    with sampled_calls(integration, "linear_log_probs"):
        values_on_a_rank(1)


def test_gradients_are_sampled_if_the_setting_says_so(two: Ranks) -> None:
    two.run(1, sampled_on_a_rank)


@pytest.fixture
def losses(framework: ModuleType, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Return a stand-in for the module with what distillation takes of logits, of NeMo-RL 0.6.0."""

    def get_distillation_topk_logprobs_from_logits(
        student_logits: Tensor,
        teacher_topk_logits: Tensor,
        teacher_topk_indices: Tensor,
        zero_outside_topk: bool,
        calculate_entropy: bool,
        vocab_parallel_rank: int | None = None,
        vocab_parallel_group: dist.ProcessGroup | None = None,
        context_parallel_group: dist.ProcessGroup | None = None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return values of all logits; more parameters than eight: they are NeMo-RL's."""
        log_p = student_logits.to(torch.float32).log_softmax(-1)
        own = log_p.gather(-1, teacher_topk_indices)
        if not zero_outside_topk:
            own = own.log_softmax(-1)
        entropy = (log_p.exp() * log_p).sum(-1)[:, :-1] if calculate_entropy else None
        return own[:, :-1], teacher_topk_logits.log_softmax(-1)[:, :-1], entropy

    found = ModuleType("nemo_rl.algorithms.loss.utils")
    name = get_distillation_topk_logprobs_from_logits.__name__
    vars(found)[name] = get_distillation_topk_logprobs_from_logits
    for package in ("nemo_rl.algorithms", "nemo_rl.algorithms.loss"):
        monkeypatch.setitem(sys.modules, package, ModuleType(package))
    monkeypatch.setitem(sys.modules, found.__name__, found)
    return found


def distillation_loss(losses: Any, logits: Any, zero_outside: bool, **more: Any) -> Tensor:
    """Return the loss () of NeMo-RL's mixed KL, as it computes it of these values."""
    torch.manual_seed(1)
    teacher = torch.randn(3, 10, 62).topk(5)
    function = losses.get_distillation_topk_logprobs_from_logits
    given = teacher.values, teacher.indices, zero_outside, zero_outside
    student, other, negative_entropy = function(logits, *given, **more)
    p, q = student.exp(), other.exp()
    per_token = (0.3 * q * (other - student) + 0.7 * p * (student - other)).sum(-1)
    if zero_outside:
        rest = negative_entropy - (p * student).sum(-1)
        per_token = per_token + 0.7 * (rest + 100 * (1 - p.sum(-1)))
    mean: Tensor = per_token.mean()
    return mean


@pytest.mark.parametrize("zero_outside", [False, True])
def test_distillation_is_that_of_logits(zero_outside: bool, losses: ModuleType) -> None:
    """NeMo-RL divides logits by a sampling temperature in place."""
    torch.manual_seed(0)
    head, hidden = nn.Linear(16, 62), torch.randn(3, 10, 16)
    want = distillation_loss(losses, head(hidden).div_(0.7), zero_outside)
    want.backward()
    wanted = gradients_of(head)
    integration.enable_distillation(head)
    got = distillation_loss(losses, head(hidden).div_(0.7), zero_outside)
    torch.testing.assert_close(got, want)
    got.backward()
    assert cutefce.deferral_report(head) == cutefce.DeferralReport(1, {})
    for name, x in gradients_of(head).items():
        torch.testing.assert_close(x, wanted[name], rtol=1e-4, atol=1e-6)


def test_what_distillation_leaves_to_nemo_rl(losses: ModuleType) -> None:
    """Logits, other logits of this process, and ranks that share a vocabulary."""
    head, hidden = nn.Linear(16, 62), torch.randn(3, 10, 16)
    integration.enable_distillation(head)
    logits = nn.functional.linear(hidden, head.weight, head.bias)
    want = distillation_loss(losses, logits, True)
    made = head(hidden)
    made.exp()
    for given, more in ((made, {}), (head(hidden), {"vocab_parallel_group": object()})):
        torch.testing.assert_close(distillation_loss(losses, given, True, **more), want)
    assert cutefce.deferral_report(head).fused == 0
    integration.enable_distillation(nn.Linear(16, 62))  # a second model
    with pytest.raises(RuntimeError, match="deferred already"):
        integration.enable_distillation(head)


def test_a_refusal_leaves_the_student_as_it_was(losses: ModuleType) -> None:
    """NeMo-RL's function has other parameters."""
    losses.get_distillation_topk_logprobs_from_logits = lambda student_logits: None  # type: ignore[attr-defined]
    head = nn.Linear(16, 62)
    with pytest.raises(RuntimeError, match="parameters"):
        integration.enable_distillation(head)
    assert type(head(torch.randn(3, 16))) is Tensor
