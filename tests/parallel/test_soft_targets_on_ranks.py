"""Soft targets whose classes different ranks own."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import cutefce
from tests.parallel.test_options_on_ranks import WORKSPACES, assert_equal_one, shares
from tests.support.options import OptionsCase, soft_case
from tests.support.ranks import Ranks, each_value, group

NAMES = {
    "nothing": [],
    "all factors": ["linear_bias", "weight", "token_weights", "z_loss", "temperature (N,)"],
}
NAMES |= {name: [*NAMES["all factors"], name] for name in ("softcap", "label_smoothing")}


def losses(x: OptionsCase, sequence_parallel: bool | None) -> list[tuple[Tensor, ...]]:
    """Return loss and gradients of every reduction and workspace; of one process if None."""
    results = []
    for reduction in ("mean", "none"):
        for workspace in WORKSPACES:
            leaves = x.leaves
            options = x.with_leaves(leaves)
            if sequence_parallel is not None:
                leaves, options = shares(x, sequence_parallel)
            loss = cutefce.linear_cross_entropy(
                leaves[0], leaves[1], **options, reduction=reduction, workspace=workspace
            )
            upstream = x.case.upstream.to(loss.dtype) if loss.ndim else None
            results.append((loss.detach(), *torch.autograd.grad(loss, leaves, upstream)))
    return results


@each_value(names=NAMES, sequence_parallel=[True, False])
def test_losses_equal_one_process(names: list[str], sequence_parallel: bool, ranks: Ranks) -> None:
    x = soft_case(names, 6, 60, 16, 333, dtype=torch.float64)
    results = ranks.run(2, losses, x, sequence_parallel)
    assert_equal_one(results, losses(x, None), sequence_parallel, len(x.leaves))


def narrow_losses(x: OptionsCase) -> list[tuple[Tensor, ...]]:
    return losses(x, False)


def test_ranks_are_as_accurate_as_one(ranks: Ranks) -> None:
    """In 16 bits, exponentials of soft targets are stored as 0 by the ranks that own them."""
    x = soft_case([], 6, 60, 16, 333, dtype=torch.bfloat16)
    first, second = ranks.run(2, narrow_losses, x)
    for a, b, one in zip(first, second, losses(x, None), strict=True):
        torch.testing.assert_close(a[0], one[0])
        torch.testing.assert_close(a[1], one[1], rtol=2**-6, atol=2**-10)
        torch.testing.assert_close(torch.cat([a[2], b[2]]), one[2], rtol=2**-6, atol=2**-10)


def errors(x: OptionsCase) -> list[str]:
    """Return the messages of calls with bad values, or values of one rank's own."""
    messages = []
    leaves, options = shares(x, False)
    probs, index = options["target_probs"], options["target_indices"]
    for change in (
        {"target_probs": torch.where(probs == probs.max(), -1, probs)},
        {"target_indices": index.masked_fill(probs == probs.max(), 333)},
        {"target_probs": probs + dist.get_group_rank(group(2), dist.get_rank())},
    ):
        with pytest.raises((IndexError, ValueError)) as caught:
            cutefce.linear_cross_entropy(leaves[0], leaves[1], **(options | change))
        messages.append(str(caught.value))
    return messages


def test_errors_are_those_of_all_ranks(ranks: Ranks) -> None:
    x = soft_case([], 6, 60, 16, 333, dtype=torch.float64)
    for found in ranks.run(2, errors, x):
        for name, message in zip(
            ("target_probs", "target_indices", "target_probs"), found, strict=True
        ):
            assert message.startswith(f"{name}: ")
