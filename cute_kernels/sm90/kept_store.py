"""The Hopper epilogue that adds to sums of 24 bits, through shared memory and by TMA.

Each of the two warpgroups has a buffer for the sums of its tile: panels of 128-byte rows, of upper
halves and of the bytes beside them.  While it runs MMAs, another warp loads the sums; it adds to
them in place, and each of its warps stores its rows; see `common.kept_bits`.  A thread's accesses
to the swizzled rows have no bank conflicts.  No two thread blocks touch the same sums.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int16, Int32, Int64, Uint8
from cutlass.cute.nvgpu import cpasync
from cutlass.cute.runtime import make_fake_tensor
from cutlass.memory import SmemAllocator
from cutlass.tensor_utils import LayoutEnum
from cutlass.utils import hopper_helpers as sm90

from cutefce.cute_kernels.common.dsl import matrix, partition
from cutefce.cute_kernels.common.kept_bits import join_eight, split_eight
from cutefce.cute_kernels.config import GemmConfig
from cutefce.cute_kernels.schedule.scheduler import TileScheduler
from cutefce.cute_kernels.sm90.mainloop import MMA_WARP_GROUPS, Consumer

LINE = 128
"""Bytes of a panel's row: the widest swizzle."""


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


class Staging(NamedTuple):
    """The buffers of a thread block."""

    upper: Any
    """(TMA load, its coordinates, TMA store, its coordinates, shared memory) of upper halves."""
    low: Any
    barriers: Any
    """Two for each warpgroup: its buffer is full, and empty."""
    is_read: Any
    """Whether sums are added to, and so loaded."""


class KeptStoreSm90:
    """Additions of tiles of accumulators to kept sums."""

    def __init__(self, config: GemmConfig) -> None:
        assert config.pingpong and config.tile_n % LINE == 0, "warpgroups add to whole panels"
        self.config = config
        self.tile_bytes = config.tile_m * config.tile_n * 3

    @cute.jit
    def tma(self, sums: KeptSums) -> Any:
        """Return (TMA load, coordinates, TMA store, coordinates, smem layout) of each matrix."""
        tile_m, found = self.config.tile_m, []
        for part in sums:
            columns = LINE * 8 // part.element_type.width
            panels = MMA_WARP_GROUPS * self.config.tile_n // columns
            layout = self._layout(part.element_type, tile_m, columns, panels)
            load = cpasync.make_tiled_tma_atom(
                cpasync.CopyBulkTensorTileG2SOp(),
                part,
                cute.slice_(layout, (None, None, 0)),
                (tile_m, columns),
            )
            store = cpasync.make_tiled_tma_atom(
                cpasync.CopyBulkTensorTileS2GOp(),
                part,
                cute.slice_(self._layout(part.element_type, 16, columns, 1), (None, None, 0)),
                (16, columns),
            )
            found.append((*load, *store, layout))
        return tuple(found)

    def _layout(self, dtype: Any, rows: int, columns: int, count: int) -> Any:
        return sm90.make_smem_layout_epi(dtype, LayoutEnum.ROW_MAJOR, (rows, columns), count)

    @cute.jit
    def staging(self, smem: SmemAllocator, parts: Any, is_read: Any) -> Staging:
        """Allocate the buffers, and initialize their barriers for all roles to agree on later."""
        barriers = smem.allocate_array(Int64, 2 * MMA_WARP_GROUPS)
        made = []
        for dtype, part in zip((BFloat16, Uint8), parts, strict=True):
            layout = part[-1]
            tile = smem.allocate_tensor(dtype, layout.outer, 1024, layout.inner)
            made.append((*part[:-1], tile))
        if cute.arch.make_warp_uniform(cute.arch.warp_idx()) == 0:
            with cute.arch.elect_one():
                for i in cutlass.range_constexpr(MMA_WARP_GROUPS):
                    cute.arch.mbarrier_init(barriers + 2 * i, 1)
                    # one arrival of each warp of the warpgroup
                    cute.arch.mbarrier_init(barriers + 2 * i + 1, 4)
        return Staging(*made, barriers, is_read)  # type: ignore[call-arg]

    @cute.jit
    def load(self, scheduler: TileScheduler, staging: Staging) -> None:
        """Producer: load the sums of tile after tile, each when its warpgroup's buffer is empty."""
        config, number = self.config, Int32(0)
        if staging.is_read:
            for index in cutlass.range(
                scheduler.cluster, scheduler.num_indices(), scheduler.clusters, unroll=1
            ):
                row, column, _ = scheduler.coord(index, config.raster_group)
                row = row * config.cluster + scheduler.rank
                warp_group_idx = number % MMA_WARP_GROUPS
                full = staging.barriers + 2 * warp_group_idx
                # the first wait of each buffer finds it empty
                cute.arch.mbarrier_wait(full + 1, (number // MMA_WARP_GROUPS + 1) % 2)
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive_and_expect_tx(full, self.tile_bytes)
                for part in (staging.upper, staging.low):
                    atom, coordinates, _, _, smem = part
                    columns = cute.size(smem, mode=[1])
                    shape = config.tile_m, columns
                    panels = config.tile_n // columns
                    _, source, to = partition((atom, coordinates, smem), shape, Int32(0), 1)
                    for panel in cutlass.range_constexpr(panels):
                        cute.copy(
                            atom,
                            source[None, row, column * panels + panel],
                            to[None, warp_group_idx * panels + panel],
                            tma_bar_ptr=full,
                        )
                number += 1

    @cute.jit
    def add(
        self, consumer: Consumer, staging: Staging, m_start: Int32, n_start: Int32, tile: Int32
    ) -> None:
        """Add the accumulators to the sums, or overwrite these.

        The tile is number `tile` of the warpgroup, from 0 on.
        """
        warp = cute.arch.make_warp_uniform(consumer.thread // 32)
        full = staging.barriers + 2 * consumer.warp_group_idx
        if staging.is_read:
            cute.arch.mbarrier_wait(full, tile % 2)
        for m_block in cutlass.range_constexpr(self.config.tile_m // 64):
            for group in cutlass.range_constexpr(self.config.tile_n // 32):
                for half in cutlass.range_constexpr(2):
                    self._add_eight(consumer, staging, m_block, group, half)
            cute.arch.fence_proxy("async.shared", space="cta")
            cute.arch.sync_warp()
            for part in (staging.upper, staging.low):
                _, _, atom, coordinates, smem = part
                columns = cute.size(smem, mode=[1])
                panels = self.config.tile_n // columns
                for panel in cutlass.range_constexpr(panels):
                    s_panel = smem[None, None, consumer.warp_group_idx * panels + panel]
                    s_warp = cute.local_tile(s_panel, (16, columns), (4 * m_block + warp, 0))
                    operand = atom, coordinates, s_warp
                    _, to, source = partition(operand, (16, columns), Int32(0), 1)
                    row = m_start // 16 + 4 * m_block + warp
                    cute.copy(atom, source, to[None, row, n_start // columns + panel])
            cute.arch.cp_async_bulk_commit_group()
        cute.arch.cp_async_bulk_wait_group(0, read=True)
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(full + 1)

    @cute.jit
    def _add_eight(
        self, consumer: Consumer, staging: Staging, m_block: int, group: int, half: int
    ) -> None:
        """Add to the thread's eight sums in a row of 32 columns."""
        values = cute.make_rmem_tensor((8,), Float32)
        for i in cutlass.range_constexpr(8):
            values[i] = consumer.acc[(i % 2, half, 4 * group + i // 2), m_block, 0]
        upper, low = self._places(consumer, staging, m_block, group, half)
        if staging.is_read:
            halves, bytes_ = cute.make_rmem_tensor((4,), Int32), cute.make_rmem_tensor((2,), Int32)
            pairs = cute.recast_tensor(bytes_, Int16)
            for i in cutlass.range_constexpr(4):
                halves[i], pairs[i] = upper[i][0], low[i][0]
            values.store(join_eight(halves, bytes_).load() + values.load())
        halves, bytes_ = split_eight(values)
        pairs = cute.recast_tensor(bytes_, Int16)
        for i in cutlass.range_constexpr(4):
            upper[i][0] = halves[i]
            low[i][0] = pairs[i]

    def _places(
        self, consumer: Consumer, staging: Staging, m_block: int, group: int, half: int
    ) -> Any:
        """Return the words of upper halves and the pairs of bytes of four pairs of columns.

        The 16-byte chunks of a line are swizzled: chunk c of row r is in place c ^ (r % 8).
        """
        tile_m, tile_n = self.config.tile_m, self.config.tile_n
        row, lane = consumer.tCcC[0][0], consumer.thread % 4
        found: tuple[list[Any], list[Any]] = ([], [])
        for j in range(4 * group, 4 * group + 4):
            for part, item in enumerate((2, 1)):
                smem = (staging.upper, staging.low)[part][-1]
                dtype = (Int32, Int16)[part]
                panel, byte = divmod(8 * j * item, LINE)
                chunk, start = divmod(byte, 16)
                # the start of a row and of its quad's chunk have no bits in common
                first = row * LINE + ((row % 8) ^ chunk) * 16 + lane * 2 * item
                buffer = consumer.warp_group_idx * (tile_m * tile_n * item)
                offset = (buffer + first) // (2 * item)
                line = panel * tile_m + m_block * 64 + half * 8
                base = cute.recast_ptr(smem.iterator, dtype=dtype) + offset
                place = base + (line * LINE + start) // (2 * item)
                found[part].append(cute.make_tensor(place, cute.make_layout((1,))))
        return found
