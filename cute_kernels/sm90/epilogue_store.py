"""The Hopper epilogue's stores: from accumulators through shared memory to global memory by TMA.

Each warp writes its 16 rows of every 64 in epilogue tiles, as wide as a swizzle of shared memory
(128 bytes at most), and issues a TMA store, or a TMA reduction onto float32.  Warps never wait for
each other.
"""

import math
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32
from cutlass.cute.nvgpu import CopyUniversalOp, OperandMajorMode, cpasync
from cutlass.cute.nvgpu.warp import StMatrix8x8x16bOp
from cutlass.tensor_utils import LayoutEnum
from cutlass.utils import hopper_helpers as sm90

from cutefce.cute_kernels.common.dsl import partition
from cutefce.cute_kernels.sm90.mainloop import MMA_WARP_GROUPS, Consumer


class EpilogueStoreSm90:
    """Stores of tiles of `tile_n` columns: 16-bit results, or float32 ones, which may be added."""

    def __init__(self, dtype: Any, tile_n: int) -> None:
        self.dtype = dtype
        self.epi_tile_n = math.gcd(tile_n, 128 // (dtype.width // 8))

    @cute.jit
    def tma_store(self, out: cute.Tensor) -> Any:
        """Return (TMA atom, coordinates, shared memory layout) for stores to `out`."""
        # the epilogue tiles of a warpgroup's four warps are contiguous
        layout = self._smem_layout(64, MMA_WARP_GROUPS)
        atom, coordinates = self._tma_atom(cpasync.CopyBulkTensorTileS2GOp(), out)
        return atom, coordinates, layout

    @cute.jit
    def tma_add(self, out: cute.Tensor) -> Any:
        """Return the TMA atom that adds to `out`; None for 16-bit dtypes."""
        atom = None
        if cutlass.const_expr(self.dtype is Float32):
            atom, _ = self._tma_atom(cpasync.CopyReduceBulkTensorTileS2GOp(), out)
        return atom

    def _tma_atom(self, op: Any, out: cute.Tensor) -> Any:
        epi_tile = cute.slice_(self._smem_layout(16, 1), (None, None, 0))
        return cpasync.make_tiled_tma_atom(op, out, epi_tile, (16, self.epi_tile_n))

    def _smem_layout(self, rows: int, count: int) -> Any:
        shape = rows, self.epi_tile_n
        return sm90.make_smem_layout_epi(self.dtype, LayoutEnum.ROW_MAJOR, shape, count)

    @cute.jit
    def store(
        self,
        values: cute.Tensor,
        thread: Int32,
        warp_group_idx: Int32,
        out: Any,
        coord: Any,
        add: Any = None,
    ) -> None:
        """Store `values` (2, 2, columns / 8): accumulators (v, half, j) of `thread` of a warpgroup.

        `out` is (TMA atom, coordinates, shared memory); `coord` is (first of the warpgroup's 64
        rows, epilogue tile of these rows); `add` is (TMA atom that adds, whether to add).
        """
        atom, coordinates, smem = out
        warp = cute.arch.make_warp_uniform(thread // 32)
        shape = 16, self.epi_tile_n
        s_warp_group = smem[None, None, warp_group_idx]
        s_warp = cute.local_tile(s_warp_group, shape, (warp, 0))
        _, destinations, source = partition((atom, coordinates, s_warp), shape, Int32(0), 1)
        # TMA has read the previous tile before this one is written
        cute.arch.cp_async_bulk_wait_group(0, read=True)
        cute.arch.sync_warp()
        self._write_smem(values, s_warp_group, thread)
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_warp()
        destination = destinations[None, coord[0] // 16 + warp, coord[1]]
        if cutlass.const_expr(add is None):
            cute.copy(atom, source, destination)
        else:
            add_atom, must_add = add
            if must_add:
                cute.copy(add_atom, source, destination)
            else:
                cute.copy(atom, source, destination)
        cute.arch.cp_async_bulk_commit_group()

    @cute.jit
    def store_tile(
        self,
        consumer: Consumer,
        m_halves: int,
        starts: Any,
        columns: Int32,
        out: Any,
        add: Any = None,
    ) -> None:
        """Store or add a tile's accumulators, epilogue tile by epilogue tile; see `store`.

        `starts` are its first row and column; there are `columns` in all.  `m_halves` warpgroups
        share the tile.
        """
        m_start, n_start = starts
        epi_tile_n, acc = self.epi_tile_n, consumer.acc
        m_blocks, tile_n = cute.size(acc, mode=[1]), cute.size(acc, mode=[0]) * 2
        for m_block in cutlass.range_constexpr(m_blocks):
            for epi_tile in cutlass.range_constexpr(tile_n // epi_tile_n):
                if n_start + epi_tile * epi_tile_n < columns:
                    values = cute.make_rmem_tensor((2, 2, epi_tile_n // 8), Float32)
                    for j in cutlass.range_constexpr(epi_tile_n // 8):
                        for half in cutlass.range_constexpr(2):
                            for v in cutlass.range_constexpr(2):
                                acc_j = epi_tile * (epi_tile_n // 8) + j
                                values[v, half, j] = acc[(v, half, acc_j), m_block, 0]
                    row_start = m_start + m_block * 64 * m_halves
                    coord = row_start, n_start // epi_tile_n + epi_tile
                    thread, warp_group_idx = consumer.thread, consumer.warp_group_idx
                    self.store(values, thread, warp_group_idx, out, coord, add)

    @cute.jit
    def _write_smem(self, values: cute.Tensor, smem: cute.Tensor, thread: Int32) -> None:
        """Write a thread's values to the warpgroup's (64, columns) in shared memory."""
        mma = accumulator_mma(self.epi_tile_n)
        if cutlass.const_expr(self.dtype is Float32):
            pairs = cute.make_copy_atom(CopyUniversalOp(), Float32, num_bits_per_copy=64)
            tCsC = mma.get_slice(thread).partition_C(smem)
            cute.copy(pairs, cute.make_tensor(values.iterator, tCsC.shape), tCsC)
        else:
            stmatrix = cute.make_copy_atom(StMatrix8x8x16bOp(False, 4), self.dtype)
            copy = cute.make_tiled_copy_S(stmatrix, cute.make_tiled_copy_C_atom(stmatrix, mma))
            tRS_s = copy.get_slice(thread).partition_D(smem)
            rounded = cute.make_rmem_tensor(tRS_s.shape, self.dtype)
            flat = cute.make_tensor(values.iterator, rounded.layout)
            rounded.store(flat.load().to(self.dtype))
            cute.copy(copy, rounded, tRS_s)


def accumulator_mma(columns: int) -> cute.TiledMma:
    """Return an MMA with the layout of a warpgroup's accumulators, of 64 rows and `columns`.

    wgmma has this layout for operands of any dtype and major mode.
    """
    k, shape = OperandMajorMode.K, (64, columns)
    return sm90.make_trivial_tiled_mma(BFloat16, BFloat16, k, k, Float32, (1, 1, 1), shape)
