"""The Hopper epilogue that adds to sums in memory, through shared memory and by TMA.

A tile is added in blocks of 64 rows and columns, each in a buffer: a panel of upper halves, or two
of float32 sums, whose rows are 128 bytes, and a panel of the low bits beside upper halves, whose
rows are 64 or 32 bytes.  The warpgroups take the buffers in the order of their tiles.  While MMAs
run, another warp loads the next sums; a warpgroup adds to them in place, and each of its warps
stores its rows; see `common.packed_bits`.  A thread's accesses to swizzled rows of halves have no
bank conflicts.  No two thread blocks touch the same sums.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int16, Int32, Int64, Uint8
from cutlass.cute.nvgpu import CopyUniversalOp, cpasync
from cutlass.memory import SmemAllocator
from cutlass.tensor_utils import LayoutEnum
from cutlass.utils import hopper_helpers as sm90

from cutefce.cute_kernels.arch.base import BARRIER_BYTES
from cutefce.cute_kernels.arch.sm90 import Sm90
from cutefce.cute_kernels.common.dsl import matrix, partition
from cutefce.cute_kernels.common.packed_bits import join_eight, low_signature, split_eight
from cutefce.cute_kernels.config import GemmConfig
from cutefce.cute_kernels.problem import FLOAT32_LOW_BITS
from cutefce.cute_kernels.schedule.scheduler import TileScheduler
from cutefce.cute_kernels.sm90.epilogue_store import accumulator_mma
from cutefce.cute_kernels.sm90.mainloop import MMA_WARP_GROUPS, Consumer

LINE = 128
"""Bytes of a panel's row of upper halves or float32 sums: the widest swizzle."""
ROWS = COLUMNS = 64
"""Rows and columns of a block."""
FULL, EMPTY = 0, MMA_WARP_GROUPS
"""Barriers of a buffer: one for each warpgroup that waits until it is full, and one for the loads,
which wait until it is empty."""


class PackedSums(NamedTuple):
    """Sums (M, N) of 32, 24 or 20 bits."""

    upper: cute.Tensor
    """(M, N) float32, or bfloat16: the upper halves."""
    low: cute.Tensor | None
    """(M, N) or (M, N / 2) uint8: the low bits, see `common.packed_bits`; None without."""


def packed_signature(rows: Any, columns: Any, low_bits: int) -> PackedSums:
    """Return fake tensors to compile for."""
    if low_bits == FLOAT32_LOW_BITS:
        return PackedSums(matrix(Float32, rows, columns), None)
    low = low_signature(rows, columns, low_bits, 16)
    return PackedSums(matrix(BFloat16, rows, columns), low)


class Staging(NamedTuple):
    """The buffers of a thread block."""

    parts: Any
    """(TMA load, its coordinates, TMA store, its coordinates, shared memory) of upper halves or
    float32 sums, and of low bits if there are any beside."""
    barriers: Any
    """Those of all buffers; see `FULL`."""
    is_read: Any
    """Whether sums are added to, and so loaded."""


class PackedStoreSm90:
    """Additions of tiles of accumulators to packed sums."""

    def __init__(self, config: GemmConfig, low_bits: int) -> None:
        whole_blocks = config.tile_n % COLUMNS == 0
        assert config.pingpong and whole_blocks, "warpgroups add to whole blocks"
        self.config, self.low_bits = config, low_bits
        self.lines = LINE, COLUMNS * low_bits // 8
        """Bytes of a row of a panel of upper halves, and of low bits."""
        self.is_float32 = low_bits == FLOAT32_LOW_BITS
        self.dtypes = (Float32,) if self.is_float32 else (BFloat16, Uint8)
        self.row_blocks, self.column_blocks = config.tile_m // ROWS, config.tile_n // COLUMNS
        self.blocks = self.row_blocks * self.column_blocks
        self.block_bytes = ROWS * COLUMNS * (16 + low_bits) // 8
        used = BARRIER_BYTES + config.stages * Sm90().stage_bytes(config)
        free = Sm90.smem_bytes - used
        # so that each warpgroup's tiles begin with the same buffer
        counts = [count for count in range(1, self.blocks) if self.blocks % count == 0]
        counts += self.blocks, self.blocks * MMA_WARP_GROUPS
        self.buffers = max(count for count in counts if count * self.block_bytes <= free)

    @cute.jit
    def tma(self, sums: PackedSums) -> Any:
        """Return (TMA load, coordinates, TMA store, coordinates, smem layout) of each matrix."""
        found = []
        matrices: Any = sums[: len(self.dtypes)]
        for i, part in enumerate(matrices):
            columns = self.lines[i] * 8 // part.element_type.width
            panels = self.buffers * self._panels(i)
            layout = self._layout(part.element_type, ROWS, columns, panels)
            load = cpasync.make_tiled_tma_atom(
                cpasync.CopyBulkTensorTileG2SOp(),
                part,
                cute.slice_(layout, (None, None, 0)),
                (ROWS, columns),
            )
            store = cpasync.make_tiled_tma_atom(
                cpasync.CopyBulkTensorTileS2GOp(),
                part,
                cute.slice_(self._layout(part.element_type, 16, columns, 1), (None, None, 0)),
                (16, columns),
            )
            found.append((*load, *store, layout))
        return tuple(found)

    def _panels(self, part: int) -> int:
        """Return the panels of a block's upper halves or float32 sums, or of its low bits."""
        line_bytes: int = COLUMNS * self.dtypes[part].width // 8
        return max(1, line_bytes // LINE)

    def _layout(self, dtype: Any, rows: int, columns: int, count: int) -> Any:
        return sm90.make_smem_layout_epi(dtype, LayoutEnum.ROW_MAJOR, (rows, columns), count)

    @cute.jit
    def staging(self, smem: SmemAllocator, parts: Any, is_read: Any) -> Staging:
        """Allocate the buffers, and initialize their barriers for all roles to agree on later."""
        barriers = smem.allocate_array(Int64, self.buffers * (EMPTY + 1))
        made = []
        for dtype, part in zip(self.dtypes, parts, strict=True):
            layout = part[-1]
            buffers = smem.allocate_tensor(dtype, layout.outer, 1024, layout.inner)
            made.append((*part[:-1], buffers))
        if cute.arch.make_warp_uniform(cute.arch.warp_idx()) == 0:
            with cute.arch.elect_one():
                for i in cutlass.range_constexpr(self.buffers):
                    first = barriers + i * (EMPTY + 1)
                    for warp_group_idx in cutlass.range_constexpr(MMA_WARP_GROUPS):
                        cute.arch.mbarrier_init(first + FULL + warp_group_idx, 1)
                    # one arrival of each warp of the warpgroup
                    cute.arch.mbarrier_init(first + EMPTY, 4)
        return Staging(tuple(made), barriers, is_read)

    @cute.jit
    def load(self, scheduler: TileScheduler, staging: Staging) -> None:
        """Producer: load the sums of block after block, each when its buffer is empty."""
        config, tile = self.config, Int32(0)
        for index in cutlass.range(
            scheduler.cluster, scheduler.num_indices(), scheduler.clusters, unroll=1
        ):
            row, column, _ = scheduler.coord(index, config.raster_group)
            row = (row * config.cluster + scheduler.rank) * self.row_blocks
            column *= self.column_blocks
            for block in cutlass.range_constexpr(self.blocks):
                number = tile * self.blocks + block
                row_block, column_block = divmod(block, self.column_blocks)
                buffer = number % self.buffers
                barriers = staging.barriers + buffer * (EMPTY + 1)
                full = barriers + FULL + tile % MMA_WARP_GROUPS
                # the first wait of each buffer finds it empty
                cute.arch.mbarrier_wait(barriers + EMPTY, (number // self.buffers + 1) % 2)
                if staging.is_read:
                    with cute.arch.elect_one():
                        cute.arch.mbarrier_arrive_and_expect_tx(full, self.block_bytes)
                    for i, part in enumerate(staging.parts):
                        atom, coordinates, _, _, smem = part
                        shape = ROWS, cute.size(smem, mode=[1])
                        panels = self._panels(i)
                        _, source, to = partition((atom, coordinates, smem), shape, Int32(0), 1)
                        for panel in cutlass.range_constexpr(panels):
                            across = (column + column_block) * panels + panel
                            cute.copy(
                                atom,
                                source[None, row + row_block, across],
                                to[None, buffer * panels + panel],
                                tma_bar_ptr=full,
                            )
                else:
                    with cute.arch.elect_one():
                        cute.arch.mbarrier_arrive(full)
            tile += 1

    @cute.jit
    def add(
        self,
        consumer: Consumer,
        staging: Staging,
        m_start: Int32,
        n_start: Int32,
        tile: Int32,
    ) -> None:
        """Add the accumulators to the sums, or overwrite these.

        The tile is number `tile` of the warpgroup, from 0 on.
        """
        warp = cute.arch.make_warp_uniform(consumer.thread // 32)
        for block in cutlass.range_constexpr(self.blocks):
            number = (tile * MMA_WARP_GROUPS + consumer.parity) * self.blocks + block
            buffer = number % self.buffers
            barriers = staging.barriers + buffer * (EMPTY + 1)
            # the buffer's earlier fills for this warpgroup; the other one's have their own barrier,
            # since a phase bit tells a fill only from the one before it
            uses = max(1, self.blocks // self.buffers)
            turn = tile * uses + block // self.buffers % uses
            cute.arch.mbarrier_wait(barriers + FULL + consumer.warp_group_idx, turn % 2)
            row_block, column_block = divmod(block, self.column_blocks)
            for group in cutlass.range_constexpr(COLUMNS // 32):
                where = row_block, column_block, group
                if cutlass.const_expr(self.is_float32):
                    self._add_float32(consumer, staging, buffer, where)
                else:
                    for half in cutlass.range_constexpr(2):
                        self._add_eight(consumer, staging, buffer, (*where, half))
            cute.arch.fence_proxy("async.shared", space="cta")
            cute.arch.sync_warp()
            for i, part in enumerate(staging.parts):
                _, _, atom, coordinates, smem = part
                columns = cute.size(smem, mode=[1])
                panels = self._panels(i)
                first = (n_start // COLUMNS + column_block) * panels
                for panel in cutlass.range_constexpr(panels):
                    s_panel = smem[None, None, buffer * panels + panel]
                    s_warp = cute.local_tile(s_panel, (16, columns), (warp, 0))
                    operand = atom, coordinates, s_warp
                    _, to, source = partition(operand, (16, columns), Int32(0), 1)
                    row = m_start // 16 + 4 * row_block + warp
                    cute.copy(atom, source, to[None, row, first + panel])
            cute.arch.cp_async_bulk_commit_group()
            cute.arch.cp_async_bulk_wait_group(0, read=True)
            cute.arch.sync_warp()
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(barriers + EMPTY)

    @cute.jit
    def _add_float32(
        self, consumer: Consumer, staging: Staging, buffer: Int32, place: tuple[int, int, int]
    ) -> None:
        """Add to the thread's float32 sums in a panel.

        `place` is (row block, column block, panel).
        """
        block, column_block, panel = place
        smem, columns = staging.parts[0][-1], LINE * 8 // Float32.width
        s_panel = smem[None, None, buffer * self._panels(0) + panel]
        tCsC = accumulator_mma(columns).get_slice(consumer.thread).partition_C(s_panel)
        pairs = cute.make_copy_atom(CopyUniversalOp(), Float32, num_bits_per_copy=64)
        values = cute.make_rmem_tensor(tCsC.shape, Float32)
        for j in cutlass.range_constexpr(columns // 8):
            for half in cutlass.range_constexpr(2):
                for v in cutlass.range_constexpr(2):
                    acc_j = column_block * (COLUMNS // 8) + panel * (columns // 8) + j
                    values[(v, half, j), 0, 0] = consumer.acc[(v, half, acc_j), block, 0]
        if staging.is_read:
            sums = cute.make_rmem_tensor(tCsC.shape, Float32)
            cute.copy(pairs, tCsC, sums)
            values.store(values.load() + sums.load())
        cute.copy(pairs, values, tCsC)

    @cute.jit
    def _add_eight(
        self,
        consumer: Consumer,
        staging: Staging,
        buffer: Int32,
        place: tuple[int, int, int, int],
    ) -> None:
        """Add to the thread's eight sums in a row of 32 columns.

        `place` is (row block, column block, group of columns, half of the rows).
        """
        block, column_block, group, half = place
        first = column_block * (COLUMNS // 8) + 4 * group
        values = cute.make_rmem_tensor((8,), Float32)
        for i in cutlass.range_constexpr(8):
            values[i] = consumer.acc[(i % 2, half, first + i // 2), block, 0]
        upper, low = self._places(consumer, staging, buffer, group, half)
        if staging.is_read:
            halves = cute.make_rmem_tensor((4,), Int32)
            bytes_ = cute.make_rmem_tensor((self.low_bits,), Uint8)
            pairs = cute.recast_tensor(bytes_, low[0].element_type)
            for i in cutlass.range_constexpr(4):
                halves[i], pairs[i] = upper[i][0], low[i][0]
            values.store(join_eight(halves, bytes_, self.low_bits).load() + values.load())
        halves, bytes_ = split_eight(values, self.low_bits)
        pairs = cute.recast_tensor(bytes_, low[0].element_type)
        for i in cutlass.range_constexpr(4):
            upper[i][0], low[i][0] = halves[i], pairs[i]

    def _places(
        self, consumer: Consumer, staging: Staging, buffer: Int32, group: int, half: int
    ) -> Any:
        """Return the words of upper halves and the low bits of four pairs of columns.

        The 16-byte chunks of a line are swizzled: chunk c of row r is in place c ^ (r % 8) of eight
        or, where 128 bytes are n lines, in place c ^ (r / n % (8 / n)) of 8 / n.
        """
        row, lane = consumer.tCcC[0][0], consumer.thread % 4
        found: tuple[list[Any], list[Any]] = ([], [])
        for j in range(4 * group, 4 * group + 4):
            for part, bits in enumerate((16, self.low_bits)):
                smem, line = staging.parts[part][-1], self.lines[part]
                dtype, pair = {16: (Int32, 4), 8: (Int16, 2), 4: (Uint8, 1)}[bits]
                panel, byte = divmod(4 * j * pair, line)
                chunk, start = divmod(byte, 16)
                rows = LINE // line
                # the start of a row and of its quad's chunk have no bits in common
                first = row * line + ((row // rows % (8 // rows)) ^ chunk) * 16 + lane * pair
                before = buffer * (ROWS * COLUMNS * pair // 2)
                offset = (before + first) // pair
                base = cute.recast_ptr(smem.iterator, dtype=dtype) + offset
                place = base + ((panel * ROWS + half * 8) * line + start) // pair
                found[part].append(cute.make_tensor(place, cute.make_layout((1,))))
        return found
