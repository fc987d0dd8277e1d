"""Keeping float32 sums in 16 bits and low bits, as the portable path does it."""

from torch import Tensor

from cutefce.ops.rows.kept_sums import split_, words_of


def split_sums(kept: Tensor, low: Tensor, sums: Tensor) -> None:
    """Write float32 `sums` (N, D) to `kept` (N, D), of 16 bits, and `low` uint8; see `split_`."""
    split_(words_of(kept, low), low, sums)
