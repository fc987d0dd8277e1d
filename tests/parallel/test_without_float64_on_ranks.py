"""Ranks whose inputs are not float64 make no float64 tensors, which some devices do not have."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

import cutefce
from tests.parallel.test_options_on_ranks import halves, losses
from tests.parallel.test_vocab_parallel import part
from tests.support.float64 import assert_no_float64
from tests.support.options import LOSSES
from tests.support.ranks import Ranks, group
from tests.support.reference import Case, random_case

PROBLEM = 60, 16, 203


def check(function: Callable[..., Any], *arguments: Any) -> None:
    assert_no_float64(partial(function, *arguments))


def test_losses(ranks: Ranks) -> None:
    x = LOSSES["class indices, smoothing and all factors"](*PROBLEM)
    ranks.run(2, check, losses, x, True)


def numbers(x: Case) -> None:
    """Take steps with numbers among the arguments, of this rank's classes."""
    sizes = halves(x.w)
    h, w = x.h.clone().requires_grad_(), part(x.w, sizes).requires_grad_()
    sharing: dict[str, Any] = {"group": group(2), "shards": sizes}
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
