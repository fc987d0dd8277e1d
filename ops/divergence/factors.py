"""Memory of the factors of some tokens, as the kernel of rows writes them."""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from cutefce.ops.rows.blocks import blocks


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

    def windows(self) -> Iterator[tuple[slice, Tensor]]:
        """Yield the classes of every window, and its factors (R, C)."""
        for columns in blocks(self.vocab, self.columns):
            width = columns.stop - columns.start
            begin = columns.start // self.columns * self.pitch + self.first * width
            yield columns, self.memory[begin : begin + self.count * width].view(self.count, width)
