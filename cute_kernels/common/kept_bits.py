"""The 24 bits that are kept of a float32: 16 in the memory of a 16-bit element, and a byte.

The 16 bits are the upper half, cut off.  The byte is the next 8 bits, whose last one is set if any
bit below was: rounding to odd, which keeps NaN and infinities.  Eight numbers are four words of
upper halves and two words of bytes.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

LOWEST_BYTES = 0x00FF00FF
"""The lower byte of each half of a word."""


@cute.jit
def split_eight(values: cute.Tensor) -> Any:
    """Return the upper halves (4,) and the bytes (2,) of float32 `values` (8,), as words."""
    bits = cute.recast_tensor(values, Int32)
    halves, bytes_ = cute.make_rmem_tensor((4,), Int32), cute.make_rmem_tensor((2,), Int32)
    rounded = cute.make_rmem_tensor((4,), Int32)
    for i in cutlass.range_constexpr(4):
        halves[i] = bytes_of(bits[2 * i], bits[2 * i + 1], 0x7632)
        lower = bytes_of(bits[2 * i], bits[2 * i + 1], 0x5410)
        # the sums carry into the bytes that are kept where those below are not 0
        rounded[i] = lower | ((lower & LOWEST_BYTES) + LOWEST_BYTES)
    for i in cutlass.range_constexpr(2):
        bytes_[i] = bytes_of(rounded[2 * i], rounded[2 * i + 1], 0x7531)
    return halves, bytes_


@cute.jit
def join_eight(halves: cute.Tensor, bytes_: cute.Tensor) -> cute.Tensor:
    """Return the float32 numbers (8,) of upper halves (4,) and bytes (2,)."""
    values = cute.make_rmem_tensor((8,), Float32)
    bits = cute.recast_tensor(values, Int32)
    for i in cutlass.range_constexpr(4):
        # two bytes, then zeros
        pair = bytes_[i // 2] & 0xFFFF if i % 2 == 0 else (bytes_[i // 2] >> 16) & 0xFFFF
        bits[2 * i] = bytes_of(halves[i], pair, 0x1046)
        bits[2 * i + 1] = bytes_of(halves[i], pair, 0x3256)
    return values


def bytes_of(low: Any, high: Any, chosen: int) -> Any:
    """Return a word of four bytes of two words; digit i of `chosen` (hex) is the place of byte i.

    Bytes 0 to 3 are those of `low`, 4 to 7 those of `high`.
    """
    return Int32(cute.arch.prmt(low, high, chosen))
