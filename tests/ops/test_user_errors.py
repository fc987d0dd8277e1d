"""Every error that a user can cause names the argument, what was got and what is expected."""

from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

import cutefce

H, W, Y = torch.randn(4, 8), torch.randn(10, 8), torch.tensor([0, 1, 2, -100])

WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "h without dimensions": (
        {"h": torch.tensor(1.0)},
        ValueError,
        r"input: got shape \(\), expected",
    ),
    "h of another width": ({"h": H[:, :7]}, ValueError, r"input: got shape \(4, 7\), .* 8\)"),
    "w not a matrix": (
        {"w": W[0]},
        ValueError,
        r"linear_weight: got shape \(8,\), .*sharded parameter",
    ),
    "w without rows": ({"w": W[:0]}, ValueError, r"linear_weight: got shape \(0, 8\), .*V >= 1"),
    "w emptied by sharding": (
        {"w": torch.empty(0)},
        ValueError,
        r"linear_weight: got shape \(0,\)",
    ),
    "y of another length": ({"y": Y[:3]}, ValueError, r"target: got shape \(3,\), expected \(4,\)"),
    "integer h": ({"h": H.long()}, TypeError, r"input: got dtype torch.int64, expected .*bfloat16"),
    "w of another dtype": (
        {"w": W.bfloat16()},
        TypeError,
        r"linear_weight: got dtype .*bfloat16.*autocast",
    ),
    "floating y": (
        {"y": Y.float()},
        TypeError,
        r"target: got dtype torch.float32, expected integers",
    ),
    "boolean y": ({"y": Y > 0}, TypeError, r"target: got dtype torch.bool, expected integers"),
    "w on another device": (
        {"w": W.to("meta")},
        ValueError,
        r"linear_weight: got device meta, .*cpu",
    ),
    "sparse w": ({"w": W.to_sparse()}, TypeError, r"linear_weight: got layout torch.sparse_coo"),
    "unknown reduction": ({"reduction": "avg"}, ValueError, r"reduction: got 'avg', expected"),
    "unknown workspace": ({"workspace": "huge"}, ValueError, r"workspace: got 'huge', expected"),
    "negative workspace": ({"workspace": -1}, ValueError, r"workspace: got -1, expected"),
    "denominator without a mean": (
        {"denominator": torch.tensor(2.0), "reduction": "sum"},
        ValueError,
        'denominator: got one with reduction=.sum., expected "mean"',
    ),
    "denominators": ({"denominator": torch.ones(4)}, ValueError, r"denominator: got shape \(4,\)"),
    "a denominator with a gradient": (
        {"denominator": torch.tensor(2.0, requires_grad=True)},
        ValueError,
        r"denominator: got one that requires grad, expected denominator.detach\(\)",
    ),
    "shards without a group": ({"shards": [5, 5]}, ValueError, "shards: got .* without a group"),
    "sequence parallelism without a group": (
        {"sequence_parallel": True},
        ValueError,
        "sequence_parallel: got True without a group",
    ),
    "an unknown group": ({"group": "nobody"}, ValueError, "group: got 'nobody', expected"),
    "target too large": (
        {"y": Y + 8},
        IndexError,
        r"target: got 10, expected 0 <= target < 10",
    ),
    "target negative": ({"y": Y - 1}, IndexError, r"target: got -1, .*ignore_index=-100"),
}


@pytest.mark.parametrize(("change", "error", "message"), WRONG.values(), ids=WRONG)
def test_wrong_arguments(change: dict[str, Any], error: type[Exception], message: str) -> None:
    arguments: dict[str, Any] = {"h": H, "w": W, "y": Y} | change
    tensors = [arguments.pop(name) for name in ("h", "w", "y")]
    with pytest.raises(error, match=message):
        torch.ops.cutefce.loss(*tensors, **arguments)


@pytest.mark.parametrize("group", ["a name", torch.distributed.GroupMember.NON_GROUP_MEMBER])
def test_what_is_no_group_is_refused(group: Any) -> None:
    with pytest.raises(TypeError, match=r"group: got .*, expected a ProcessGroup that this rank"):
        cutefce.linear_cross_entropy(H, W, Y, group=group)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("linear_bias", torch.zeros(10)),
        ("weight", torch.ones(10)),
        ("label_smoothing", 0.1),
        ("options", object()),
    ],
)
def test_unserved_arguments_are_refused_by_name(name: str, value: Any) -> None:
    options: dict[str, Any] = {name: value}
    with pytest.raises(NotImplementedError, match=f"^{name}: "):
        cutefce.linear_cross_entropy(H, W, Y, **options)


@pytest.mark.parametrize(("name", "value"), [("bias", True), ("out_features", (2,))])
def test_unserved_module_arguments_are_refused_by_name(name: str, value: Any) -> None:
    options: dict[str, Any] = {name: value}
    with pytest.raises(NotImplementedError, match=f"^{name}: "):
        cutefce.LinearCrossEntropyLoss(8, 10, **options)


def test_sharded_tensors_are_refused(tmp_path: Any) -> None:
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    try:
        w = DTensor.from_local(W, init_device_mesh("cpu", (1,)), [Replicate()])
        with pytest.raises(TypeError, match=r"got a DTensor .*full_tensor"):
            cutefce.linear_cross_entropy(H, w, Y)
    finally:
        torch.distributed.destroy_process_group()
