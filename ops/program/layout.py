"""How a call is laid out in memory, and the windows of classes that follow from it.

dW is written window after window, from the first row on, and not before the backward.  Until then
the end of its memory can hold exponentials.  With N tokens, D hidden and V classes, a row of dW has
D elements and a column of exponentials has N.  Columns [c, c') of L that lie there can be one
window if they, and all behind them, begin behind the c' rows that are written while they are read:

    V·D - N·(L - c) >= D·c'

So the first windows are narrow, and each next one is wider by N / D.  Exponentials that are
computed again may lie there too, w columns at column c if w·N <= (V - c - w)·D.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from cutefce.cute_kernels.integers import ceil_div, round_up
from cutefce.ops.program.problem import LossProblem
from cutefce.ops.program.steps import Home, Range


@dataclass(frozen=True)
class Layout:
    """How a call is laid out: what plans choose."""

    chunk: int
    """Tokens at a time; all of them with gradients in the backward."""
    window: int
    """The most columns at a time of what is computed again, or in a chunk of a frozen weight.

    Where dW's memory can hold exponentials, windows there may be wider, and the others have at most
    half as many; or as many as are kept, in whose memory they lie.
    """
    kept: int = 0
    """Columns whose exponentials have memory from the forward to the backward."""
    aliased: int = 0
    """Columns before these whose exponentials lie in the memory of dW."""
    low_bits: int = 0
    """Bits of packed sums beside the 16 in a gradient's memory; 0: sums have their own dtype."""
    in_chunks: bool = False
    """Whether the forward has chunks of tokens; it forms their gradients, if any are wanted."""


@dataclass(frozen=True)
class Window:
    """Some columns of exponentials."""

    columns: Range
    is_stored: bool
    """By the forward, for the backward; else they are computed again."""
    home: Home | None = None
    offset: int = 0
    """Bytes into the memory of dW, if that is their home."""
    times: int = 1
    """How many like it there are, in a program that is made to be compared with others."""

    @property
    def width(self) -> int:
        """Columns."""
        return self.columns[1] - self.columns[0]


def most_aliased(p: LossProblem, window: int) -> int:
    """Return how many columns fit into dW with windows of `window` columns or more, whole blocks.

    Widths are linear in the first column, so the first window and the last one decide.
    """
    if not p.dw_holds_exps or p.vocab <= window or not p.tokens:
        return 0
    by_first = (p.vocab - window) * p.hidden // p.tokens
    by_last = (p.vocab * p.hidden - p.tokens * window) // p.hidden
    return max(0, min(by_first, by_last) // p.block * p.block)


def windows_of(p: LossProblem, x: Layout) -> Iterator[Window]:
    """Yield the windows of all tokens: in dW, stored apart, and those that are computed again.

    Those of a chunk are stored for its gradients if they are one.
    """
    if x.in_chunks:
        cut = even_windows(0, p.vocab * p.needs_gradients, x.window, p.block)
        yield from (Window(columns, x.window >= p.vocab) for columns in cut)
        return
    yield from _aliased(p, x.aliased)
    done = min(x.aliased + x.kept, p.vocab)
    if x.aliased < done:
        yield Window((x.aliased, done), True)
    if not p.needs_gradients:
        return
    while done < p.vocab:
        fits = 0
        if p.dw_holds_exps:
            fits = (p.vocab - done) * p.hidden // (p.tokens + p.hidden) // p.block * p.block
        if fits < max(most_again(p, x.window), x.kept):
            break
        offset = (p.vocab * p.hidden - p.tokens * fits) * p.item_bytes
        yield Window((done, done + fits), False, Home.DW, offset)
        done += fits
    most = max(x.kept, most_again(p, x.window))
    yield from (Window(columns, False) for columns in even_windows(done, p.vocab, most, p.block))


def most_again(p: LossProblem, window: int) -> int:
    """Return the most columns at a time that are computed again, in a buffer of their own.

    They are fewer where wider windows before were in the memory of dW.
    """
    return ceil_div(window, 2) if p.dw_holds_exps else window


def scales_exps(p: LossProblem, x: Layout) -> bool:
    """Whether exponentials get the factors of tokens, instead of dW's hidden states.

    Entries among narrow exponentials that the forward has stored are rounded once, with them.
    """
    is_stored = x.in_chunks or x.aliased + x.kept > 0
    return p.scales_exps or (p.soft > 0 and p.accumulates_wider and is_stored)


def even_windows(first: int, last: int, most: int, block: int) -> Iterator[Range]:
    """Cut columns into windows of about equal width, at most `most` or one block."""
    if first < last:
        count = ceil_div(last - first, max(most, 1))
        width = round_up(ceil_div(last - first, count), block)
        for start in range(first, last, width):
            yield start, min(start + width, last)


def alike(windows: Sequence[Window]) -> Iterator[Window]:
    """Yield the first and the last window of each memory, and one for those between."""
    for _, like in groupby(windows, lambda n: (n.home, n.is_stored)):
        first, *others = like
        yield first
        if len(others) > 2:
            *between, last = others
            start, count = between[0].columns[0], len(between)
            mean = (between[-1].columns[1] - start) // count
            yield replace(between[0], columns=(start, start + mean), times=count)
            yield last
        else:
            yield from others


def _aliased(p: LossProblem, count: int) -> Iterator[Window]:
    """Yield the widest windows of the first `count` columns, which lie in dW."""
    elements, first = p.vocab * p.hidden, 0
    while first < count:
        start = elements - p.tokens * (count - first)
        last = min(start // p.hidden // p.block * p.block, count)
        assert last > first, "no more than `most_aliased`"
        yield Window((first, last), True, Home.DW, start * p.item_bytes)
        first = last


def chunks_of(p: LossProblem, x: Layout) -> Iterator[Range]:
    """Cut the tokens into chunks; there is one of no tokens."""
    for first in range(0, max(p.tokens, 1), x.chunk):
        yield first, min(first + x.chunk, p.tokens)
