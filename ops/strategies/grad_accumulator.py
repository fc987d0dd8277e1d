"""Sums of a gradient that are accumulated in the gradient's own memory as far as it has room.

A 16-bit gradient (R, D) has room for the float32 sums of half its rows: the sums of the first rows
are accumulated in place, those of the others in `overflow`.  At the end each sum is scaled and
rounded once.  Row i of the result occupies bytes 2·D·i to 2·D·(i + 1), where sums of earlier rows
are, whose own begin at 4·D·i: rows a to 2·a can be written at once after those up to a.  The first
rows go through a bounce buffer.

A gradient in the dtype of sums holds them all.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from cutefce.ops.planning.dw_aliasing import BOUNCE_ROWS, rows_in_place
from cutefce.ops.primitives.interface import ScaleRows


@dataclass(frozen=True)
class GradAccumulator:
    """A gradient's sums; `finish` makes the gradient of them."""

    gradient: Tensor
    """(R, D)"""
    overflow: Tensor
    """(R - rows in place, D) in the dtype of sums."""

    @classmethod
    def empty(cls, gradient: Tensor, dtype: torch.dtype) -> "GradAccumulator":
        """Return uninitialized sums of `dtype`, in `gradient` as far as it has room."""
        rows, hidden = gradient.shape
        beyond = rows - rows_in_place(rows, narrow=gradient.dtype != dtype)
        return cls(gradient, gradient.new_empty(beyond, hidden, dtype=dtype))

    @property
    def in_place(self) -> Tensor:
        """The sums that are in the gradient's memory."""
        rows, hidden = len(self.gradient) - len(self.overflow), self.gradient.shape[1]
        if self.gradient.dtype == self.overflow.dtype:
            return self.gradient[:rows]
        place = self.gradient.view(-1)[: 2 * rows * hidden]
        return place.view(self.overflow.dtype).view(rows, hidden)

    def parts(self) -> Iterator[tuple[slice, Tensor]]:
        """Yield the rows and the sums of each of the two places, if it has any."""
        start = 0
        for part in (self.in_place, self.overflow):
            if len(part):
                yield slice(start, start + len(part)), part
            start += len(part)

    def finish(self, scale_rows: ScaleRows, factor: Tensor) -> Tensor:
        """Return the gradient, `factor` () times the sums, which it overwrites."""
        overlap = self.gradient.dtype != self.overflow.dtype
        factors = factor.expand(len(self.gradient))
        out, top, begin = self.gradient, len(self.gradient) - len(self.overflow), 0
        while begin < top:
            rows = slice(begin, min(max(2 * begin, BOUNCE_ROWS), top) if overlap else top)
            bounces = overlap and begin == 0
            to = out.new_empty(out[rows].shape) if bounces else out[rows]
            scale_rows(to, self.in_place[rows], factors[rows])
            if bounces:
                out[rows] = to
            begin = rows.stop
        if len(self.overflow):
            scale_rows(out[top:], self.overflow, factors[top:])
        return out
