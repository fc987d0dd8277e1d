"""Sampled gradients: how a token's entries are chosen."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Sampling:
    """How entries (i, v) of the exponentials are chosen, see `cutefce.ops.sampling`."""

    seed: Tensor
    """(2,) int32: its bits are the two words of the seed."""
    samples: int
    """1/θ: entries that a token expects to keep, or fewer."""
    rows: Tensor
    """(N,) int64: the tokens' numbers in the call, before ignored ones are left out."""
    vocab: int
    """Classes of all ranks."""
