"""Sampled gradients of ranks are those of one device: they keep the same entries."""

from typing import Any

import pytest
import torch

import cutefce
from cutefce.cute_kernels.arch import arch_named
from tests.conftest import SMALL_TILES
from tests.parallel.test_vocab_parallel import Share, gradients, layouts, leaves, options_of
from tests.support.kernel_models import serve_calls
from tests.support.ranks import Ranks, group
from tests.support.reference import Case, random_case

SAMPLED: dict[str, Any] = {"gradient": "sampled", "samples": 16}


def share(case: Case, sizes: tuple[int, ...], parallel: bool, options: dict[str, Any]) -> Share:
    """Return this rank's results; the ranks' generators have different states."""
    torch.manual_seed(7 + group(len(sizes)).rank())
    h, w = leaves(case, sizes, parallel)
    more = options_of(sizes, parallel) | options | SAMPLED
    loss = cutefce.linear_cross_entropy(h, w, case.y, **more)
    return gradients(case, loss, h, w)


@layouts
def test_ranks_keep_the_entries_of_one_device(
    sizes: tuple[int, ...], sequence_parallel: bool, ranks: Ranks
) -> None:
    case = random_case(60, 24, 333, dtype=torch.float64, logit_std=2.0)
    for reduction in ("none", "mean"):
        options: dict[str, Any] = {"reduction": reduction, "z_loss": 1e-2, "logit_scale": 1.5}
        results = ranks.run(len(sizes), share, case, sizes, sequence_parallel, options)
        losses, dxs, dws = zip(*results, strict=True)
        dx = torch.cat(dxs) if sequence_parallel else dxs[0]
        torch.manual_seed(7)
        h, w = case.h.clone().requires_grad_(), case.w.clone().requires_grad_()
        loss: Any = cutefce.linear_cross_entropy(h, w, case.y, **options, **SAMPLED)
        found, wanted = (losses[0], dx, torch.cat(dws)), gradients(case, loss, h, w)
        for got, want in zip(found, wanted, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-10)


def test_ranks_draw_classes_of_one_device(ranks: Ranks) -> None:
    """Of 8192 classes each rank estimates the log-sum-exps of half of 4096."""
    case = random_case(20, 8, 8192, dtype=torch.float64, logit_std=2.0)
    (_, dx, first), (_, _, second) = ranks.run(2, share, case, (4096, 4096), False, {})
    torch.manual_seed(7)
    h, w = case.h.clone().requires_grad_(), case.w.clone().requires_grad_()
    loss: Any = cutefce.linear_cross_entropy(h, w, case.y, **SAMPLED)
    _, want_dx, want_dw = gradients(case, loss, h, w)
    torch.testing.assert_close(dx, want_dx, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(torch.cat([first, second]), want_dw, rtol=1e-9, atol=1e-10)


def share_on_models(*arguments: Any) -> Share:
    """Return this rank's results on models of the kernels."""
    with pytest.MonkeyPatch.context() as patch:
        serve_calls(patch, arch_named("sm_90a"), SMALL_TILES, selects=True)
        return share(*arguments)


@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1}], ids=str)
@layouts
def test_kernels_of_ranks_keep_the_entries_of_one_device(
    sizes: tuple[int, ...], sequence_parallel: bool, options: dict[str, Any], ranks: Ranks
) -> None:
    case = random_case(60, 24, 333, dtype=torch.bfloat16, logit_std=2.0)
    results = ranks.run(len(sizes), share_on_models, case, sizes, sequence_parallel, options)
    losses, dxs, dws = zip(*results, strict=True)
    dx = torch.cat(dxs) if sequence_parallel else dxs[0]
    torch.manual_seed(7)
    h, w = case.h.clone().requires_grad_(), case.w.clone().requires_grad_()
    loss: Any = cutefce.linear_cross_entropy(h, w, case.y, **options, **SAMPLED)
    found, wanted = (losses[0], dx, torch.cat(dws)), gradients(case, loss, h, w)
    torch.testing.assert_close(found[0], wanted[0], rtol=1e-5, atol=1e-5)
    for got, want in zip(found[1:], wanted[1:], strict=True):
        ulp = torch.finfo(torch.bfloat16).eps
        error = float((got.double() - want.double()).norm())
        assert error <= ulp * float(want.double().norm())
