"""The windows of a plain step, and where the exponentials of each are.

Those of the first windows are stored in the forward, in the memory of dW and then in their own; the
others are computed again in the backward, at the end of dW's memory or, where that is too small, in
a buffer.  `row_layouts` has the layouts of one plan.
"""

from dataclasses import dataclass

from cutefce.cute_kernels.integers import round_up
from cutefce.cute_kernels.workspace import ExpsMemory
from cutefce.ops.planning.dw_aliasing import DwMemory


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
