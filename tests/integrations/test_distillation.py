"""Distillation of tiny models of transformers, of different hidden sizes."""

import pytest
import torch

import cutefce
from tests.support.divergence import token_divergences
from tests.support.tiers import pairwise

transformers = pytest.importorskip("transformers")


@pairwise(items=[None, 50], beta=[0.0, 0.1, 0.5, 1.0], temperature=[1.0, 0.7])
def test_distillation_is_that_of_logits(items: int | None, beta: float, temperature: float) -> None:
    """The loss of TRL's trainers: its mean over labels, or a sum over `num_items_in_batch`."""
    torch.manual_seed(0)
    models = []
    for hidden in (32, 48):
        sizes = {"vocab_size": 300, "hidden_size": hidden, "intermediate_size": 64}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
        models.append(transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads)))
        models[-1].lm_head.weight.data.mul_(10)
    tokens = torch.randint(300, (3, 20))
    labels = tokens.clone()
    labels[:, :7] = -100
    student, teacher = models
    teacher.requires_grad_(False)
    logits = [model(tokens).logits / temperature for model in models]
    divergences = token_divergences(*logits, divergence="jsd", beta=beta)[labels != -100]
    want = divergences.mean() if items is None else divergences.sum() / items
    states = [model.model(tokens).last_hidden_state for model in models]
    got = cutefce.linear_divergence(
        *(states[0], student.lm_head.weight, states[1], teacher.lm_head.weight, labels),
        divergence="jsd",
        beta=beta,
        temperature=temperature,
        denominator=items,
    )
    assert abs(float(got) - float(want)) <= 1e-6
    leaves = [*student.parameters()]
    pairs = zip(torch.autograd.grad(got, leaves), torch.autograd.grad(want, leaves), strict=True)
    for a, b in pairs:
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
