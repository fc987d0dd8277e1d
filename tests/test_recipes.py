"""The examples of losses that are linear cross entropies equal plain torch, and train."""

from collections.abc import Callable, Iterable, Sequence
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from examples import (
    contrastive,
    draft_vocabulary,
    masked_diffusion,
    nanogpt,
    offline_distillation,
    recommender,
)
from examples.training import fit
from tests.support.ranks import Ranks, group

RECIPES = (
    contrastive,
    draft_vocabulary,
    masked_diffusion,
    nanogpt,
    offline_distillation,
    recommender,
)

FEW = 12
"""Steps of a training."""


def leaves(*shapes: tuple[int, ...]) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(shape, dtype=torch.float64).requires_grad_() for shape in shapes]


def assert_same(ours: Tensor, theirs: Tensor, operands: Sequence[Tensor]) -> None:
    """Assert that two losses () and their gradients are the same."""
    torch.testing.assert_close(ours, theirs)
    found = (torch.autograd.grad(loss, operands) for loss in (ours, theirs))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b)


def pairs() -> list[Tensor]:
    """Return embeddings (8, 16) of queries and keys of length 1, and a scale ()."""
    queries, keys, scale = leaves((8, 16), (8, 16), ())
    return [F.normalize(x.detach(), dim=-1).requires_grad_() for x in (queries, keys)] + [scale]


def plain_contrastive(queries: Tensor, keys: Tensor, scale: Tensor) -> Tensor:
    logits, own = queries @ keys.T * scale.exp(), torch.arange(len(queries))
    return (F.cross_entropy(logits, own) + F.cross_entropy(logits.T, own)) / 2


def test_the_contrastive_loss() -> None:
    queries, keys, scale = operands = pairs()
    ours = contrastive.contrastive_loss(queries, keys, scale)
    assert_same(ours, plain_contrastive(queries, keys, scale), operands)


def contrastive_on_a_rank() -> tuple[Tensor, ...]:
    """Return the loss on this rank, and the gradients of its pairs and of the scale."""
    rank, (queries, keys, scale) = group(2).rank(), pairs()
    own = [x.detach().chunk(2)[rank].requires_grad_() for x in (queries, keys)]
    loss = contrastive.contrastive_loss(own[0], own[1], scale, group(2))
    return loss.detach(), *torch.autograd.grad(loss, [*own, scale])


def test_negatives_of_all_ranks(ranks: Ranks) -> None:
    operands = pairs()
    loss = plain_contrastive(*operands)
    found = ranks.run(2, contrastive_on_a_rank)
    by_queries, by_keys, by_scale = torch.autograd.grad(loss, operands)
    losses, queries, keys, scales = zip(*found, strict=True)
    for x in losses:
        torch.testing.assert_close(x, loss.detach())
    torch.testing.assert_close(torch.cat(queries), by_queries)
    torch.testing.assert_close(torch.cat(keys), by_keys)
    torch.testing.assert_close(sum(scales), by_scale)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.__name__)
def test_a_command_prints_losses_that_fall(
    recipe: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    trainings = list[list[float]]()

    def fit_shortly(parameters: Iterable[Tensor], loss: Callable[[], Tensor], *_: Any) -> Any:
        trainings.append(fit(parameters, loss, FEW))
        return trainings[-1]

    monkeypatch.setattr(recipe, "fit", fit_shortly)
    recipe.main()
    assert "step 11: loss" in capsys.readouterr().out
    assert trainings
    most = 0.98 if recipe is recommender else 0.95
    for losses in trainings:
        assert sum(losses[-3:]) < most * sum(losses[:3])


def test_the_loss_of_the_items_of_a_batch() -> None:
    users, items, log_q = leaves((9, 16), (40, 16), (40,))
    log_q = log_q.detach()
    target = torch.tensor([3, 7, 3, 39, 0, 8, 8, 8, 11])
    logits = users @ items.T - log_q
    absent = torch.ones(40, dtype=torch.bool)
    absent[target] = False
    theirs = F.cross_entropy(logits.masked_fill(absent, -torch.inf), target)
    ours = recommender.in_batch_loss(users, items, target, log_q)
    assert_same(ours, theirs, [users, items])


def test_the_diffusion_loss() -> None:
    hidden, weight, rates = leaves((3, 7, 16), (50, 16), (3,))
    rates = rates.detach().sigmoid()
    tokens, is_masked = torch.randint(50, (3, 7)), torch.rand(3, 7) < 0.5
    each = F.cross_entropy((hidden @ weight.T).transpose(1, 2), tokens, reduction="none")
    theirs = (each * is_masked / rates[:, None]).sum() / tokens.numel()
    ours = masked_diffusion.diffusion_loss(hidden, weight, tokens, is_masked, rates)
    assert_same(ours, theirs, [hidden, weight])


def test_a_sigmoid_is_a_softcap() -> None:
    hidden, weight = leaves((2, 6, 16), (50, 16))
    targets, weights = torch.randint(50, (2, 6)), (1.0, 0.5, 0.25)
    logits = 23 * torch.sigmoid((hidden @ weight.T + 5) / 7.5)
    log_p = logits.log_softmax(-1)
    theirs = torch.zeros((), dtype=torch.float64)
    for ahead, factor in enumerate(weights):
        own = log_p[:, : 6 - ahead].gather(-1, targets[:, ahead:, None])
        theirs = theirs - factor * own.sum() / targets.numel()
    assert_same(
        nanogpt.next_tokens_loss(hidden, weight, targets, weights), theirs, [hidden, weight]
    )
    options = nanogpt.sigmoid_cap(weight)
    assert options["softcap"] == 11.5 and options["logit_scale"] == pytest.approx(23 / 30)
    torch.testing.assert_close(options["linear_bias"], torch.full((50,), 23 / 6))


@pytest.mark.parametrize("has_rest", [False, True])
def test_the_loss_of_a_stored_top_k(has_rest: bool) -> None:
    hidden, weight, teacher = leaves((2, 6, 16), (50, 16), (2, 6, 50))
    top, labels = teacher.detach().log_softmax(-1).topk(5), torch.randint(50, (2, 6))
    values, indices = top.values.float(), top.indices
    values[0, 0, -1], indices[0, 0, -1] = -1000, -1  # padding
    log_p = (hidden @ weight.T).log_softmax(-1)
    own, student = log_p.gather(-1, labels[..., None]), log_p.gather(-1, indices.clamp(0))
    q = values.double().exp()
    kl = (q * (values - student)).sum(-1)
    if has_rest:
        p = student.exp() * (indices >= 0)
        r, s = 1 - q.sum(-1), 1 - p.sum(-1)
        kl = kl + r * (r / s).log()
    theirs = (0.3 * kl - 0.7 * own[..., 0]).mean()
    ours = offline_distillation.offline_loss(
        hidden, weight, labels, (values, indices), 0.3, has_rest=has_rest
    )
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0)
    found = (torch.autograd.grad(x, [hidden, weight]) for x in (ours, theirs))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6 * b.abs().max().item())


def test_the_losses_of_a_draft_vocabulary() -> None:
    hidden, weight, states, teacher_weight = leaves((2, 20, 16), (12, 16), (2, 20, 24), (50, 24))
    states, teacher_weight = states.detach(), teacher_weight.detach()
    classes = torch.randperm(50)[:12]
    logits = states @ teacher_weight.T
    given = hidden, weight, states, teacher_weight, classes
    p, q = (hidden @ weight.T).softmax(-1), logits[..., classes].softmax(-1)
    counts = torch.isin(logits.argmax(-1), classes)
    assert 0 < counts.sum() < counts.numel()
    theirs = (p - q)[counts].abs().sum(-1).mean() / 2
    assert_same(draft_vocabulary.draft_loss(*given), theirs, [hidden, weight])
    p, q = (hidden @ weight.T).softmax(-1), logits.softmax(-1)[..., classes]
    theirs = torch.minimum(p, q).sum(-1)
    ours = draft_vocabulary.acceptance_rates(*given)
    torch.testing.assert_close(ours, theirs)
    assert_same(ours.mean(), theirs.mean(), [hidden, weight])
