"""What the module checks and shows."""

from typing import Any

import pytest
import torch
from torch.nn.utils import prune

import cutefce

WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "no hidden size": ({"in_features": 0}, ValueError, "in_features: got 0, expected 1 or more"),
    "half a class": ({"num_classes": 2.5}, TypeError, r"num_classes: got 2.5 \(float\), expected"),
    "a bool": ({"num_classes": True}, TypeError, r"num_classes: got True \(bool\), expected an"),
    "fewer than no classes": ({"num_classes": -3}, ValueError, "num_classes: got -3, expected 1"),
    "one size": ({"out_features": 3}, TypeError, r"out_features: got 3 \(int\), expected a tuple"),
    "an empty dimension": (
        {"out_features": (3, 0)},
        ValueError,
        "out_features: got 0, expected 1 or more",
    ),
    "no integers": (
        {"out_features": (3, "4")},
        TypeError,
        "out_features: got '4' among them, expected integers",
    ),
    "a tensor as bias": ({"bias": torch.ones(10)}, TypeError, "bias: got .*, expected a bool"),
    "weights of other classes": (
        {"weight": torch.ones(9)},
        ValueError,
        r"weight: got shape \(9,\), expected \(10,\)",
    ),
    "integer weights": (
        {"weight": torch.ones(10).long()},
        TypeError,
        "weight: got dtype torch.int64, expected one of bfloat16, float16, float32, float64",
    ),
    "sparse weights": ({"weight": torch.ones(10).to_sparse()}, TypeError, "weight: got layout"),
}


def test_a_pruned_head_is_refused_with_advice() -> None:
    module = cutefce.LinearCrossEntropyLoss(8, 10)
    h, y = torch.randn(4, 8), torch.randint(10, (4,))
    prune.l1_unstructured(module.linear, "weight", 0.3)
    with pytest.raises(TypeError, match=r"^linear: got hooks, .* torch.nn.utils.prune.remove"):
        module(h, y)
    prune.remove(module.linear, "weight")
    module(h, y).backward()


def test_a_module_shows_its_classes_where_its_head_does_not() -> None:
    assert "num_classes=50" in repr(cutefce.LinearCrossEntropyLoss(8, 50, out_features=(3, 2)))


@pytest.mark.parametrize(("change", "kind", "message"), WRONG.values(), ids=WRONG)
def test_sizes_are_checked_by_name(
    change: dict[str, Any], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=f"^{message}"):
        cutefce.LinearCrossEntropyLoss(**{"in_features": 8, "num_classes": 10, **change})


def test_class_weights_of_a_loss_of_k_dimensions_are_those_of_classes() -> None:
    head = cutefce.LinearCrossEntropyLoss(8, 10, out_features=(3,), weight=torch.arange(10.0))
    assert head.linear.weight.shape == (30, 8)
    assert head(torch.randn(4, 8), torch.randint(10, (4, 3))).shape == ()
