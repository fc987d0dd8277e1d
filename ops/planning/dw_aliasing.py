"""How many exponentials fit into the memory of a gradient that is written later.

dW is not written before the backward, and then window after window, from the first row on.  With N
tokens, D hidden and V vocab, rows of dW have D elements and a column of exponentials has N.  The
exponentials of the first L columns occupy the end of dW's memory, in the order of their columns.
Columns [c, c') are a window if its exponentials, and all after them, begin behind the c' rows that
are written while they are read:

    V·D - N·(L - c) >= D·c'

The widest windows therefore grow by N / D each, from V - N·L / D columns on.  Their widths are
linear in c, so no window is narrower than `least` columns if the first and the last are not:

    N·L <= D·(V - least)        and        D·L <= V·D - N·least

Recomputed exponentials use the end of this memory too.  At column c, w more of them fit if
w·N <= (V - c - w)·D: windows shrink as fewer rows remain.
"""

from dataclasses import dataclass
from math import log

from cutefce.cute_kernels.integers import ceil_div, round_up

FINISHED_ROWS = 1024
"""Rows of dX whose sums are widened at a time when gradients in forward are finished."""


@dataclass(frozen=True)
class DwMemory:
    """The memory of dW (V, D) as room for exponentials of N tokens."""

    tokens: int
    hidden: int
    vocab: int
    block: int
    """Windows are multiples of this many columns, or end with the vocabulary."""

    def most_aliased(self, least: int) -> int:
        """Return L, the columns that fit with windows of `least` and more, whole blocks."""
        if self.vocab <= least or self.tokens < 1:
            return 0
        by_first = (self.vocab - least) * self.hidden // self.tokens
        by_last = (self.vocab * self.hidden - self.tokens * least) // self.hidden
        return max(0, min(by_first, by_last) // self.block * self.block)

    def aliased_widths(self, columns: int) -> list[int]:
        """Return the widths of the widest windows of the first `columns`, which fit."""
        widths: list[int] = []
        first = 0
        while first < columns:
            end = self.vocab - ceil_div(self.tokens * (columns - first), self.hidden)
            end = min(end // self.block * self.block, columns)
            assert end > first, "no more than `most_aliased`"
            widths.append(end - first)
            first = end
        return widths

    def recomputed_widths(self, first: int, least: int) -> list[int]:
        """Return the widths of windows from column `first` on.

        They are as wide as what remains of the memory; where that is less than `least` columns,
        windows have about the same width, at most `least`, and need memory of their own.
        """
        widths: list[int] = []
        while first < self.vocab:
            width = self.widest(first)
            if width < least:
                rest = self.vocab - first
                even = round_up(ceil_div(rest, ceil_div(rest, least)), self.block)
                return widths + [min(even, rest - done) for done in range(0, rest, even)]
            widths.append(width)
            first += width
        return widths

    def buffer_columns(self, first: int, least: int) -> int:
        """Return the widest of these that needs memory of its own, rounded up to blocks."""
        last = widest = 0
        for width in self.recomputed_widths(first, least):
            last += width
            if not self.fits(first + last, width):
                widest = max(widest, width)
        return round_up(widest, self.block)

    def widest(self, first: int) -> int:
        """Return how many columns from `first` on fit behind their rows, whole blocks."""
        rest = max(self.vocab - first, 0) * self.hidden
        return rest // max(self.tokens + self.hidden, 1) // self.block * self.block

    def fits(self, rows: int, columns: int) -> bool:
        """Whether exponentials (N, `columns`) fit behind the first `rows` of dW."""
        return rows * self.hidden + self.tokens * columns <= self.vocab * self.hidden

    def window_count(self, aliased: int, recomputed: int, least: int) -> float:
        """Estimate the number of windows of `aliased` first and `recomputed` last columns.

        It ignores blocks, so that it grows with both.
        """
        growth, windows = self.tokens / max(self.hidden, 1), 0.0
        if aliased:
            start = max(self.vocab - growth * aliased, 1)
            ratio = 1 + aliased * (growth - 1) / start
            flat = abs(growth - 1) < 1e-6 or ratio <= 0
            windows += aliased / start if flat else max(log(ratio) / log(growth), 1)
        narrow = min(recomputed, least * (1 + growth))  # of these, no `least` fit
        if recomputed > narrow:
            windows += log(recomputed / narrow) / log((1 + growth) / max(growth, 1e-6))
        return windows + narrow / least
