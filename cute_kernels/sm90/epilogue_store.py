"""From accumulators to memory on Hopper: each warp its own 16 rows of every 64, slab by slab.

A slab is as wide as a swizzle of shared memory, 128 bytes at most.  A warp writes it there and
hands it to TMA, which stores it, or adds it to the float32 that memory holds; no warp waits for
another.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32
from cutlass.cute.nvgpu import CopyUniversalOp, OperandMajorMode, cpasync
from cutlass.cute.nvgpu.warp import StMatrix8x8x16bOp
from cutlass.tensor_utils import LayoutEnum
from cutlass.utils import hopper_helpers as sm90

from cutefce.cute_kernels.arch.base import slab_columns
from cutefce.cute_kernels.sm90.mainloop import CONSUMERS, partition


class SlabsSm90:
    """Slabs of tiles of `tile_n` columns; 16-bit ones are stored, float32 ones may be added."""

    def __init__(self, dtype: Any, tile_n: int) -> None:
        self.dtype = dtype
        self.width = slab_columns(tile_n, dtype.width // 8)

    @cute.jit
    def output(self, out: cute.Tensor) -> Any:
        """Return (TMA atom that stores, coordinates, shared memory layout) of `out`."""
        # the four warps of a warpgroup lie together
        layout = self._layout(64, CONSUMERS)
        atom, coordinates = self._atom(cpasync.CopyBulkTensorTileS2GOp(), out)
        return atom, coordinates, layout

    @cute.jit
    def adder(self, out: cute.Tensor) -> Any:
        """Return the TMA atom that adds to `out`; None for 16-bit numbers."""
        atom = None
        if cutlass.const_expr(self.dtype is Float32):
            atom, _ = self._atom(cpasync.CopyReduceBulkTensorTileS2GOp(), out)
        return atom

    def _atom(self, op: Any, out: cute.Tensor) -> Any:
        slab = cute.slice_(self._layout(16, 1), (None, None, 0))
        return cpasync.make_tiled_tma_atom(op, out, slab, (16, self.width))

    def _layout(self, rows: int, count: int) -> Any:
        shape = rows, self.width
        return sm90.make_smem_layout_epi(self.dtype, LayoutEnum.ROW_MAJOR, shape, count)

    @cute.jit
    def put(
        self,
        values: cute.Tensor,
        thread: Int32,
        group: Int32,
        out: Any,
        at: Any,
        add: Any = None,
    ) -> None:
        """Put `values` (2, 2, width / 8): accumulators (v, half, j) of `thread` of a warpgroup.

        `out` is (TMA atom, coordinates, shared memory), `at` the first of the warpgroup's 64 rows,
        and which slab of these rows it is.  `add` is (TMA atom that adds, whether it is to).
        """
        atom, coordinates, smem = out
        warp = cute.arch.make_warp_uniform(thread // 32)
        shared = smem[None, None, group]
        slab = cute.local_tile(shared, (16, self.width), (warp, 0))
        _, destination, source = partition((atom, coordinates, slab), (16, self.width), Int32(0), 1)
        # the slab before has been read, and all of this one is written
        cute.arch.cp_async_bulk_wait_group(0, read=True)
        cute.arch.sync_warp()
        self._write(values, shared, thread)
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_warp()
        place = destination[None, at[0] // 16 + warp, at[1]]
        if cutlass.const_expr(add is None):
            cute.copy(atom, source, place)
        else:
            adder, adds = add
            if adds:
                cute.copy(adder, source, place)
            else:
                cute.copy(atom, source, place)
        cute.arch.cp_async_bulk_commit_group()

    @cute.jit
    def _write(self, values: cute.Tensor, shared: cute.Tensor, thread: Int32) -> None:
        """Write a thread's values to the warpgroup's (64, width) in shared memory."""
        # the layout of wgmma's accumulators, whatever is multiplied
        k = OperandMajorMode.K
        mma = sm90.make_trivial_tiled_mma(
            BFloat16, BFloat16, k, k, Float32, (1, 1, 1), (64, self.width)
        )
        if cutlass.const_expr(self.dtype is Float32):
            pairs = cute.make_copy_atom(CopyUniversalOp(), Float32, num_bits_per_copy=64)
            to_slab = mma.get_slice(thread).partition_C(shared)
            cute.copy(pairs, cute.make_tensor(values.iterator, to_slab.shape), to_slab)
        else:
            stmatrix = cute.make_copy_atom(StMatrix8x8x16bOp(False, 4), self.dtype)
            copy = cute.make_tiled_copy_S(stmatrix, cute.make_tiled_copy_C_atom(stmatrix, mma))
            to_slab = copy.get_slice(thread).partition_D(shared)
            rounded = cute.make_rmem_tensor(to_slab.shape, self.dtype)
            flat = cute.make_tensor(values.iterator, rounded.layout)
            rounded.store(flat.load().to(self.dtype))
            cute.copy(copy, rounded, to_slab)
