"""TODO.

Exponentials in the place of dW, which is not written before the backward.

dW's rows are written window after window, from the first on: those of window j end at byte
(j + 1)·W·D·e of V·D·e, with W columns a window and e bytes an element.  The exponentials of m
windows, N·W·e bytes each, lie at the end of these bytes in the same order, window j's at
V·D·e - (m - j)·N·W·e.  If that is (j + 1)·W·D·e or more for each of them, none is overwritten
before it was used.  As both sides are linear in j, the first and the last one decide:

    m·N·W <= (V - W)·D        and        m·W·D <= V·D - N·W

What is computed again lies at the end of these bytes too, while the rows that follow leave it room.

Sizes may be symbolic integers of a graph compiler.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    pass
if TYPE_CHECKING:
    pass


ALIGNMENT = 8
"""Rows that those in place are a multiple of: 16 bytes of exponentials in 16 bits."""


def rows_in_place(rows: int, *, narrow: bool) -> int:
    """Return for how many of a gradient's rows it has room for the sums."""
    return rows // 2 // ALIGNMENT * ALIGNMENT if narrow else rows


def max_aliased_windows(tokens: int, hidden: int, vocab: int, window: int) -> int:
    """Return m, the number of windows that dW (V, D) has room for."""
    if vocab <= window or tokens < 1:
        return 0
    by_first = (vocab - window) * hidden // (tokens * window)
    by_last = (vocab * hidden - tokens * window) // (window * hidden)
    return max(0, min(by_first, by_last))


def fits_in_tail(rows: int, tokens: int, hidden: int, vocab: int, columns: int) -> bool:
    """Whether the exponentials of `columns` fit in what follows the first `rows` of dW (V, D)."""
    return rows * hidden + tokens * columns <= vocab * hidden
