"""Heads that a module or a call refuses, with advice."""

from collections.abc import Callable
from pathlib import Path

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
