"""Keeping float32 sums in 16 bits and low bits, as the portable path does it."""

import torch
from torch import Tensor

from cutefce.ops.primitives.portable_gradients import PortableGradients
from cutefce.ops.rows.packed_sums import Sums, join


def split_sums(packed: Tensor, low: Tensor, sums: Tensor) -> None:
    """Write float32 `sums` (N, D) to `packed` (N, D), of 16 bits, and `low` uint8; see `Sums`."""
    PortableGradients().combine(Sums(packed, low), sums)


def joined_sums(packed: Tensor, low: Tensor) -> Tensor:
    """Return the float32 sums (R, D) of `packed` and `low`."""
    words = Sums(packed, low).words
    parts = [join(words, low, i) for i in range(words.element_size() // 2)]
    return parts[0] if len(parts) == 1 else torch.stack(parts, 2).flatten(1)
