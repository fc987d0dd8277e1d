"""Train two encoders with InfoNCE, whose negatives are the pairs of all ranks.

    python -m examples.contrastive
    torchrun --nproc-per-node 2 -m examples.contrastive

A contrastive loss is a linear cross entropy: the "classes" of a query are the keys, and its target
is its own key.  So the embeddings of one side are the hidden states, those of the other side the
weight, and no matrix of similarities is made.  On several ranks each has its part of both sides,
which is what `group` and `sequence_parallel` are for: no embedding is gathered by hand.
"""

import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import cutefce
from examples.training import fit

FEATURES, SIZE, PAIRS, STEPS = 32, 16, 128, 60


def contrastive_loss(
    queries: Tensor,
    keys: Tensor,
    log_scale: Tensor,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Return the mean loss () of the pairs of all ranks, from queries to keys and back.

    The loss is the same on every rank, and the gradients of a parameter are parts that add up.  So
    beside DDP, which averages them, multiply the loss by the number of ranks.

    Args:
        queries: (B, D) embeddings of this rank's pairs, of length 1.
        keys: (B, D) the same of their other sides.
        log_scale: () minus the logarithm of the temperature.
        group: ranks, each with B pairs; None for one process.
    """
    ranks = 1 if group is None else dist.get_world_size(group)
    own = torch.arange(ranks * len(queries), device=queries.device)
    options: dict[str, Any] = {"group": group, "sequence_parallel": True} if ranks > 1 else {}
    scaled = queries * log_scale.exp()  # a `temperature` would be a constant
    forth: Tensor = cutefce.linear_cross_entropy(scaled, keys, own, **options)
    back: Tensor = cutefce.linear_cross_entropy(keys, scaled, own, **options)
    return (forth + back) / 2


def train(steps: int = STEPS, group: dist.ProcessGroup | None = None) -> list[float]:
    """Train two linear encoders on noisy views of the same vectors, and return the losses."""
    rank = 0 if group is None else dist.get_rank(group)
    generator = torch.Generator().manual_seed(0)
    views = torch.randn(2, FEATURES, FEATURES, generator=generator)
    torch.manual_seed(0)
    encoders = nn.ModuleList(nn.Linear(FEATURES, SIZE) for _ in range(2))
    log_scale = nn.Parameter(torch.tensor(1.0))
    generator.manual_seed(1 + rank)  # each rank has pairs of its own

    def loss() -> Tensor:
        same = torch.randn(PAIRS, FEATURES, generator=generator)
        noise = 0.1 * torch.randn(2, PAIRS, FEATURES, generator=generator)
        sides = [
            F.normalize(encoder((same + more) @ view), dim=-1)
            for encoder, more, view in zip(encoders, noise, views, strict=True)
        ]
        return contrastive_loss(sides[0], sides[1], log_scale, group)

    return fit([*encoders.parameters(), log_scale], loss, steps, group)


def main() -> None:
    """Train, on the ranks of torchrun if it started this process."""
    if "RANK" not in os.environ:
        train()
        return
    dist.init_process_group("gloo")
    train(group=dist.group.WORLD)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
