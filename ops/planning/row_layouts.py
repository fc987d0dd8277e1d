"""Layouts of a plan's memory for fewer rows than N, one of which the device chooses.

A plan is made for N tokens, of which fewer may count.  In the same memory, the exponentials of r
rows have N / r times as many columns: a plan that computes half of them again need not where a
third of the rows count, and has fewer windows.  So a step has up to three more layouts, for at most
`SHARES` of N rows.  All of their windows are launched; those of other layouts than that of the
number of rows that count find on the device that there is nothing to do, and exit at once.

A layout has to be worth it: it takes `WORTH` of the time of the next larger one, or less; and the
launches that exit take at most `EMPTY` of the plan's time together, so that small steps have none.
"""

from dataclasses import replace
from fractions import Fraction
from math import ceil

from cutefce.cute_kernels.integers import round_up
from cutefce.cute_kernels.problem import Problem
from cutefce.ops.planning.dw_aliasing import DwMemory
from cutefce.ops.planning.plan import Plan
from cutefce.ops.planning.time_model import layout_seconds
from cutefce.ops.planning.window_layout import WindowLayout

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
