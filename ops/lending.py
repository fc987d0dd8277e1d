"""Exponentials in the place of dW, which is not written before the backward.

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
    from torch import Tensor


def lendable_windows(tokens: int, hidden: int, vocab: int, window: int) -> int:
    """Return m, the number of windows that dW (V, D) has room for."""
    if vocab <= window or tokens < 1:
        return 0
    by_first = (vocab - window) * hidden // (tokens * window)
    by_last = (vocab * hidden - tokens * window) // (window * hidden)
    return max(0, min(by_first, by_last))


def lent_windows(
    dw: "Tensor", tokens: int, window: int, columns: int
) -> "list[tuple[int, Tensor]]":
    """Return first column and room (N, W) of each window of the first `columns` of dW (V, D)."""
    size, flat = tokens * window, dw.view(-1)
    firsts = range(0, columns, window)
    start = flat.numel() - len(firsts) * size
    rooms = flat[start:].view(len(firsts), tokens, window)
    return list(zip(firsts, rooms, strict=True))


def has_room(rows: int, tokens: int, hidden: int, vocab: int, columns: int) -> bool:
    """Whether the exponentials of `columns` fit in what follows the first `rows` of dW (V, D)."""
    return rows * hidden + tokens * columns <= vocab * hidden


def room_after(dw: "Tensor", rows: int, tokens: int, columns: int) -> "Tensor | None":
    """Return room (N, K) for `columns` in what follows the first `rows` of dW, None if it lacks."""
    vocab, hidden = dw.shape
    if not has_room(rows, tokens, hidden, vocab, columns):
        return None
    return dw.view(-1)[vocab * hidden - tokens * columns :].view(tokens, columns)
