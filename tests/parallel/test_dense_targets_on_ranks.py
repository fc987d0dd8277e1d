"""Probabilities of all classes, of which each rank has those of its own classes."""

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import cutefce
from tests.parallel.test_options_on_ranks import SIZES, WORKSPACES, assert_equal_one, shares
from tests.parallel.test_soft_targets_on_ranks import NAMES
from tests.parallel.test_vocab_parallel import part
from tests.support.options import OptionsCase, dense_case
from tests.support.ranks import Ranks, each_value, mesh


def losses(x: OptionsCase, sequence_parallel: bool | None) -> list[tuple[Tensor, ...]]:
    """Return loss and gradients of every reduction and workspace; of one process if None."""
    results = []
    for reduction in ("mean", "none"):
        for workspace in WORKSPACES[:2]:
            leaves = x.leaves
            options = x.with_leaves(leaves)
            if sequence_parallel is not None:
                leaves, options = shares(x, sequence_parallel)
                options["target"] = part(options["target"].t(), SIZES).t()
            loss = cutefce.linear_cross_entropy(
                leaves[0], leaves[1], **options, reduction=reduction, workspace=workspace
            )
            upstream = x.case.upstream.to(loss.dtype) if loss.ndim else None
            results.append((loss.detach(), *torch.autograd.grad(loss, leaves, upstream)))
    return results


@each_value(name=["softcap", "label_smoothing"], sequence_parallel=[False, True])
def test_losses_equal_one_process(name: str, sequence_parallel: bool, ranks: Ranks) -> None:
    x = dense_case(NAMES[name], 60, 16, 333, dtype=torch.float64)
    results = ranks.run(2, losses, x, sequence_parallel)
    assert_equal_one(results, losses(x, None), sequence_parallel, len(x.leaves))


@each_value(names=[["linear_bias", "z_loss"], ["linear_bias"]])
def test_no_class_of_a_rank_can_be(names: list[str], ranks: Ranks) -> None:
    """Tokens without probabilities above 0 have no lead there."""
    x = dense_case(names, 60, 16, 333, dtype=torch.float64)
    x.options["linear_bias"][:180], probs = -torch.inf, x.options["target"]
    probs[:, :180], probs[1::4], probs[::2] = 0, -probs[1::4], 0
    results = ranks.run(2, losses, x, False)
    assert_equal_one(results, losses(x, None), False, len(x.leaves))


def distributed(x: OptionsCase) -> tuple[Tensor, str, str]:
    """Return the loss of DTensors, and the errors of other shards than the weight's."""
    tp = mesh()["tp"]
    h = distribute_tensor(x.case.h, tp, [Replicate()])
    w = distribute_tensor(x.case.w, tp, [Shard(0)])
    target = distribute_tensor(x.options["target"], tp, [Shard(1)])
    loss = cutefce.linear_cross_entropy(h, w, target)
    messages = []
    for other in (target.redistribute(placements=[Shard(0)]), x.options["target"]):
        with pytest.raises((TypeError, ValueError)) as caught:
            cutefce.linear_cross_entropy(h, w, other)
        messages.append(str(caught.value))
    return loss, messages[0], messages[1]


def test_distributed_probabilities(ranks: Ranks) -> None:
    x = dense_case([], 60, 16, 332, dtype=torch.float64)
    want = cutefce.linear_cross_entropy(x.case.h, x.case.w, x.options["target"])
    for loss, placement, shape in ranks.run(4, distributed, x):
        torch.testing.assert_close(loss, want)
        assert placement.startswith("target: got probabilities with placements (Shard(dim=0),)")
        assert shape.startswith("target: got dtype torch.float64 of shape (60, 332)")
