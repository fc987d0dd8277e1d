"""Heads that a module or a call refuses, with advice."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.nn.utils import prune

import cutefce

H, Y = torch.randn(4, 8), torch.tensor([0, 1, 2, -100])


class Adapted(nn.Linear):
    """A layer that does more than a product."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * 2


def with_hook(linear: nn.Linear) -> nn.Module:
    linear.register_forward_hook(lambda *_: None)
    return linear


def pruned(linear: nn.Linear) -> nn.Module:
    prune.l1_unstructured(linear, "weight", 0.3)
    return linear


LINEARS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "hooks": (lambda: with_hook(nn.Linear(8, 10, bias=False)), "hooks"),
    "pruned": (lambda: pruned(nn.Linear(8, 10, bias=False)), "hooks"),
    "another forward": (lambda: Adapted(8, 10, bias=False), "Adapted"),
    "another module": (lambda: nn.Sequential(nn.Linear(8, 10)), "Sequential"),
}


@pytest.mark.parametrize(("make", "got"), LINEARS.values(), ids=LINEARS)
def test_modules_refuse_a_head_that_they_would_not_call(
    make: Callable[[], nn.Module], got: str
) -> None:
    module = cutefce.LinearCrossEntropyLoss(8, 10)
    module.linear = make()  # type: ignore[assignment]
    advice = r".*torch\.nn\.utils\.prune\.remove"
    message = rf"^linear: got {got}, expected a torch\.nn\.Linear without hooks{advice}"
    with pytest.raises(TypeError, match=message):
        module(H, Y)


def test_a_head_is_served_after_its_pruning_is_removed() -> None:
    module = cutefce.LinearCrossEntropyLoss(8, 10)
    pruned(module.linear)
    prune.remove(module.linear, "weight")
    expected = nn.functional.cross_entropy(module.linear(H), Y)
    torch.testing.assert_close(module(H, Y), expected)


def test_parametrized_heads_are_served() -> None:
    module = cutefce.LinearCrossEntropyLoss(8, 10)
    module.linear = nn.utils.parametrizations.weight_norm(module.linear, name="weight")
    expected = nn.functional.cross_entropy(module.linear(H), Y)
    torch.testing.assert_close(module(H, Y), expected)


def test_a_replicated_weight_is_refused(tmp_path: Path) -> None:
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    try:
        mesh = init_device_mesh("cpu", (1,))
        w = DTensor.from_local(torch.randn(10, 8), mesh, [Replicate()])
        message = r"^linear_weight: got a DTensor .*expected \(Shard\(0\),\).*full_tensor"
        with pytest.raises(TypeError, match=message):
            cutefce.linear_cross_entropy(H, w, Y)
    finally:
        torch.distributed.destroy_process_group()


WRONG_HEADS = {
    "a scalar": torch.tensor(1.0),
    "one dimension": torch.randn(8),
    "one number": torch.randn(1),
    "three dimensions": torch.randn(2, 2, 8),
    "no class": torch.randn(0, 8),
    "no feature": torch.randn(10, 0),
    "transposed": torch.randn(8, 2),
    "nested": torch.nested.nested_tensor([torch.randn(8), torch.randn(8)]),
    "sparse": torch.randn(10, 8).to_sparse(),
}


@pytest.mark.parametrize(
    "more",
    [{"kept_classes": torch.tensor([[3, -1]] * 4)}, {"top_k": 3}, {"outputs": ["argmax"]}],
    ids=lambda more: next(iter(more)),
)
@pytest.mark.parametrize("wrong", WRONG_HEADS.values(), ids=WRONG_HEADS)
def test_values_of_classes_have_the_errors_of_other_calls(
    wrong: Tensor, more: dict[str, Any]
) -> None:
    """Of a wrong weight, whose number of classes says nothing of the classes that are given."""
    with pytest.raises((TypeError, ValueError), match=r"^linear_weight: ") as expected:
        cutefce.linear_log_probs(H, wrong, Y)
    with pytest.raises(expected.type, match=f"^{re.escape(str(expected.value))}$"):
        cutefce.linear_log_probs(H, wrong, Y, **more)
