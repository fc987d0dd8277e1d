"""The Hopper epilogue that adds to sums of 24 bits: from accumulators to global memory.

The lanes of a quad exchange accumulators, so that each has eight contiguous columns of a row: 16
bytes of upper halves and 8 of the bytes beside them.  It reads them some steps ahead and writes
them in place; see `common.kept_bits`.  Warps never wait for each other.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Uint8
from cutlass.cute import AddressSpace
from cutlass.cute.nvgpu import CopyG2ROp, LoadCacheMode, cpasync
from cutlass.cute.runtime import make_fake_tensor

from cutefce.cute_kernels.common.dsl import matrix, partition
from cutefce.cute_kernels.common.kept_bits import join_eight, split_eight
from cutefce.cute_kernels.common.row_vectors import row_vectors
from cutefce.cute_kernels.config import GemmConfig
from cutefce.cute_kernels.schedule.scheduler import TileScheduler
from cutefce.cute_kernels.sm90.mainloop import Consumer

GROUP = 32
"""Columns that a quad exchanges at a time."""
MOST_AHEAD = 4
"""Vectors that a lane reads before it adds to the first of them."""


class KeptSums(NamedTuple):
    """Sums (M, N) of 24 bits."""

    upper: cute.Tensor
    """(M, N) bfloat16: the upper halves."""
    low: cute.Tensor
    """(M, N) uint8: the next bytes."""


def kept_signature(rows: Any, columns: Any) -> KeptSums:
    """Return fake tensors to compile for."""
    pitch = cute.sym_int64(divisibility=16)
    low = make_fake_tensor(Uint8, (rows, columns), (pitch, 1), assumed_align=16)
    return KeptSums(matrix(BFloat16, rows, columns), low)


class Row(NamedTuple):
    """A row of a tile, of which a lane adds to eight of every `GROUP` columns."""

    upper: cute.Tensor
    """(8, …): vectors of the matrix's row from the lane's first one on."""
    low: cute.Tensor
    limit: Int32
    """Vectors up to the end of the row; 0 if the matrix has no such row."""


class KeptStoreSm90:
    """Additions of tiles of accumulators to kept sums."""

    def __init__(self, config: GemmConfig) -> None:
        assert config.tile_n % GROUP == 0, "quads exchange whole groups"
        self.tile_m, self.tile_n = config.tile_m, config.tile_n
        self.registers = 24, 240
        """Registers of a producer and of a consumer thread."""
        accumulators = config.tile_m * config.tile_n * config.partials_per_row // 256
        self.ahead = MOST_AHEAD if accumulators <= 128 else 0

    @cute.jit
    def tma_prefetch(self, sums: KeptSums) -> Any:
        """Return the TMA atom and coordinates of each of the two matrices, for prefetches."""
        shape = self.tile_m, self.tile_n
        layout = cute.make_layout(shape, stride=(self.tile_n, 1))
        load, found = cpasync.CopyBulkTensorTileG2SOp(), []
        for part in (sums.upper, sums.low):
            found.append(cpasync.make_tiled_tma_atom(load, part, layout, shape))
        return tuple(found)

    @cute.jit
    def prefetched(self, sums: KeptSums, atoms: Any) -> Any:
        """Return (TMA atom, its sources by tile) of each matrix."""
        shape, found = (self.tile_m, self.tile_n), []
        for part, (atom, coordinates) in zip(sums, atoms, strict=True):
            # a place of the box in shared memory, which prefetches do not write
            place = cute.make_ptr(part.element_type, 0, AddressSpace.smem, assumed_align=128)
            unused = cute.make_tensor(place, cute.make_layout(shape, stride=(self.tile_n, 1)))
            operand = atom, coordinates, unused
            found.append(partition(operand, shape, Int32(0), 1)[:2])
        return tuple(found)

    @cute.jit
    def add(
        self,
        consumer: Consumer,
        sums: KeptSums,
        first_rows: Any,
        n_start: Int32,
        scheduler: TileScheduler,
        must_add: Any,
    ) -> None:
        """Add the accumulators to the sums of their tile, or overwrite these.

        `first_rows` holds, for each block of 64 rows, the two rows whose accumulators the thread
        has.  All accumulators are 0 in the end: kept no longer, they make room for what is read.
        """
        lane = cute.arch.lane_idx() % 4
        blocks, groups = range(len(first_rows)), range(self.tile_n // GROUP)
        places = [(block, group, half) for block in blocks for group in groups for half in (0, 1)]
        rows: dict[tuple[int, int], Row] = {}
        pieces: list[Any] = []
        for i in cutlass.range_constexpr(len(places)):
            for ahead in cutlass.range_constexpr(len(pieces), self.pieces_read(i, len(places))):
                block, at, half = places[ahead]
                if cutlass.const_expr((block, half) not in rows):
                    row = first_rows[block][half]
                    rows[block, half] = self._row(sums, row, n_start, lane, scheduler)
                pieces.append(self._load(rows[block, half], at, must_add))
            m_block, group, half = places[i]
            pairs = cute.make_rmem_tensor((2, 4), Float32)
            for j in cutlass.range_constexpr(4):
                for v in cutlass.range_constexpr(2):
                    pairs[v, j] = consumer.acc[(v, half, 4 * group + j), m_block, 0]
            addends = exchanged_in_quad(pairs, lane)
            self._store(rows[m_block, half], group, pieces[i], addends)
        consumer.acc.fill(0.0)

    def pieces_read(self, piece: int, pieces: int) -> int:
        """Return how many of the `pieces` have been read before number `piece` is added to.

        Beside many accumulators there is room for one; each addition makes more.
        """
        return min(piece + max(1, min(self.ahead + piece, MOST_AHEAD)), pieces)

    @cute.jit
    def _row(
        self, sums: KeptSums, row: Int32, n_start: Int32, lane: Int32, scheduler: TileScheduler
    ) -> Row:
        """Return a row from the lane's first column on."""
        first = n_start // 8 + lane
        limit = scheduler.columns // 8 - first
        if row >= scheduler.rows:
            limit = Int32(0)
        upper, low = (cute.domain_offset((0, first), row_vectors(part, row)) for part in sums)
        return Row(upper, low, limit)

    @cute.jit
    def _load(self, row: Row, group: int, must_add: Any) -> Any:
        """Return the words of a row's sums; 0 if nothing `must_add` to them."""
        halves, bytes_ = cute.make_rmem_tensor((4,), Int32), cute.make_rmem_tensor((2,), Int32)
        halves.fill(0)
        bytes_.fill(0)
        if must_add and 4 * group < row.limit:
            load(row.upper[None, 4 * group], halves)
            load(row.low[None, 4 * group], bytes_)
        return halves, bytes_

    @cute.jit
    def _store(self, row: Row, group: int, before: Any, addends: cute.Tensor) -> None:
        """Write the sums of the words `before` and `addends` (8,)."""
        values = join_eight(*before)
        values.store(values.load() + addends.load())
        halves, bytes_ = split_eight(values)
        if 4 * group < row.limit:
            upper, low = cute.recast_tensor(halves, BFloat16), cute.recast_tensor(bytes_, Uint8)
            cute.autovec_copy(upper, row.upper[None, 4 * group])
            cute.autovec_copy(low, row.low[None, 4 * group])


@cute.jit
def load(source: cute.Tensor, words: cute.Tensor) -> None:
    """Load a vector into `words` from the L2 cache, where other thread blocks have written it."""
    to = cute.recast_tensor(words, source.element_type)
    bits = cute.size(source) * source.element_type.width
    mode = {"num_bits_per_copy": bits, "load_cache_mode": LoadCacheMode.GLOBAL}
    cute.copy(cute.make_copy_atom(CopyG2ROp(), source.element_type, **mode), source, to)


@cute.jit
def exchanged_in_quad(pairs: cute.Tensor, lane: Int32) -> cute.Tensor:
    """Return values (8,): the pairs (2, 4) of number `lane` of lanes 0 to 3 of the quad."""
    values = cute.make_rmem_tensor((2, 4), Float32)
    values.store(pairs.load())
    for step in cutlass.range_constexpr(2):
        is_upper = (lane & (1 << step)) != 0
        for j in cutlass.range_constexpr(4):
            if cutlass.const_expr(j & (1 << step) == 0):
                other = j + (1 << step)
                for v in cutlass.range_constexpr(2):
                    a, b = values[v, j], values[v, other]
                    sent = a if is_upper else b
                    received = cute.arch.shuffle_sync_bfly(sent, offset=1 << step)
                    values[v, j] = received if is_upper else a
                    values[v, other] = b if is_upper else received
    return cute.make_tensor(values.iterator, cute.make_layout((8,)))
