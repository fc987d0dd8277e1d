"""Stores of accumulators whose columns are the rows of a matrix in memory, on Hopper.

Each warp has 16 of every 64 rows of accumulators.  It writes some of their columns, transposed, to
shared memory, as rows of 32 bytes, and issues a TMA store.  Warps never wait for each other.
"""

from typing import Any

import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.nvgpu import cpasync
from cutlass.cute.nvgpu.warp import StMatrix8x8x16bOp

from cutefce.cute_kernels.arch.sm90 import stored_tokens
from cutefce.cute_kernels.common.dsl import partition
from cutefce.cute_kernels.sm90.epilogue_store import accumulator_mma
from cutefce.cute_kernels.sm90.mainloop import MMA_WARP_GROUPS

COLUMNS = 16
"""Columns of the matrix that a warp stores."""


class TransposedStoreSm90:
    """Stores of 16-bit results (tokens, columns) from accumulators of `tile_n` tokens."""

    def __init__(self, dtype: Any, tile_n: int) -> None:
        self.dtype, self.tokens = dtype, stored_tokens(tile_n)

    @cute.jit
    def tma_store(self, out: cute.Tensor) -> Any:
        """Return (TMA atom, coordinates, shared memory layout) for stores to `out`."""
        shape, swizzle = (self.tokens, COLUMNS), cute.make_swizzle(1, 4, 3)  # of 32-byte rows
        row_major = cute.make_layout(shape, stride=(COLUMNS, 1))
        box = cute.make_composed_layout(swizzle, 0, row_major)
        store = cpasync.CopyBulkTensorTileS2GOp()
        atom, coordinates = cpasync.make_tiled_tma_atom(store, out, box, shape)
        warps = 4 * MMA_WARP_GROUPS
        of_warps = cute.make_layout((*shape, warps), stride=(COLUMNS, 1, self.tokens * COLUMNS))
        layout = cute.make_composed_layout(swizzle, 0, of_warps)
        return atom, coordinates, layout

    @cute.jit
    def store(
        self, values: cute.Tensor, thread: Int32, warp_group_idx: Int32, out: Any, coord: Any
    ) -> None:
        """Store `values` (2, 2, tokens / 8): accumulators (v, half, j) of `thread` of a warpgroup.

        `out` is (TMA atom, coordinates, shared memory); `coord` is (number of the tokens, first of
        the warpgroup's 64 columns).
        """
        atom, coordinates, smem = out
        warp = cute.arch.make_warp_uniform(thread // 32)
        shape = self.tokens, COLUMNS
        s_warp = smem[None, None, 4 * warp_group_idx + warp]
        _, destinations, source = partition((atom, coordinates, s_warp), shape, Int32(0), 1)
        first = coord[1] + COLUMNS * warp
        if first < coordinates.shape[1]:
            # TMA has read the previous tokens before these are written
            cute.arch.cp_async_bulk_wait_group(0, read=True)
            cute.arch.sync_warp()
            self._write_smem(values, smem, warp_group_idx, thread)
            cute.arch.fence_proxy("async.shared", space="cta")
            cute.arch.sync_warp()
            cute.copy(atom, source, destinations[None, coord[0], first // COLUMNS])
            cute.arch.cp_async_bulk_commit_group()

    @cute.jit
    def _write_smem(
        self, values: cute.Tensor, smem: cute.Tensor, warp_group_idx: Int32, thread: Int32
    ) -> None:
        """Write a thread's values to those of its warp's (tokens, 16) in shared memory."""
        mma = accumulator_mma(self.tokens)
        # the warpgroup's (64 columns, tokens)
        of_warp = self.tokens * COLUMNS
        layout = cute.make_layout(((COLUMNS, 4), self.tokens), stride=((1, of_warp), COLUMNS))
        tile = cute.make_tensor(smem[None, None, 4 * warp_group_idx].iterator, layout)
        stmatrix = cute.make_copy_atom(StMatrix8x8x16bOp(True, 2), self.dtype)
        copy = cute.make_tiled_copy_S(stmatrix, cute.make_tiled_copy_C_atom(stmatrix, mma))
        tRS_s = copy.get_slice(thread).partition_D(tile)
        rounded = cute.make_rmem_tensor(((4, 1), 1, self.tokens // 8), self.dtype)
        flat = cute.make_tensor(values.iterator, rounded.layout)
        rounded.store(flat.load().to(self.dtype))
        cute.copy(copy, rounded, tRS_s)
