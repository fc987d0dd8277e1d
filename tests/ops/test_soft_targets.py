"""Soft targets: a few classes of each token with probabilities."""

import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import cutefce
from cutefce.cute_kernels.config import PortableTiles
from tests.support.options import (
    OptionsCase,
    assert_results_as_accurate,
    exact,
    soft_case,
)

EACH: dict[str, list[str]] = {
    "nothing": [],
    "smoothing and all factors": [
        "linear_bias",
        "weight",
        "label_smoothing",
        "token_weights",
        "z_loss",
        "logit_scale",
        "temperature (N,)",
    ],
    "softcap and all factors": [
        "linear_bias",
        "weight",
        "token_weights",
        "z_loss",
        "negative logit_scale",
        "softcap",
        "temperature (N,)",
    ],
}
each = pytest.mark.parametrize("names", EACH.values(), ids=list(EACH))
classes = pytest.mark.parametrize("classes", [1, 7, 64])
workspaces = pytest.mark.parametrize("workspace", ["min", 100_000, "max", None])
SIZES = 150, 16, 333


def loss_of(x: OptionsCase, leaves: tuple[Tensor, ...], **more: Any) -> Tensor:
    return cutefce.linear_cross_entropy(leaves[0], leaves[1], **x.with_leaves(leaves), **more)


def results(x: OptionsCase, **more: Any) -> tuple[Tensor, ...]:
    leaves = x.leaves
    loss = loss_of(x, leaves, **more)
    return loss.detach(), *torch.autograd.grad(loss, leaves)


@workspaces
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@classes
@each
def test_equals_float64(
    names: list[str],
    classes: int,
    reduction: str,
    workspace: Any,
    small_tiles: PortableTiles,
    device: str,
) -> None:
    x = soft_case(names, classes, *SIZES, dtype=torch.float64, device=device)
    options: dict[str, Any] = {"reduction": reduction}
    for got, want in zip(x.ours(**options, workspace=workspace), exact(x, **options), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-11)
