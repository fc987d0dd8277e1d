"""How many exponentials fit into the memory of a gradient that is written later.

dW is not written before the backward, and then window after window, from the first row on: the rows
of window j end at byte (j + 1)·W·D·e of V·D·e, with W columns a window and e bytes an element.  The
exponentials of m windows, N·W·e bytes each, occupy the end of these bytes in the same order, window
j's from V·D·e - (m - j)·N·W·e on.  If that is at least (j + 1)·W·D·e for each of them, none is
overwritten before its use.  Both sides are linear in j, so the first and the last window decide:

    m·N·W <= (V - W)·D        and        m·W·D <= V·D - N·W

Recomputed exponentials use the end of these bytes too, as long as the remaining rows leave room.
"""

FINISHED_ROWS = 1024
"""Rows of dX whose sums are widened at a time when gradients in forward are finished."""


def max_aliased_windows(tokens: int, hidden: int, vocab: int, window: int) -> int:
    """Return m, the number of windows whose exponentials fit into dW (V, D)."""
    if vocab <= window or tokens < 1:
        return 0
    by_first = (vocab - window) * hidden // (tokens * window)
    by_last = (vocab * hidden - tokens * window) // (window * hidden)
    return max(0, min(by_first, by_last))


def fits_in_tail(rows: int, tokens: int, hidden: int, vocab: int, columns: int) -> bool:
    """Whether exponentials (N, `columns`) fit after the first `rows` of dW (V, D)."""
    return rows * hidden + tokens * columns <= vocab * hidden
