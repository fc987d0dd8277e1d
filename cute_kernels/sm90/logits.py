"""The GEMM of logits in float32 for Hopper: out (N, V) = h wᵀ, of h (N, D) and w (V, D).

N, V and D are dynamic; D and V are multiples of 8, and rows start at multiples of 16 bytes.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from cutefce.cute_kernels import spec
from cutefce.cute_kernels.common.dsl import DTYPES, current_stream, matrix, pdl_wait, vector
from cutefce.cute_kernels.schedule.scheduler import RowCount, TileScheduler, make_gemm_scheduler
from cutefce.cute_kernels.sm90.epilogue_store import EpilogueStoreSm90
from cutefce.cute_kernels.sm90.mainloop import MainloopSm90, Operand


def compile_signature(kernel: spec.LogitsSpec) -> tuple[Any, tuple[Any, ...]]:
    """Return the host function of `kernel` and the arguments to compile it for."""
    dtype = DTYPES[kernel.dtype]
    rows, columns = cute.sym_int(), cute.sym_int(divisibility=8)
    hidden = cute.sym_int(divisibility=8)
    operands = matrix(dtype, rows, hidden), matrix(dtype, columns, hidden)
    out, zeros = matrix(Float32, rows, columns), vector(Int32, cute.sym_int())
    return LogitsSm90(kernel), (*operands, out, zeros, Int32(1), current_stream())


class LogitsSm90(MainloopSm90):
    """The kernel and its launch."""

    def __init__(self, kernel: spec.LogitsSpec) -> None:
        k_major = Operand(k_major=True)
        operands = kernel.arch, kernel.dtype, kernel.config, k_major, k_major
        super().__init__(*operands, only_flagged=False, skip_missing_rows=False)
        assert not kernel.config.swaps
        self.epilogue = EpilogueStoreSm90(Float32, kernel.config.tile_n)

    @cute.jit
    def __call__(
        self,
        h: cute.Tensor,
        w: cute.Tensor,
        out: cute.Tensor,
        semaphores: cute.Tensor,
        clusters: Int32,
        stream: Any,
    ) -> None:
        """Launch on `clusters` clusters; `semaphores` (1,) are 0."""
        h_loads, w_load = self.tma_loads(h, w)
        store, tiled_mma = self.epilogue.tma_store(out), self.tiled_mma(self.m_halves)
        self.kernel(tiled_mma, h_loads, w_load, store, semaphores).launch(
            **self.launch_shape(clusters), stream=stream
        )

    @cute.kernel
    def kernel(
        self, tiled_mma: cute.TiledMma, h: Any, w: Any, out: Any, semaphores: cute.Tensor
    ) -> None:
        """Assign warps to roles; h, w and out are (TMA atoms, coordinates, smem layout)."""
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        (loads_h, g_h, h_layout), (load_w, g_w, w_layout), (store, g_out, out_layout) = h, w, out
        if warp == 0:
            for load in (*loads_h, load_w):
                cpasync.prefetch_descriptor(load)
        smem = SmemAllocator()
        barriers = smem.allocate_array(Int64, 2 * self.config.stages)
        s_h = smem.allocate_tensor(self.dtype, h_layout.outer, 1024, h_layout.inner)
        s_w = smem.allocate_tensor(self.dtype, w_layout.outer, 1024, w_layout.inner)
        s_out = smem.allocate_tensor(Float32, out_layout.outer, 1024, out_layout.inner)
        pipe = self.make_pipeline(barriers)
        pdl_wait()
        every_row = RowCount(semaphores, Int32(0)), False
        shape = self.config, self.tile[2], g_h, g_w
        scheduler = make_gemm_scheduler(*shape, *every_row, None, None)
        if warp < 4:
            cute.arch.setmaxregister_decrease(self.producer_registers)
            if warp == 0:
                h_operand, w_operand = (loads_h, g_h, s_h), (load_w, g_w, s_w)
                self.load(scheduler, pipe, h_operand, w_operand, semaphores)
        else:
            cute.arch.setmaxregister_increase(self.consumer_registers)
            self.consume(scheduler, pipe, tiled_mma, (s_h, s_w), (store, g_out, s_out))

    @cute.jit
    def consume(
        self,
        scheduler: TileScheduler,
        pipe: Any,
        tiled_mma: cute.TiledMma,
        inputs: Any,
        out: Any,
    ) -> None:
        """Consumer: run the MMAs of tile after tile, and store the results."""
        config, k_tiles = self.config, scheduler.k_tiles
        consumer, state = self.make_consumer(scheduler, tiled_mma, *inputs)
        for index in cutlass.range(
            scheduler.cluster + consumer.parity * scheduler.clusters,
            scheduler.num_indices(),
            scheduler.clusters * config.partials_per_row,
        ):
            row, column, _ = scheduler.coord(index, config.raster_group)
            m_start = (row * config.cluster + scheduler.rank) * self.tile[0] + consumer.m_half * 64
            state = self.mma(pipe, tiled_mma, consumer, state, k_tiles, k_tiles)
            starts = m_start, column * self.tile[1]
            self.epilogue.store_tile(consumer, self.m_halves, starts, scheduler.columns, out)
        cute.arch.cp_async_bulk_wait_group(0, read=True)
