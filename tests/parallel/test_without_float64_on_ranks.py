"""Ranks whose inputs are not float64 make no float64 tensors, which some devices do not have."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

import cutefce
from tests.parallel import test_divergence_on_ranks as divergences
from tests.parallel import test_sampled_on_ranks as sampled
from tests.parallel.test_options_on_ranks import SIZES, losses
from tests.parallel.test_output_classes_on_ranks import values
from tests.parallel.test_vocab_parallel import part
from tests.support.divergence import FORMS, heads
from tests.support.float64 import assert_no_float64
from tests.support.options import LOSSES
from tests.support.outputs import values_case
from tests.support.ranks import Ranks, group
from tests.support.reference import Case, random_case
from tests.support.tiers import rest_slow

PROBLEM = 60, 16, sum(SIZES)


def check(function: Callable[..., Any], *arguments: Any) -> None:
    assert_no_float64(partial(function, *arguments))


KINDS = "softcap", "class indices, smoothing and all factors", "soft targets, alone"


@pytest.mark.parametrize("sequence_parallel", rest_slow({"tp": False, "sp": True}))
@pytest.mark.parametrize("kind", rest_slow(KINDS))
def test_losses(kind: str, sequence_parallel: bool, ranks: Ranks) -> None:
    ranks.run(2, check, losses, LOSSES[kind](*PROBLEM), sequence_parallel)


@pytest.mark.slow
def test_other_calls(ranks: Ranks) -> None:
    x = values_case(["linear_bias", "temperature"], None, *PROBLEM, outputs=("lse", "entropy"))
    ranks.run(2, check, values, x, False)
    options = {"z_loss": 1e-2, "logit_scale": 1.5}
    ranks.run(2, check, sampled.share, random_case(*PROBLEM), SIZES, False, options)
    case = heads(60, (16, 12), sum(SIZES), biases=True)
    for form in FORMS.values():
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
