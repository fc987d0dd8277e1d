"""The factors of the first tokens, which the forward keeps for the backward.

Those of the first ones of these lie in the memory of the gradient dW, which nothing else needs till
then: those of a window of classes where the rows of dW of its classes will be.  The backward copies
them before it writes these rows.  The others have memory of their own.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from cutefce.ops.rows.blocks import blocks
from cutefce.ops.torch_compat import capture_id


@dataclass(frozen=True)
class FactorRows:
    """Factors (R, V) of a side, as matrices (T, C) of windows of C classes in memory.

    The rows are some of those of the matrices, from `first` on.
    """

    memory: Tensor
    """(size,)"""
    first: int
    count: int
    """R"""
    vocab: int
    columns: int
    """C; the last window may have fewer."""
    pitch: int
    """Elements from the beginning of a matrix to that of the next one."""

    @staticmethod
    def of(x: Tensor) -> "FactorRows":
        """Return those of one matrix, x (R, V), which is contiguous."""
        (rows, vocab), memory = x.shape, x.view(-1)
        return FactorRows(memory, 0, rows, vocab, vocab, 0)

    def window(self, columns: slice) -> Tensor:
        """Return the factors (R, C) of the window of the classes `columns`."""
        width = columns.stop - columns.start
        begin = columns.start // self.columns * self.pitch + self.first * width
        return self.memory[begin : begin + self.count * width].view(self.count, width)

    def windows(self) -> Iterator[tuple[slice, Tensor]]:
        """Yield the classes of every window, and its factors (R, C)."""
        for columns in blocks(self.vocab, self.columns):
            yield columns, self.window(columns)


@dataclass(frozen=True)
class SideFactors:
    """The kept factors of one side."""

    dw: Tensor | None
    """(V, D) the memory of dW; None if it has no factors."""
    rest: Tensor
    """(K - A, V) those of the tokens after the first A."""

    def rows(self, rows: slice, aliased: int, columns: int) -> FactorRows:
        """Return those of tokens that are all among the first `aliased`, or all are not."""
        if rows.stop > aliased:
            return FactorRows.of(self.rest[rows.start - aliased : rows.stop - aliased])
        assert self.dw is not None
        (vocab, hidden), count = self.dw.shape, rows.stop - rows.start
        pitch = columns * hidden if columns < vocab else 0
        sizes = rows.start, count, vocab, min(columns, vocab), pitch
        return FactorRows(self.dw.view(-1), *sizes)


@dataclass
class Factors:
    """The factors of the first K tokens of the student and of the teacher."""

    sides: list[SideFactors | None] = field(default_factory=lambda: [None, None])
    """None of a side that is not trained."""
    kept: int = 0
    """K"""
    aliased: int = 0
    """A, the tokens whose factors are in the memory of dW."""
    columns: int = 0
    """Classes of a window there."""
    capture: int | None = field(default_factory=lambda: capture_id())
    """The CUDA graph capture in which the forward ran; None if in none."""

    def of(self, index: int, rows: slice) -> FactorRows | None:
        """Return memory for those of tokens; None if a side has none, or the tokens are not kept.

        All of the tokens are in the memory of dW, or none is.
        """
        side = self.sides[index]
        if side is None or rows.start >= self.kept:
            return None
        return side.rows(rows, self.aliased, self.columns)

    def copy_window(self, index: int, out: Tensor, columns: slice) -> None:
        """Write those of a window of the backward to the first K rows of `out` (N, C)."""
        side = self.sides[index]
        assert side is not None
        out[: self.aliased] = side.rows(slice(0, self.aliased), self.aliased, self.columns).window(
            columns
        )
        out[self.aliased : self.kept] = side.rest[:, columns]

    def tile_memory(self, dtype: torch.dtype) -> list[Tensor]:
        """Return memory for a tile of each side in `dtype`, in that of dW without factors."""
        memory, vocab = [], 0
        for side in self.sides:
            if side is not None and side.dw is not None:
                flat, vocab = side.dw.view(-1), len(side.dw)
                ratio = dtype.itemsize // flat.element_size()
                memory.append(flat[: len(flat) // ratio * ratio].view(dtype))
        if len(memory) == 1:  # whole rows, so that those of the second tile are aligned, too
            half = len(memory[0]) // (2 * vocab) * vocab
            return [memory[0][:half], memory[0][half:]]
        return memory

    def taken(self) -> "Factors":
        """Return these for a backward; later ones get none if it overwrites the memory of dW.

        A copy if it runs outside of the forward's capture: a replay of either would otherwise find,
        or overwrite, what the other has written.
        """
        if not self.aliased:
            return self
        sides: list[SideFactors | None] | None = vars(self).pop("sides", None)  # one step
        if sides is None:
            return Factors()
        own = [
            SideFactors(side.dw.clone(), side.rest)
            if side is not None and side.dw is not None and self.capture != capture_id()
            else side
            for side in sides
        ]
        return Factors(own, self.kept, self.aliased, self.columns)

    def dw(self, index: int) -> Tensor | None:
        """Return the memory of dW (V, D) of a side; None if it has no factors."""
        side = self.sides[index]
        return None if side is None else side.dw
