"""Raw logits of soft targets, read from the accumulators of `project_exp`.

A lane follows the classes of one row of its warp's, which ascend, from tile to tile.  Where a tile
has the column of a class, the lane that holds this accumulator writes it.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from cutefce.cute_kernels.common.soft_classes import SoftClasses

WARP_ROWS = 16
"""Rows of a warp in each block of 64 rows."""


class SoftLogitReader:
    """Where classes are among a warpgroup's accumulators, of `m_blocks` blocks of 64 rows."""

    def __init__(self, tile_n: int, m_blocks: int, m_halves: int) -> None:
        assert m_blocks * WARP_ROWS <= 32
        self.tile_n, self.m_blocks, self.m_halves = tile_n, m_blocks, m_halves

    @cute.jit
    def read(self, logits: Any, places: cute.Tensor) -> None:
        """Write the logits of the tile's classes; `places` (1,) is where the lane's row goes on."""
        consumer, rows, m_start, n_start, scheduler = logits
        soft, lane, acc = rows.soft, cute.arch.lane_idx(), consumer.acc
        warp_row = m_start + consumer.thread // 32 * WARP_ROWS
        own_row = warp_row + self.row_in_warp(lane)
        follows = lane < WARP_ROWS * self.m_blocks and own_row < scheduler.rows
        place, first, ballot = places[0], rows.first + n_start, Int32(-1)
        columns = cutlass.min(scheduler.columns - n_start, self.tile_n)
        while ballot != 0:
            column = columns
            if follows:
                place, column = self.next_class(soft, own_row, place, (first, columns))
            ballot = cute.arch.vote_ballot_sync(column < columns)
            others = ballot
            while others != 0:
                lowest = others & -others
                source = Int32(cute.arch.popc(lowest - 1))
                others ^= lowest
                at_column = cute.arch.shuffle_sync(column, source)
                at_place = cute.arch.shuffle_sync(place, source)
                value = self.accumulator(acc, source, at_column)
                if lane == source % 8 * 4 + at_column % 8 // 2:
                    soft.logits[warp_row + self.row_in_warp(source), at_place] = value
            place += Int32(column < columns)
        places[0] = place

    @cute.jit
    def row_in_warp(self, index: Int32) -> Int32:
        """Return the row, relative to the warp's first one, that lane `index` follows."""
        return index // WARP_ROWS * (64 * self.m_halves) + index % WARP_ROWS

    @cute.jit
    def next_class(self, soft: SoftClasses, row: Int32, place: Int32, tile: Any) -> Any:
        """Return the place of the row's next class of a tile or behind it, and its column.

        `tile` are the class of its first column, and its number of columns, which stands for any
        behind it.
        """
        first, columns = tile
        column, searches = columns, Int32(1)
        while searches != 0:
            searches = Int32(0)
            if place < soft.index.shape[1]:
                counts = soft.coefficient[row, place] != 0.0
                at = Int32(soft.index[row, place]) - first
                if counts and at >= 0:
                    column = at
                else:
                    place += 1
                    searches = Int32(1)
        return place, cutlass.min(column, columns)

    @cute.jit
    def accumulator(self, acc: cute.Tensor, row: Int32, column: Int32) -> Float32:
        """Return the lane's accumulator of the row that lane `row` follows, if it holds that."""
        value = Float32(0.0)
        for m_block in cutlass.range_constexpr(self.m_blocks):
            for half in cutlass.range_constexpr(2):
                if row // 8 == 2 * m_block + half:
                    for j in cutlass.range_constexpr(self.tile_n // 8):
                        if column // 8 == j:
                            value = acc[(0, half, j), m_block, 0]
                            if column % 2 == 1:
                                value = acc[(1, half, j), m_block, 0]
        return value
