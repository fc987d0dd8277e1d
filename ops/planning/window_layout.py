"""The windows of a plain step, and where the exponentials of each are.

Those of the first windows are stored in the forward, in the memory of dW and then in their own; the
others are computed again in the backward, at the end of dW's memory or, where that is too small, in
a buffer.

A plan is made for N tokens, of which fewer may count.  In the same memory, the exponentials of r
rows have N / r times as many columns: a plan that computes half of them again need not where a
third of the rows count, and has fewer windows.  So a step has up to three more layouts, for at most
`SHARES` of N rows.  All of their windows are launched; those of other layouts than that of the
number of rows that count find on the device that there is nothing to do, and exit at once.

A layout has to be worth it: it takes `WORTH` of the time of the next larger one, or less; and the
launches that exit take at most `EMPTY` of the plan's time together, so that small steps have none.
"""

from dataclasses import dataclass, replace
from fractions import Fraction
from math import ceil

from cutefce.cute_kernels.integers import round_up
from cutefce.cute_kernels.problem import Problem
from cutefce.cute_kernels.workspace import ExpsMemory
from cutefce.ops.planning.dw_aliasing import DwMemory
from cutefce.ops.planning.plan import Plan
from cutefce.ops.planning.time_model import layout_seconds

SHARES = Fraction(9, 16), Fraction(1, 4), Fraction(1, 16)
"""Of N: the first one holds half of the tokens, drawn at random."""
ROW_BLOCK = 256
"""Rows of a layout are a multiple of this many, a row block of the kernels."""
WORTH = Fraction(19, 20)
EMPTY = Fraction(1, 200)
EMPTY_SECONDS = 2.5e-6
"""Of a launch that exits at once."""
STORED_LAUNCHES, RECOMPUTED_LAUNCHES = 4, 3
"""Launches of a window in a step."""
STEPS = 128
"""Numbers of aliased columns that are tried."""
MAX_WINDOWS = 32
"""Windows of a layout for fewer rows: more would take longer than computing columns again."""


@dataclass(frozen=True)
class PlacedWindow:
    """Columns [first, last), with the place of their exponentials."""

    first: int
    last: int
    memory: ExpsMemory
    offset: int
    """Elements of that memory before the exponentials."""
    width: int
    """Columns that have memory."""
    recomputed: bool = False


@dataclass(frozen=True)
class WindowLayout:
    """The windows of a step, in their order, for a number of rows that count."""

    windows: tuple[PlacedWindow, ...]
    aliased: int
    """Columns stored in the memory of dW."""
    kept: int
    """Columns stored in memory of their own, at least one of both; they may end beyond V."""
    buffer: int
    """Columns of the buffer."""
    rows: int
    """The most rows that count; the memory of a window has as many."""
    fewest: int = 0
    """The fewest: of less, another layout is used."""

    @classmethod
    def of(cls, memory: DwMemory, aliased: int, kept: int, least: int) -> "WindowLayout":
        """Return the layout of `aliased` and `kept` columns; the rest is computed again.

        Windows in the memory of dW have at least `least` columns.
        """
        vocab, windows, missing = memory.vocab, [], []
        for first, offset, width in memory.aliased_windows(aliased):
            place = ExpsMemory.DW, offset, width
            windows.append(PlacedWindow(first, first + width, *place))
        done = min(aliased + kept, vocab)
        if kept:
            windows.append(PlacedWindow(aliased, done, ExpsMemory.KEPT, 0, kept))
        for width in memory.recomputed_widths(done, least):
            missing.append((done, done + width, memory.tail(done + width, width)))
            done += width
        longest = max((last - first for first, last, tail in missing if tail is None), default=0)
        buffer = round_up(longest, memory.block)
        for first, last, tail in missing:
            place = ExpsMemory.BUFFER, 0, buffer
            if tail is not None:
                place = ExpsMemory.DW, tail, last - first
            windows.append(PlacedWindow(first, last, *place, recomputed=True))
        return cls(tuple(windows), aliased, kept, buffer, memory.tokens)

    @property
    def stored(self) -> tuple[PlacedWindow, ...]:
        """The windows whose exponentials the forward stores."""
        return tuple(window for window in self.windows if not window.recomputed)

    @property
    def recomputes(self) -> bool:
        """Whether exponentials are computed again."""
        return any(window.recomputed for window in self.windows)


def row_layouts(p: Problem, plan: Plan, whole: WindowLayout, block: int) -> list[WindowLayout]:
    """Return the layouts of `plan`, the first of which is `whole`, for fewer and fewer rows.

    Windows of the others are multiples of `block` columns.
    """
    found, left = [whole], float(EMPTY) * plan.seconds / EMPTY_SECONDS
    if len(whole.windows) > 1 and p.selects_rows:
        for share in SHARES:
            rows, last = round_up(ceil(p.tokens * share), ROW_BLOCK), found[-1]
            layout = _fastest(p, whole, rows, block) if rows < last.rows else None
            if layout is None or _launches(layout) > left:
                continue
            if _seconds(p, layout, rows) <= WORTH * _seconds(p, last, rows):
                left -= _launches(layout)
                found[-1:] = replace(last, fewest=rows + 1), layout
    return found


def _fastest(p: Problem, whole: WindowLayout, rows: int, block: int) -> WindowLayout | None:
    """Return the layout for `rows` rows that takes the least time in the memory of `whole`."""
    memory, every = DwMemory(rows, p.hidden, p.vocab, block), round_up(p.vocab, block)
    kept, buffer = (
        columns * whole.rows // rows // block * block for columns in (whole.kept, whole.buffer)
    )
    most = memory.most_aliased(block) if whole.aliased else 0
    layouts = []
    for aliased in sorted({most * i // STEPS // block * block for i in range(STEPS + 1)}):
        own = min(kept, round_up(every - aliased, block))
        is_whole = aliased + own >= p.vocab
        if not aliased + own or not (is_whole or buffer):
            continue
        if memory.window_count(aliased, 0, block) > 2 * MAX_WINDOWS:
            continue
        layout = WindowLayout.of(memory, aliased, own, buffer or block)
        if layout.buffer <= buffer and len(layout.windows) <= MAX_WINDOWS:
            layouts.append(layout)
    return min(layouts, key=lambda layout: _seconds(p, layout, rows), default=None)


def _seconds(p: Problem, layout: WindowLayout, rows: int) -> float:
    recomputed = sum(x.last - x.first for x in layout.windows if x.recomputed)
    return layout_seconds(p, rows, len(layout.windows), recomputed)


def _launches(layout: WindowLayout) -> int:
    recomputed = len(layout.windows) - len(layout.stored)
    return STORED_LAUNCHES * len(layout.stored) + RECOMPUTED_LAUNCHES * recomputed
