"""defer: hooks of accelerate and functions of einops; `tests/deferral` has what torch does."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import cutefce
from cutefce.integrations.deferral.logits import DeferredLogits
from tests.support.deferral import TOKENS, Model, assert_same, step


def test_hooks_of_accelerate_come_and_go() -> None:
    hooks = pytest.importorskip("accelerate.hooks")
    model = Model()
    expected = model(TOKENS)
    for first in (True, False):
        if first:
            cutefce.defer(model)
        hooks.add_hook_to_module(model.head, hooks.ModelHook())
        if not first:
            cutefce.defer(model)
        assert isinstance(model(TOKENS), DeferredLogits)
        hooks.remove_hook_from_module(model.head)
        assert isinstance(model(TOKENS), DeferredLogits)
        cutefce.undefer(model)
        assert torch.equal(model(TOKENS), expected)


def test_einops_rearranges_deferred_logits() -> None:
    einops = pytest.importorskip("einops")

    def rearranged(logits: Any, targets: Tensor) -> Tensor:
        return F.cross_entropy(einops.rearrange(logits, "b n c -> b c n"), targets)

    def flattened(logits: Any, targets: Tensor) -> Tensor:
        return F.cross_entropy(einops.rearrange(logits, "b n c -> (b n) c"), targets.flatten())

    def reduced(logits: Any, targets: Tensor) -> Tensor:
        mean: Tensor = einops.reduce(logits.square(), "b n c -> ()", "mean")
        return mean.sum()

    for use, fused in ((rearranged, 1), (flattened, 1), (reduced, 0)):
        model = Model()
        loss, theirs = step(model, use)
        cutefce.defer(model)
        ours, mine = step(model, use)
        torch.testing.assert_close(ours, loss, rtol=1e-6, atol=0)
        assert_same(mine, theirs)
        assert cutefce.deferral_report(model).fused == fused
