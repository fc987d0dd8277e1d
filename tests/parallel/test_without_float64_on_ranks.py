"""Ranks whose inputs are not float64 make no float64 tensors, which some devices do not have."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

import cutefce
from tests.parallel import test_divergence_on_ranks as divergences
from tests.parallel import test_sampled_on_ranks as sampled
from tests.parallel import test_soft_targets_on_ranks as soft_targets
from tests.parallel.test_options_on_ranks import SIZES, log_probs, losses
from tests.parallel.test_vocab_parallel import part
from tests.support.divergence import FORMS, heads
from tests.support.float64 import assert_no_float64
from tests.support.options import TOGETHER, options_case, soft_case
from tests.support.ranks import Ranks, group
from tests.support.reference import Case, random_case
from tests.support.tiers import rest_slow

PROBLEM = 60, 16, sum(SIZES)
NAMES: dict[str, list[str]] = TOGETHER | {"no option": []}


def check(function: Callable[..., Any], *arguments: Any) -> None:
    assert_no_float64(partial(function, *arguments))


KINDS: dict[str, tuple[Callable[..., Any], Callable[[list[str]], Any]]] = {
    "targets": (losses, lambda names: options_case(names, *PROBLEM)),
    "soft targets": (soft_targets.losses, lambda names: soft_case(names, 6, *PROBLEM)),
}
"""What is called, and what draws its case."""


@pytest.mark.parametrize("sequence_parallel", rest_slow({"tp": False, "sp": True}))
@pytest.mark.parametrize("kind", rest_slow(KINDS))
@pytest.mark.parametrize("names", rest_slow(NAMES))
def test_losses(
    names: list[str],
    kind: tuple[Callable[..., Any], Callable[[list[str]], Any]],
    sequence_parallel: bool,
    ranks: Ranks,
) -> None:
    function, drawn = kind
    ranks.run(2, check, function, drawn(names), sequence_parallel)


sharings = pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tp", "sp"])


@pytest.mark.slow
@sharings
def test_log_probs(sequence_parallel: bool, ranks: Ranks) -> None:
    x = options_case(["linear_bias", "logit_scale", "temperature"], *PROBLEM)
    ranks.run(2, check, log_probs, x, sequence_parallel)


@pytest.mark.slow
@sharings
def test_sampled_gradients(sequence_parallel: bool, ranks: Ranks) -> None:
    options = {"z_loss": 1e-2, "logit_scale": 1.5}
    share = sampled.share, random_case(*PROBLEM), SIZES, sequence_parallel, options
    ranks.run(2, check, *share)


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_divergences(form: dict[str, Any], ranks: Ranks) -> None:
    case = heads(60, (16, 12), sum(SIZES), biases=True)
    ranks.run(2, check, divergences.results, case, SIZES, form)


def numbers(x: Case) -> None:
    """Take steps with numbers among the arguments, of this rank's classes."""
    h, w = x.h.clone().requires_grad_(), part(x.w, SIZES).requires_grad_()
    sharing: dict[str, Any] = {"group": group(2), "shards": SIZES}
    every: list[dict[str, Any]] = [{"denominator": 7}, {"denominator": 1 / 3, "temperature": 0.7}]
    for options in every:
        cutefce.linear_cross_entropy(h, w, x.y, **options, **sharing).backward()
    buffer: dict[str, Any] = {"accumulate_into": torch.zeros_like(w), "grad_output": 0.5}
    loss = cutefce.linear_cross_entropy(h, w, x.y, workspace="min", **buffer, **sharing)
    loss.backward(torch.tensor(0.5))
    index = torch.stack([x.y, x.y.roll(1)], 1)
    more: dict[str, Any] = {"outputs": ("lse", "entropy"), "temperature": 0.7}
    found = cutefce.linear_log_probs(h, w, target_indices=index, **more, **sharing)
    assert found.lse is not None and found.entropy is not None
    (found.log_probs.sum() + found.lse.sum() + found.entropy.sum()).backward()
    cutefce.linear_divergence(h, w, h, w, denominator=7, temperature=0.7, **sharing).backward()


def test_numbers(ranks: Ranks) -> None:
    ranks.run(2, check, numbers, random_case(*PROBLEM))
