"""TODO."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which values of `dtype` are summed."""
    return torch.promote_types(dtype, torch.float32)


class Targets:
    """The targets of N rows, and which of them count; what is not asked for is not computed."""

    def __init__(
        self, index: Tensor, vocab: int, ignore_index: int, denominator: Tensor | None = None
    ) -> None:
        self.index = index
        """(N,) int64 as given: may hold ignored and out-of-range values."""
        self.vocab = vocab
        self.ignore_index = ignore_index
        self.denominator = denominator
        """() what "mean" divides by; None for the number of active rows."""

    @cached_property
    def active(self) -> Tensor:
        """(N,) bool: the row is not ignored."""
        return self.index != self.ignore_index

    @cached_property
    def address(self) -> Tensor:
        """(N,) int64 within [0, V): what may be used to read or write memory."""
        return self.index.clamp(0, self.vocab - 1)

    def weight(self, reduction: str, dtype: torch.dtype) -> Tensor:
        """Return () what each active row's loss counts for in the reduced loss."""
        if reduction == "mean" and self.denominator is not None:
            share = self.denominator.to(dtype).reciprocal()
            return torch.where(self.denominator == 0, 0, share)
        if reduction == "mean":
            return self.active.sum().clamp(min=1).to(dtype).reciprocal()
        return torch.ones((), dtype=dtype, device=self.index.device)

    def reduce(self, losses: Tensor, reduction: str) -> Tensor:
        """Reduce per-token losses (N,); the mean over no active token is 0."""
        if reduction == "none":
            return losses
        return losses.sum() * self.weight(reduction, losses.dtype)

    def rows(self, rows: slice) -> "Targets":
        """Return the targets of some rows."""
        return Targets(self.index[rows], self.vocab, self.ignore_index, self.denominator)


@dataclass(frozen=True)
class Stats:
    """What is known of every row after the forward, in the dtype of sums."""

    rows: Tensor
    """(4, N): what the properties return."""

    @property
    def reference(self) -> Tensor:
        """(N,) ρ, what stored and recomputed exponentials are relative to; +inf if ignored."""
        return self.rows[0]

    @property
    def sum(self) -> Tensor:
        """(N,) S, the exponentials of all columns but the target's; 0 where another rank has it."""
        return self.rows[1]

    @property
    def total(self) -> Tensor:
        """(N,) T, which has the target's own exponential too."""
        return self.rows[2]

    @property
    def loss(self) -> Tensor:
        """(N,) each row's loss, 0 if ignored."""
        return self.rows[3]


def locate(y: Tensor, vocab: int, ignore_index: int, denominator: Tensor | None = None) -> Targets:
    """Tell which targets count, and where; raise for one outside [0, V), unless it is on a GPU."""
    targets = Targets(y.contiguous(), vocab, ignore_index, denominator)
    if y.device.type == "cpu":
        wrong = targets.active & (targets.address != y)
        if bool(wrong.any()):
            raise IndexError(
                f"y: got target {int(y[wrong][0])}, expected 0 <= target < {vocab} "
                f"or ignore_index={ignore_index}"
            )
    return targets
