"""Packed float32: 16 bits in the memory of a 16-bit element, and 4 or 8 beside.

A number is rounded to nearest, ties to even, to 24 or 20 bits.  The first 16 of them are the upper
half.  The others, its low bits, are a byte; or two columns of four bits share one, the even column
in the lower half.  Eight numbers are four words of upper halves and eight or four bytes.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint8
from cutlass.cute.runtime import make_fake_tensor

QUIET_NAN = 0x7FC00000
"""A NaN that rounding does not change."""


def low_signature(rows: Any, columns: Any, low_bits: int, alignment: int) -> Any:
    """Return a fake tensor of the low bits of sums (rows, columns).

    Its rows begin at multiples of `alignment` bytes.
    """
    bytes_ = columns if low_bits == 8 else cute.sym_int(divisibility=4)
    pitch = cute.sym_int64(divisibility=alignment)
    return make_fake_tensor(Uint8, (rows, bytes_), (pitch, 1), assumed_align=alignment)


@cute.jit
def split_eight(values: cute.Tensor, low_bits: int) -> Any:
    """Return the upper halves (4,) of float32 `values` (8,) and bytes of low bits (8 or 4,).

    NaN stay NaN if arithmetic gave them.
    """
    bits = cute.recast_tensor(values, Int32)
    rounded = cute.make_rmem_tensor((8,), Int32)
    drop = 16 - low_bits
    for i in cutlass.range_constexpr(8):
        # rounding would carry the NaN of arithmetic, 0x7FFFFFFF, into the sign
        number = cutlass.min(bits[i], Int32(QUIET_NAN))
        rounded[i] = number + ((1 << drop - 1) - 1) + ((number >> drop) & 1)
    halves = cute.make_rmem_tensor((4,), Int32)
    bytes_ = cute.make_rmem_tensor((low_bits,), Uint8)
    low = cute.recast_tensor(bytes_, Int32)
    for i in cutlass.range_constexpr(4):
        halves[i] = bytes_of(rounded[2 * i], rounded[2 * i + 1], 0x7632)
    if cutlass.const_expr(low_bits == 8):
        for i in cutlass.range_constexpr(2):
            low[i] = second_bytes(rounded, (4 * i, 4 * i + 1, 4 * i + 2, 4 * i + 3))
    else:
        even, odd = second_bytes(rounded, (0, 2, 4, 6)), second_bytes(rounded, (1, 3, 5, 7))
        low[0] = ((even >> 4) & 0x0F0F0F0F) | (odd & ~0x0F0F0F0F)
    return halves, bytes_


@cute.jit
def join_eight(halves: cute.Tensor, bytes_: cute.Tensor, low_bits: int) -> cute.Tensor:
    """Return the float32 numbers (8,) of upper halves (4,) and bytes of low bits (8 or 4,)."""
    low = cute.recast_tensor(bytes_, Int32)
    values = cute.make_rmem_tensor((8,), Float32)
    bits = cute.recast_tensor(values, Int32)
    for i in cutlass.range_constexpr(4):
        if cutlass.const_expr(low_bits == 8):
            # two bytes, then zeros
            pair = low[i // 2] & 0xFFFF if i % 2 == 0 else (low[i // 2] >> 16) & 0xFFFF
            bits[2 * i] = bytes_of(halves[i], pair, 0x1046)
            bits[2 * i + 1] = bytes_of(halves[i], pair, 0x3256)
        else:
            # the upper half of a byte, then zeros
            even = low[0] << 4 if i == 0 else low[0] >> 8 * i - 4
            bits[2 * i] = bytes_of(halves[i], even & 0xF0, 0x1045)
            odd = low[0] if i == 0 else low[0] >> 8 * i
            bits[2 * i + 1] = bytes_of(halves[i], odd & 0xF0, 0x3245)
    return values


def second_bytes(words: cute.Tensor, chosen: tuple[int, int, int, int]) -> Any:
    """Return a word of the second-lowest bytes of four of the words."""
    first, second, third, fourth = (words[i] for i in chosen)
    return bytes_of(bytes_of(first, second, 0x0051), bytes_of(third, fourth, 0x0051), 0x5410)


def bytes_of(low: Any, high: Any, chosen: int) -> Any:
    """Return a word of four bytes of two words; digit i of `chosen` (hex) is the place of byte i.

    Bytes 0 to 3 are those of `low`, 4 to 7 those of `high`.
    """
    return Int32(cute.arch.prmt(low, high, chosen))
