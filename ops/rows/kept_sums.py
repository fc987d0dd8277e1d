"""Sums that are kept in 24 or 20 bits, in plain torch functions that a compiler can fuse.

R or N rows, D hidden.  Functions that write do so to their first arguments: words of upper halves,
and bytes of the low bits beside, see `split_`.
"""

import torch
from torch import Tensor


def keep_dw_(
    words: Tensor,
    low: Tensor,
    sums: Tensor,
    slot: Tensor,
    factor: Tensor | None,
    totals: Tensor,
    row: Tensor | None,
) -> None:
    """Keep sums_v + totals_slot_v (R, D) in `words` and `low`; see `split_`.

    With `factor` (R,) and `row` (1, D), factor_v row is added.
    """
    _keep(words, low, _parts(sums, words), slot, factor, totals, row)


def add_to_kept_dw_(words: Tensor, low: Tensor, sums: Tensor, *rest: Tensor | None) -> None:
    """Do what `keep_dw_` does, and add what `words` and `low` keep."""
    parts = [_joined(words, low, i).add_(x) for i, x in enumerate(_parts(sums, words))]
    _keep(words, low, parts, *rest)  # type: ignore[arg-type]


def _keep(
    words: Tensor,
    low: Tensor,
    parts: list[Tensor],
    slot: Tensor,
    factor: Tensor | None,
    totals: Tensor,
    row: Tensor | None,
) -> None:
    """Do what `keep_dw_` does of the `parts` of sums."""
    added: list[Tensor] = []
    while parts:  # each is freed when it is added
        i, count = len(added), words.element_size() // 2
        total = totals[:, i::count][slot].add_(parts.pop(0))
        if factor is not None and row is not None:
            total.addcmul_(factor[:, None], row[:, i::count])
        added.append(total)
    _write(words, low, added)


def joined_sums(kept: Tensor, low: Tensor) -> Tensor:
    """Return the float32 sums (N, D) of `kept` and `low`."""
    words = words_of(kept, low)
    parts = [_joined(words, low, i) for i in range(words.element_size() // 2)]
    return parts[0] if len(parts) == 1 else torch.stack(parts, 2).flatten(1)


def words_of(kept: Tensor, low: Tensor) -> Tensor:
    """Return 16-bit `kept` (N, D) as words, one for each byte of `low`, (N, D) or (N, D / 2)."""
    return kept.view(torch.int32 if low.shape[1] < kept.shape[1] else torch.int16)


def split_(words: Tensor, low: Tensor, sums: Tensor) -> None:
    """Write float32 `sums` (N, D), rounded to nearest, ties to even, to 24 or 20 bits.

    Of 24 bits, `words` (N, D) int16 are the upper halves, and `low` (N, D) uint8 the next bytes.
    Of 20 bits, `words` and `low` (N, D / 2) hold those of an even and the next column: `words`
    int32 the upper halves, `low` uint8 the next four bits, those of the even column below.
    """
    _write(words, low, _parts(sums, words))


def add_to_kept_(words: Tensor, low: Tensor, sums: Tensor) -> None:
    """Add float32 `sums` (N, D) to what `words` and `low` keep; see `split_`."""
    parts = [_joined(words, low, i).add_(x) for i, x in enumerate(_parts(sums, words))]
    _write(words, low, parts)


def scale_kept_rows_(words: Tensor, low: Tensor, scale: Tensor) -> None:
    """Multiply the kept sums (R, D) by `scale` (R,); see `split_`."""
    count = words.element_size() // 2
    _write(words, low, [_joined(words, low, i).mul_(scale[:, None]) for i in range(count)])


def _parts(sums: Tensor, words: Tensor) -> list[Tensor]:
    """Return the columns of `sums` (N, D) by their place in a word: all, or even and odd ones."""
    count = words.element_size() // 2
    return [sums[:, i::count] for i in range(count)]


def _write(words: Tensor, low: Tensor, parts: list[Tensor]) -> None:
    """Do what `split_` does of the `parts` of sums."""
    bits, upper, lower = 8 // len(parts), [], []
    for i, part in enumerate(parts):
        rounded = _rounded(part, bits)
        halves = rounded >> 16
        if i + 1 < len(parts):
            halves.bitwise_and_(0xFFFF)
        upper.append(halves.bitwise_left_shift_(16 * i))
        lower.append(rounded.bitwise_right_shift_(16 - bits).bitwise_and_((1 << bits) - 1))
        lower[i].bitwise_left_shift_(bits * i)
    words.copy_(upper[0] if len(parts) == 1 else upper[0].bitwise_or_(upper[1]))
    low.copy_(lower[0] if len(parts) == 1 else lower[0].bitwise_or_(lower[1]))


def _rounded(sums: Tensor, low_bits: int) -> Tensor:
    """Return the bits of float32 `sums` so that the first 16 + `low_bits` are rounded."""
    bits, drop = sums.view(torch.int32), 16 - low_bits
    rounded = (bits >> drop).bitwise_and_(1).add_(bits).add_((1 << drop - 1) - 1)
    return rounded.masked_fill_(sums.isnan(), 0x7FC00000)  # a carry would make it another number


def _joined(words: Tensor, low: Tensor, place: int) -> Tensor:
    """Return the float32 sums at `place` of each word."""
    low_bits = 16 // words.element_size()
    upper = words.to(torch.int32, copy=True)
    upper.bitwise_right_shift_(16 * place).bitwise_left_shift_(16)
    lower = low.to(torch.int32).bitwise_right_shift_(low_bits * place)
    lower.bitwise_and_((1 << low_bits) - 1).bitwise_left_shift_(16 - low_bits)
    return upper.bitwise_or_(lower).view(torch.float32)


def scale_kept_(words: Tensor, low: Tensor, scale: Tensor) -> None:
    """Write scale_v times the kept sums (R, D), rounded to bfloat16, to `words`."""
    count, scaled = words.element_size() // 2, []
    for i in range(count):
        part = _joined(words, low, i).mul_(scale[:, None]).to(torch.bfloat16)
        scaled.append(part.view(torch.int16).to(words.dtype))
        if i + 1 < count:
            scaled[i].bitwise_and_(0xFFFF)
        scaled[i].bitwise_left_shift_(16 * i)
    words.copy_(scaled[0] if count == 1 else scaled[0].bitwise_or_(scaled[1]))


def add_kept_to_(out: Tensor, words: Tensor, low: Tensor, factor: Tensor) -> None:
    """Add `factor` () times the kept sums (R, D) to `out` (R, D), rounded once; see `split_`."""
    count = words.element_size() // 2
    for i in range(count):
        out[:, i::count].add_(_joined(words, low, i).mul_(factor))
