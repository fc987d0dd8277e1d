"""Model parallelism: a call whose vocabulary is sharded over a group of ranks.

Rank k of a group of R holds the rows [f_k, f_k + V_k) of the weight, the V_k being any numbers;
targets are global ids, the same on every rank.  The steps of `ops.primitives` run on each shard,
and what they need of the others is exchanged in between:

    h        under sequence parallelism: all-gather of the tokens, in the forward and again in
             the backward, so that nobody keeps all of them
    r_i      one rank has it: all-reduce of (N,), and of how many ranks have it, which is 1
    S_i      all-gather of each shard's sum with its reference, (2, N).  A row that lies far above
             its target may do so on one rank alone; all ranks join the same R pairs in the same
             order, so that ρ, S, T and the loss have the same bits everywhere
    dX       sum in the dtype of sums, rounded once afterwards: reduce-scatter, and all-gather
             unless tokens are sharded.  GradAccumulator of rounded parts would miss one device's accuracy
    dW       nothing: rows belong to one rank.  The target's part belongs to the rank that has r_i
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from cutefce.ops.parallel.consistency import exchange, resolve
from cutefce.ops.parallel.primitives import ShardPrimitives
from cutefce.ops.primitives import rows
from cutefce.ops.primitives.dispatch import backend_for
from cutefce.ops.primitives.interface import Primitives
from cutefce.ops.primitives.rows import Targets

IGNORED = -(1 << 62)
"""The local index of ignored targets; those of other ranks' targets lie outside [0, V_k), too."""


class Unsharded:
    """A call on one device: nothing is shared."""

    def gather(self, h: Tensor) -> Tensor:
        """Return the hidden states of all tokens (N, D)."""
        return h

    def make_targets(
        self, y: Tensor, vocab: int, ignore_index: int, denominator: Tensor | None
    ) -> Targets:
        """Return the targets y (N,) as rows of the weight (vocab, D) that is here."""
        return rows.make_targets(y, vocab, ignore_index, denominator)

    def primitives(self, own: Primitives) -> Primitives:
        """Return `own` with what others have to say."""
        return own

    def reduce_dx(self, dx: Tensor) -> Tensor:
        """Return the sums that this rank finishes, of the part of dX (N, D) that it found."""
        return dx

    def gather_dx(self, rows: Tensor, tokens: int) -> Tensor:
        """Return dX of the `tokens` that are here, of the `rows` that this rank finished."""
        return rows

    def finish_dx(self, dx: Tensor, dtype: torch.dtype) -> Tensor:
        """Return dX of the tokens that are here, of the part (N, D) that this rank found."""
        return self.gather_dx(self.reduce_dx(dx).to(dtype), len(dx))


@dataclass(frozen=True)
class VocabShard(Unsharded):
    """One rank's part of a call."""

    group: str
    rank: int
    vocab: tuple[int, ...]
    """Rows of every rank's weight."""
    sequence_parallel: bool

    @property
    def first(self) -> int:
        """The global id of the first row here."""
        return sum(self.vocab[: self.rank])

    def gather(self, h: Tensor) -> Tensor:
        """Return the hidden states of all tokens (N, D), of a shard (N / R, D) or of all."""
        return self.all_gather(h).flatten(0, 1) if self.sequence_parallel else h

    def make_targets(
        self, y: Tensor, vocab: int, ignore_index: int, denominator: Tensor | None
    ) -> Targets:
        """Number the targets y (N,) from the first row here; what is wrong is found later."""
        index = torch.where(y == ignore_index, IGNORED, y - self.first)
        return Targets(index, vocab, IGNORED, denominator)

    def primitives(self, own: Primitives) -> Primitives:
        """Return `own`, joined with the other shards' results."""
        return cast(Primitives, ShardPrimitives(own, self))

    def reduce_dx(self, dx: Tensor) -> Tensor:
        """Add the ranks' parts (N, D); each rank has N / R rows of the sum, rounded up."""
        beyond = -len(dx) % len(self.vocab)
        return self.reduce_scatter(F.pad(dx, (0, 0, 0, beyond)) if beyond else dx)

    def gather_dx(self, rows: Tensor, tokens: int) -> Tensor:
        """Gather the ranks' rows (N / R, D), unless tokens are sharded; they are rounded by then.

        Less is moved than by an all-reduce of sums.
        """
        return rows if self.sequence_parallel else self.all_gather(rows).flatten(0, 1)[:tokens]

    def all_gather(self, x: Tensor) -> Tensor:
        """Return every rank's x (...) as (R, ...)."""
        ops, ranks = torch.ops._c10d_functional, len(self.vocab)
        rows = ops.all_gather_into_tensor(x.contiguous(), ranks, self.group)
        return cast(Tensor, ops.wait_tensor(rows).view(ranks, *x.shape))

    def all_reduce_(self, x: Tensor) -> Tensor:
        """Replace x by its sum over the ranks."""
        ops = torch.ops._c10d_functional
        return cast(Tensor, ops.wait_tensor(ops.all_reduce_(x, "sum", self.group)))

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """Return this rank's rows (N / R, ...) of the sum of x (N, ...) over the ranks."""
        ops = torch.ops._c10d_functional
        rows = ops.reduce_scatter_tensor(x, "sum", len(self.vocab), self.group)
        return cast(Tensor, ops.wait_tensor(rows))


def shard_of(
    group: str | None,
    shards: Sequence[int] | None,
    sequence_parallel: bool,
    h: Tensor,
    w: Tensor,
    **same: Any,
) -> Unsharded:
    """Return this rank's part of a call; raise on every rank if the ranks' calls differ.

    Args:
        group: name of the process group; None for a call on one device.
        shards: rows of every rank's weight; None if they are as many as here.
        sequence_parallel: whether h holds a part of the tokens.
        h: (N, D) or, if `sequence_parallel`, (N / R, D).
        w: (V_k, D).
        same: whatever else has to be the same on every rank.
    """
    if group is None:
        return Unsharded()
    process_group = resolve(group)
    rank, ranks = process_group.rank(), process_group.size()
    same = {
        "sequence_parallel": sequence_parallel,
        "rows of h": h.shape[0],
        "hidden size": h.shape[1],
        "dtype of h": str(h.dtype),
        "rows of w, or shards": list(shards or [w.shape[0]]),
        # kernels and the portable path exchange other sums
        "primitives": backend_for(h, w).name,
        **same,
    }
    for other, told in enumerate(exchange(process_group, same, cached=h.is_cuda)):
        for name, value in same.items():
            if told[name] != value:
                raise ValueError(
                    f"{name}: got {told[name]} on rank {other} of the group and {value} on rank "
                    f"{rank}, expected the same on every rank"
                )
    return VocabShard(group, rank, tuple(shards or [w.shape[0]] * ranks), sequence_parallel)
