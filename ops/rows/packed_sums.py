"""Sums over products, which may be packed in 24 or 20 bits.

R rows, D hidden.  The functions are of plain torch, so that a compiler can fuse them: of words of
upper halves, and of bytes of the low bits beside, see `Sums`.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Sums(NamedTuple):
    """Sums (R, D), in their own dtype, or float32 ones in 24 or 20 bits, rounded to nearest even.

    Of 24 bits, `upper` has the upper halves, and `low` (R, D) the next bytes.  Of 20 bits, `low`
    (R, D / 2) has the next four bits of two columns in a byte, those of the even column below.
    """

    upper: Tensor
    """(R, D): of 16 bits with `low`."""
    low: Tensor | None = None
    """uint8; None if all of the sums is in `upper`."""

    def rows(self, rows: slice) -> "Sums":
        """Return the sums of a slice of rows."""
        return Sums(self.upper[rows], None if self.low is None else self.low[rows])

    @property
    def words(self) -> Tensor:
        """`upper` as words, int16 or int32, one for each byte of `low`."""
        is_pair = self.low is not None and self.low.shape[1] < self.upper.shape[1]
        return self.upper.view(torch.int32 if is_pair else torch.int16)


def write(words: Tensor, low: Tensor | None, parts: list[Tensor]) -> None:
    """Write float32 sums to `words` and `low`, see `Sums`; `parts` are those of a place of a word.

    That is one part for all columns, or those of the even and of the odd ones.  Without `low`, sums
    are rounded to bfloat16.
    """
    bits, upper, lower = 0 if low is None else 8 // len(parts), [], []
    for i, part in enumerate(parts):
        rounded = _rounded(part, bits)
        halves = rounded >> 16
        if i + 1 < len(parts):
            halves.bitwise_and_(0xFFFF)
        upper.append(halves.bitwise_left_shift_(16 * i))
        lower.append(rounded.bitwise_right_shift_(16 - bits).bitwise_and_((1 << bits) - 1))
        lower[i].bitwise_left_shift_(bits * i)
    words.copy_(upper[0] if len(parts) == 1 else upper[0].bitwise_or_(upper[1]))
    if low is not None:
        low.copy_(lower[0] if len(parts) == 1 else lower[0].bitwise_or_(lower[1]))


def _rounded(sums: Tensor, low_bits: int) -> Tensor:
    """Return the bits of float32 `sums` so that the first 16 + `low_bits` are rounded."""
    bits, drop = sums.view(torch.int32), 16 - low_bits
    rounded = (bits >> drop).bitwise_and_(1).add_(bits).add_((1 << drop - 1) - 1)
    return rounded.masked_fill_(sums.isnan(), 0x7FC00000)  # a carry would make it another number


def join(words: Tensor, low: Tensor, place: int) -> Tensor:
    """Return the float32 sums at `place` of each word."""
    low_bits = 16 // words.element_size()
    upper = words.to(torch.int32, copy=True)
    upper.bitwise_right_shift_(16 * place).bitwise_left_shift_(16)
    lower = low.to(torch.int32).bitwise_right_shift_(low_bits * place)
    lower.bitwise_and_((1 << low_bits) - 1).bitwise_left_shift_(16 - low_bits)
    return upper.bitwise_or_(lower).view(torch.float32)


def add_packed_to_(out: Tensor, words: Tensor, low: Tensor, factor: Tensor) -> None:
    """Add `factor` () times the packed sums (R, D) to `out` (R, D), rounded once; see `Sums`."""
    count = words.element_size() // 2
    for i in range(count):
        out[:, i::count].add_(join(words, low, i).mul_(factor))
