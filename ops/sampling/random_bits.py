"""Random bits of sampled gradients in plain torch, for verification and tests of the kernels.

They are a hash of (seed, token, class), the same on every device.

With all arithmetic modulo 2^32, and a seed of two words,

    fmix(x)   x ^= x >> 16;  x *= 0x7FEB352D;  x ^= x >> 15;  x *= 0x846CA68B;  x ^= x >> 16
    state     fmix(seed_0 ^ (row * 0x9E3779B1)) ^ seed_1           once a row
    bits      fmix(state ^ (column * 0x85EBCA77))                  once a logit

Entry (row, column) is kept if bits < q 2^32, both as float32, and always if q ≥ 1.  So a class with
0 < q < 2^-32 is kept with probability 2^-32, and other probabilities are rounded to multiples of
2^-32 or, from 2^-8 on, to 24 bits: what a token's softmax gains is less than V 2^-32 / samples.
"""

import torch
from torch import Tensor

from cutefce.cute_kernels.spec.sampling import (
    COLUMN_FACTOR,
    MIX_FACTORS,
    ROW_FACTOR,
)


def row_states(seed: Tensor, rows: Tensor) -> Tensor:
    """Return the hash states (N,) int32 of token numbers `rows` (N,)."""
    states = _mix_((rows.to(torch.int32) * _signed(ROW_FACTOR)).bitwise_xor_(seed[0]))
    return states.bitwise_xor_(seed[1])


def random_bits(states: Tensor, columns: Tensor) -> Tensor:
    """Return the bits (R, C) int32 of rows' `states` (R,) and of global ids `columns` (C,)."""
    return _mix_(states[:, None] ^ (columns.to(torch.int32) * _signed(COLUMN_FACTOR)))


def _mix_(x: Tensor) -> Tensor:
    """Return fmix of x, int32, in its memory."""
    x ^= (x >> 16) & 0xFFFF  # a shift of int32 copies its sign
    x *= _signed(MIX_FACTORS[0])
    x ^= (x >> 15) & 0x1FFFF
    x *= _signed(MIX_FACTORS[1])
    x ^= (x >> 16) & 0xFFFF
    return x


def _signed(word: int) -> int:
    """Return the int32 that has the bits of `word`."""
    return word - (1 << 32) if word >> 31 else word
