"""Hidden states that Megatron gathered from the ranks of sequence parallelism."""

import torch
import torch.distributed as dist
from torch import Tensor

GATHERED = "_GatherFromSequenceParallelRegionBackward"
"""Megatron's node that adds the gradients of all ranks."""


def of_gathered(hidden: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Return hidden states whose gradient is divided by the ranks of a group.

    Each rank has the whole gradient by them, and the gathering's backward adds those of all ranks.

    Args:
        hidden: what was gathered, or a view or a copy of it.
        group: that of tensor parallelism; None is one rank.

    Raises:
        NotImplementedError: for hidden states of several ranks that need a gradient and were not
            gathered.
    """
    ranks = 1 if group is None else dist.get_world_size(group)
    if ranks == 1 or not (hidden.requires_grad and torch.is_grad_enabled()):
        return hidden
    node = hidden.grad_fn
    while node is not None and type(node).__name__ != GATHERED:
        parents = node.next_functions
        node = parents[0][0] if len(parents) == 1 else None
    if node is None:
        raise NotImplementedError(
            "hidden: got states that were not gathered from the ranks of tensor parallelism, "
            "expected sequence_parallel=True"
        )
    own = hidden.view_as(hidden)
    own.register_hook(lambda gradient: gradient / ranks)
    return own
