"""Sampled gradients: how a token's entries are chosen, and those that were."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sampling:
    """How entries (i, v) of the exponentials are chosen, see `cutefce.ops.sampling.gradients`."""

    seed: Tensor
    """(2,) int32: its bits are the two words of the seed."""
    samples: int
    """1/θ: entries that a token expects to keep, or fewer."""
    rows: Tensor
    """(N,) int64: the tokens' numbers in the call, before ignored ones are left out."""
    vocab: int
    """Classes of all ranks."""


@dataclass(frozen=True)
class Samples:
    """The entries (i, v), v not the target, that were chosen of N tokens, K at most of each."""

    columns: Tensor
    """(N, K) int32: v, a row of this rank's weight, ascending."""
    exps: Tensor
    """(N, K) e / q in the dtype of sums, relative to the reference ρ_i."""
    counts: Tensor
    """(N,) int32: entries of each token, the first ones of its row; what is beyond is undefined."""
    estimate: Tensor
    """(N,) of lse."""
    exact: Tensor
    """(N,) bool: the token is done exactly, of all columns, and no entries were chosen of it."""

    def with_terms(self, columns: Tensor, terms: Tensor) -> "Samples":
        """Return these and, before them, `terms` (N, K) of `columns` (N, K); not in their order."""
        counts = self.counts + terms.shape[1] * (terms != 0).any(1).to(self.counts.dtype)
        columns = torch.cat([columns.to(self.columns.dtype), self.columns], 1)
        exps = torch.cat([terms, self.exps], 1)
        return replace(self, columns=columns, exps=exps, counts=counts)
