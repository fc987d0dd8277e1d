"""Sampled gradients of ranks are those of one device: they keep the same entries."""

from typing import Any

import pytest
import torch

import cutefce
from cutefce.cute_kernels.arch import arch_named
from tests.parallel.test_vocab_parallel import (
    SHARINGS,
    Share,
    Sharing,
    gradients,
    joined,
    leaves,
    options_of,
)
from tests.support.kernel_models import serve_calls
from tests.support.layouts import SMALL_TILES
from tests.support.ranks import Ranks, each_value, group
from tests.support.reference import Case, Result, random_case

SAMPLED: dict[str, Any] = {"gradient": "sampled", "samples": 16}


def share(case: Case, sizes: tuple[int, ...], parallel: bool, options: dict[str, Any]) -> Share:
    """Return this rank's results; the ranks' generators have different states."""
    torch.manual_seed(7 + group(len(sizes)).rank())
    h, w = leaves(case, sizes, parallel)
    more = options_of(sizes, parallel) | options | SAMPLED
    loss = cutefce.linear_cross_entropy(h, w, case.y, **more)
    return gradients(case, loss, h, w)


def of_one_device(case: Case, options: dict[str, Any]) -> Share:
    """Return the results of a generator in the state of the first rank's."""
    with pytest.MonkeyPatch.context() as patch:
        serve_calls(patch, arch_named("sm_90a"), SMALL_TILES, selects=True)
        torch.manual_seed(7)
        h, w = case.h.clone().requires_grad_(), case.w.clone().requires_grad_()
        loss = cutefce.linear_cross_entropy(h, w, case.y, **options, **SAMPLED)
        return gradients(case, loss, h, w)


def share_on_models(*arguments: Any) -> Share:
    """Return this rank's results on models of the kernels."""
    with pytest.MonkeyPatch.context() as patch:
        serve_calls(patch, arch_named("sm_90a"), SMALL_TILES, selects=True)
        return share(*arguments)


def assert_near(found: Result, wanted: Share) -> None:
    """Gradients of ranks are rounded otherwise."""
    torch.testing.assert_close(found.loss, wanted[0], rtol=1e-5, atol=1e-5)
    for got, want in zip((found.dx, found.dw), wanted[1:], strict=True):
        ulp = torch.finfo(torch.bfloat16).eps
        error = float((got.double() - want.double()).norm())
        assert error <= ulp * float(want.double().norm())


SMOOTHING = {"label_smoothing": 0.1}
FACTORS = {"z_loss": 1e-2, "logit_scale": 1.5, "reduction": "mean"}


@each_value(sharing=SHARINGS, options=[{}, SMOOTHING, FACTORS])
def test_ranks_keep_the_entries_of_one_device(
    sharing: Sharing, options: dict[str, Any], ranks: Ranks
) -> None:
    case = random_case(60, 24, 333, dtype=torch.bfloat16, logit_std=2.0)
    results = ranks.run(len(sharing[0]), share_on_models, case, *sharing, options)
    assert_near(joined(results, sharing[1]), of_one_device(case, options))


def test_ranks_draw_classes_of_one_device(ranks: Ranks) -> None:
    """Of 8192 classes each rank estimates the log-sum-exps of half of 3072."""
    case = random_case(20, 8, 8192, dtype=torch.bfloat16, logit_std=2.0)
    sharing: Sharing = (4096, 4096), False
    results = ranks.run(2, share_on_models, case, *sharing, {})
    assert_near(joined(results, sharing[1]), of_one_device(case, {}))
