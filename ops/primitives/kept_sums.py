"""Float32 sums in 24 bits, in torch: 16 bits in the memory of a 16-bit gradient, and a byte.

The 16 bits are the upper half, cut off.  The byte is the next 8 bits, whose last one is set if any
bit below was.
"""

import torch
from torch import Tensor


def split_sums(kept: Tensor, low: Tensor, sums: Tensor) -> None:
    """Write float32 `sums` (N, D) to `kept` (N, D), of 16 bits, and `low` (N, D) uint8."""
    halves, parts = sums.view(torch.int16), sums.view(torch.uint8)
    kept.view(torch.int16).copy_(halves[:, 1::2])
    torch.bitwise_or(parts[:, 1::4], parts[:, ::4] != 0, out=low)


def joined_sums(kept: Tensor, low: Tensor) -> Tensor:
    """Return the float32 sums (N, D) of `kept` and `low`."""
    sums = kept.new_zeros(low.shape, dtype=torch.float32)
    sums.view(torch.int16)[:, 1::2] = kept.view(torch.int16)
    sums.view(torch.uint8)[:, 1::4] = low
    return sums
