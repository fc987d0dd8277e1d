"""GradAccumulator that lie where their gradient will be, as far as there is room.

A gradient (R, D) of 16-bit numbers has room for the float32 sums of half its rows: those of the
first rows lie in it, those of the others, `rest`, in memory of their own.  At the end each sum is
scaled and rounded once.  Row i is written to bytes 2·D·i to 2·D·(i + 1), where sums of earlier rows
lie, whose own begin at 4·D·i: the rows from a up to 2·a can be written at once when those up to a
are.  The first ones go through memory of their own.

A gradient in the dtype of sums holds them all.  R may be a symbolic integer of a graph compiler.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from cutefce.ops.primitives.interface import Primitives
from cutefce.ops.planning.dw_aliasing import rows_in_place

BOUNCE_ROWS = 256
"""Rows that are finished in memory of their own."""


@dataclass(frozen=True)
class GradAccumulator:
    """A gradient's sums, or what `finish` makes of them."""

    gradient: "Tensor"
    """(R, D)"""
    rest: "Tensor"
    """(R - rows in place, D) in the dtype of sums."""

    @classmethod
    def empty(cls, gradient: "Tensor", dtype: "torch.dtype") -> "GradAccumulator":
        """Return sums of `dtype` that lie in `gradient` as far as there is room."""
        rows, hidden = gradient.shape
        beyond = rows - rows_in_place(rows, narrow=gradient.dtype != dtype)
        return cls(gradient, gradient.new_empty(beyond, hidden, dtype=dtype))

    @property
    def first(self) -> "Tensor":
        """The sums that lie in the gradient."""
        rows, hidden = len(self.gradient) - len(self.rest), self.gradient.shape[1]
        if self.gradient.dtype == self.rest.dtype:
            return self.gradient[:rows]
        place = self.gradient.view(-1)[: 2 * rows * hidden]
        return place.view(self.rest.dtype).view(rows, hidden)

    def of(self, rows: slice) -> "Iterator[tuple[slice, Tensor]]":
        """Cut `rows` in two where their sums lie in two places, and say where."""
        start = 0
        for part in (self.first, self.rest):
            inside = slice(max(rows.start, start), min(rows.stop, start + len(part)))
            if inside.start < inside.stop:
                yield inside, part[inside.start - start : inside.stop - start]
            start += len(part)

    def finish(self, primitives: "Primitives", factor: "Tensor", *, in_place: bool) -> "Tensor":
        """Return the gradient, `factor` () times the sums: in its place or in memory of its own."""
        out = self.gradient if in_place else self.gradient.new_empty(self.gradient.shape)
        overlap = in_place and self.gradient.dtype != self.rest.dtype
        top, begin = len(self.gradient) - len(self.rest), 0
        while begin < top:
            rows = slice(begin, min(max(2 * begin, BOUNCE_ROWS), top) if overlap else top)
            begins_itself = overlap and begin == 0
            to = out.new_empty(out[rows].shape) if begins_itself else out[rows]
            primitives.scale_rows(to, self.first[rows], factor.expand(len(to)))
            if begins_itself:
                out[rows] = to
            begin = rows.stop
        if len(self.rest):
            primitives.scale_rows(out[top:], self.rest, factor.expand(len(self.rest)))
        return out
