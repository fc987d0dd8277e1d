"""Keeping float32 sums in 16 bits and low bits, as the portable path does it."""

from torch import Tensor

from cutefce.ops.primitives.portable_gradients import PortableGradients
from cutefce.ops.rows.kept_sums import Sums


def split_sums(kept: Tensor, low: Tensor, sums: Tensor) -> None:
    """Write float32 `sums` (N, D) to `kept` (N, D), of 16 bits, and `low` uint8; see `Sums`."""
    PortableGradients(16).combine(Sums(kept, low), sums)
