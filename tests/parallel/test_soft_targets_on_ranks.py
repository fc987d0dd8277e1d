"""Wrong soft targets of ranks, each of which owns other classes."""

import pytest
import torch
import torch.distributed as dist

import cutefce
from tests.parallel.test_options_on_ranks import shares
from tests.support.options import OptionsCase, soft_case
from tests.support.ranks import Ranks, group


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
