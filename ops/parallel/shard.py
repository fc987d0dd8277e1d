"""A call whose vocabulary is sharded over a group of ranks, and one on a single device.

Rank k of R holds the rows [f_k, f_k + V_k) of the weight; the V_k may differ, and targets are
global ids, the same on every rank.  Each shard runs the steps of `ops.primitives`; in between the
ranks exchange

    h        with sequence parallelism: all-gather of the tokens, in the forward and again in the
             backward, so that no rank keeps all of them
    y_i      with kernels, all-reduce of (N,): how many ranks compute a token
    r_i      all-reduce of (2, N): the logit of the rank that owns the target, and the number of
             owners, which must be 1; with soft targets then one of (N,), each rank's part of their
             excess over r_i
    w_v      all-reduce of (3072, D) where lse is estimated: rows that it is estimated of
    S_i      all-gather of (2, N): each shard's sum and its reference.  Every rank reduces the same
             R pairs in the same order, so that ρ, S, T and the loss are bitwise equal everywhere
    dX       reduce-scatter in the dtype of sums, then rounding, then all-gather unless tokens are
             sharded; adding rounded parts would be less accurate than one device
    dW       nothing: each row belongs to one rank, and so does the target's part
"""

import ctypes
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from cutefce.ops import torch_compat
from cutefce.ops.interface.arguments import Sharding
from cutefce.ops.outputs.reductions import PartialOutputs
from cutefce.ops.parallel.consistency import exchange
from cutefce.ops.primitives.dispatch import backend_of
from cutefce.ops.rows.targets import Targets


@dataclass(frozen=True)
class VocabShard:
    """One rank's part of a call; without a group, the whole call on one device."""

    group: str = ""
    rank: int = 0
    vocab: tuple[int, ...] = ()
    """Rows of every rank's weight, of a group."""
    sequence_parallel: bool = False

    @property
    def count(self) -> int:
        """How many ranks there are."""
        return len(self.vocab)

    @property
    def first(self) -> int:
        """The global id of this rank's first row."""
        return sum(self.vocab[: self.rank])

    def ranks(self) -> "VocabShard | None":
        """Return the ranks that programs exchange with; None on one device."""
        return self if self.group else None

    def classes(self) -> slice | None:
        """Return the global ids of this rank's rows; None for all of one device."""
        if not self.group:
            return None
        return slice(self.first, self.first + self.vocab[self.rank])

    def total_vocab(self, w: Tensor) -> int:
        """Return the number of classes of all ranks' weights, w (V, D) being here."""
        return sum(self.vocab) if self.group else w.shape[0]

    def gather_hidden(self, h: Tensor) -> Tensor:
        """Return the hidden states of all tokens (N, D), from a share (N / R, D) or from all."""
        return self.all_gather(h).flatten(0, 1) if self.sequence_parallel else h

    def counted(self, y: Tensor, ignored: int) -> Tensor:
        """Return (N,) int64, `ignored` where no rank's target y (N,) counts.

        It is the same on all ranks, so that `target_logit` finds targets that differ.
        """
        if not self.group:
            return y
        counts = self.all_reduce_((y != ignored).int())
        return torch.where(counts > 0, ignored ^ 1, ignored)

    def sum_of_ranks(self, x: Tensor) -> Tensor:
        """Return the sum of all ranks' x, the same bits on every rank."""
        return self.all_reduce_(x.clone()) if self.group else x

    def of_first_rank(self, x: Tensor) -> Tensor:
        """Return the x of the group's first rank."""
        return self.sum_of_ranks(x if self.rank == 0 else torch.zeros_like(x))

    def target_logit(self, logit: Tensor, targets: Targets) -> Tensor:
        """Return r (N,): +inf for ignored tokens alone, NaN for targets of no rank or of several.

        Raises:
            IndexError: on a CPU, on every rank, for such a target, or one that some ranks ignore.
        """
        here, ranks = targets.owned, len(self.vocab)
        # an owner counts 1, and a rank that ignores the token more than all ranks could as owners
        count = torch.where(targets.active, here.to(logit.dtype), ranks + 1)
        found = torch.stack([torch.where(here, logit, 0), count])
        logit, count = self.all_reduce_(found)
        ignored = count == ranks * (ranks + 1)
        wrong = ~ignored & (count != 1)
        if wrong.device.type == "cpu" and bool(wrong.any()):
            row = int(wrong.nonzero()[0])
            target = int(targets.index[row]) + targets.first
            raise IndexError(
                f"target: got {target if bool(targets.active[row]) else 'ignore_index'}, expected "
                f"0 <= target < {sum(self.vocab)} or ignore_index, on every rank"
            )
        return torch.where(ignored, torch.inf, torch.where(wrong, torch.nan, logit))

    def partial_outputs(self, own: PartialOutputs) -> PartialOutputs:
        """Return those of all ranks, one part each."""
        own = own.combined()
        if own.column is not None:
            own = own._replace(column=own.column + self.first)
        given = torch.cat([x for x in own if x is not None], 1)
        # contiguous parts of a token are added in the same order for all tokens
        parts = iter(self.all_gather(given).permute(2, 1, 0).contiguous())
        return PartialOutputs(*(None if x is None else next(parts) for x in own))

    def join_columns(self, x: Tensor) -> Tensor:
        """Return the x (N, K) of all ranks, side by side (N, R K)."""
        return self.all_gather(x).transpose(0, 1).flatten(1)

    def finish_dx(self, dx: Tensor, dtype: torch.dtype) -> Tensor:
        """Return dX of this rank's tokens, rounded to `dtype`, from its part (N, D).

        Each rank adds up and rounds N / R rows, rounded up.
        """
        if not self.group:
            return dx.to(dtype)
        tokens, padding = len(dx), -len(dx) % len(self.vocab)
        rows = self.reduce_scatter(F.pad(dx, (0, 0, 0, padding)) if padding else dx).to(dtype)
        return rows if self.sequence_parallel else self.all_gather(rows).flatten(0, 1)[:tokens]

    def all_gather(self, x: Tensor) -> Tensor:
        """Return the x (...) of every rank as (R, ...)."""
        return torch_compat.all_gather(x, len(self.vocab), self.group)

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """Return this rank's rows (N / R, ...) of the sum of x (N, ...) over the ranks."""
        return torch_compat.reduce_scatter(x, len(self.vocab), self.group)

    def all_reduce_(self, x: Tensor) -> Tensor:
        """Replace x by its sum over the ranks."""
        return torch_compat.all_reduce_(x, self.group)


ALONE = VocabShard()
"""A call on one device."""


def shard_of(sharding: Sharding, h: Tensor, w: Tensor, **same: Any) -> VocabShard:
    """Return this rank's part of a call; raise on every rank if the ranks' calls differ.

    Args:
        sharding: the group and its shards.
        h: (N, D), or (N / R, D) with sequence parallelism.
        w: (V_k, D).
        same: further values that must be the same on every rank, by the names that errors use.
            Of tensors, values are compared on a CPU, and dtypes and shapes alone on a GPU, which
            is not synchronized.
    """
    if sharding.group is None:
        return ALONE
    process_group = torch_compat.resolve_process_group(sharding.group)
    rank, ranks = torch_compat.place_in_group(sharding.group)
    shards: Sequence[int] | None = sharding.shards
    same = {
        "sequence_parallel": sharding.sequence_parallel,
        "rows of input": h.shape[0],
        "hidden size": h.shape[1],
        "dtype of input": str(h.dtype),
        "rows of linear_weight, or shards": list(shards or [w.shape[0]]),
        # kernels exchange sums of another form, and beside Triton tokens may be in another order
        "primitives": backend_of(h, w).name,
        **{name: _known(x) for name, x in same.items()},
    }
    for other, values in enumerate(exchange(process_group, same, cached=h.is_cuda)):
        for name, value in same.items():
            got = values.get(name)  # calls of other targets have other names
            if got != value:
                raise ValueError(
                    f"{name}: got {got} on rank {other} of the group and {value} on rank {rank}, "
                    "expected the same on every rank"
                )
    vocab = tuple(shards or [w.shape[0]] * ranks)
    return VocabShard(sharding.group, rank, vocab, sharding.sequence_parallel)


def _known(x: Any) -> Any:
    """Return what is known of x without a synchronization: of a tensor on a CPU also its values."""
    if not isinstance(x, Tensor):
        return x
    kind = f"{x.dtype} of shape {tuple(x.shape)}"
    if x.device.type != "cpu":
        return kind
    if not x.ndim:
        return f"{x.item()} ({x.dtype})"
    x = x.detach().contiguous()
    values = ctypes.string_at(x.data_ptr(), x.nbytes)
    return f"{kind} with hash {hashlib.blake2b(values, digest_size=8).hexdigest()}"
