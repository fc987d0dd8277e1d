"""The Blackwell mainloop of `project_exp`: tiles of h wᵀ, from memory to tensor memory.

A load warp fills pipeline stages with tiles of h and w by TMA, an MMA warp computes one of two
accumulators in tensor memory, and four epilogue warps read them (`sm100.project_exp`).  The thread
blocks of a cluster are a 2-CTA pair: they hold different rows, the leader issues MMAs for both, and
half of w's tile is in the shared memory of each.  Clusters take work tiles in the order of
`schedule.order`.

The roles synchronize through mbarriers in shared memory (producer → consumer):

    filled    loads of a stage, by both blocks of a pair → the MMAs that read it
    drained   these MMAs → the loads that refill the stage
    computed  all MMAs of a tile → the epilogue warps of both blocks of a pair
    read      epilogue warps of both blocks of a pair → the MMAs of the tile after the next
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, pipeline
from cutlass._mlir.dialects import nvvm
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, tcgen05
from cutlass.utils import blackwell_helpers as sm100

from cutefce.cute_kernels.arch import arch_named
from cutefce.cute_kernels.arch.base import TILE_K
from cutefce.cute_kernels.arch.sm100 import Sm100
from cutefce.cute_kernels.common.dsl import DTYPES
from cutefce.cute_kernels.schedule.scheduler import TileScheduler
from cutefce.cute_kernels.spec import gemm as spec

EPILOGUE_WARPS = 4
"""Warps 0 to 3 read accumulators: warp i can access lanes 32·i to 32·i + 31."""
MMA_WARP, LOAD_WARP = 4, 5
WARPS = 6


class MainloopSm100:
    """Loads and MMAs for one kernel spec."""

    def __init__(self, kernel: spec.ProjectExpSpec) -> None:
        arch, config = arch_named(kernel.arch), kernel.config
        assert isinstance(arch, Sm100)
        self.arch, self.config = arch, config
        self.dtype = DTYPES[kernel.dtype]
        self.only_flagged = kernel.only_flagged
        self.is_pair = config.cluster == 2
        self.tile = (config.tile_m * config.cluster, config.tile_n, TILE_K)
        self.tmem_columns = arch.used_tmem_columns(config)

    def tiled_mma(self) -> cute.TiledMma:
        """Return tcgen05.mma over the tile of one thread block, or of a 2-CTA pair."""
        return sm100.make_trivial_tiled_mma(
            self.dtype,
            self.dtype,
            OperandMajorMode.K,
            OperandMajorMode.K,
            Float32,
            tcgen05.CtaGroup.TWO if self.is_pair else tcgen05.CtaGroup.ONE,
            self.tile[:2],
        )

    def cta_layout(self) -> cute.Layout:
        """Return the thread blocks of a cluster as (V, M, N, K)."""
        return cute.make_layout((self.config.cluster, 1, 1, 1))

    @cute.jit
    def tma_loads(self, h: cute.Tensor, w: cute.Tensor) -> Any:
        """Return (TMA atom, coordinates, shared memory layout) of h and of w."""
        tiled_mma = self.tiled_mma()
        stages, shape = self.config.stages, self.cta_layout().shape
        h_layout = sm100.make_smem_layout_a(tiled_mma, self.tile, self.dtype, stages)
        w_layout = sm100.make_smem_layout_b(tiled_mma, self.tile, self.dtype, stages)
        one_stage = (None, None, None, 0)
        load = cpasync.CopyBulkTensorTileG2SOp(tiled_mma.op.cta_group)
        load_h, g_h = cute.nvgpu.make_tiled_tma_atom_A(
            load, h, cute.slice_(h_layout, one_stage), self.tile, tiled_mma, shape
        )
        load_w, g_w = cute.nvgpu.make_tiled_tma_atom_B(
            load, w, cute.slice_(w_layout, one_stage), self.tile, tiled_mma, shape
        )
        return (load_h, g_h, h_layout), (load_w, g_w, w_layout)

    @cute.jit
    def make_pipelines(self, stage_barriers: Any, acc_barriers: Any) -> Any:
        """Return the pipelines of stages and of accumulators; `allocate` makes them visible."""
        tile, threads = self.tile, pipeline.Agent.Thread
        stages = pipeline.PipelineTmaUmma.create(
            barrier_storage=stage_barriers,
            num_stages=self.config.stages,
            producer_group=pipeline.CooperativeGroup(threads),
            consumer_group=pipeline.CooperativeGroup(threads),
            tx_count=(tile[0] + tile[1]) * tile[2] * self.dtype.width // 8,
            cta_layout_vmnk=self.cta_layout(),
            defer_sync=True,
        )
        accumulators = pipeline.PipelineUmmaAsync.create(
            barrier_storage=acc_barriers,
            num_stages=self.arch.ACC_STAGES,
            producer_group=pipeline.CooperativeGroup(threads),
            consumer_group=pipeline.CooperativeGroup(threads, EPILOGUE_WARPS * self.config.cluster),
            cta_layout_vmnk=self.cta_layout(),
            defer_sync=True,
        )
        return stages, accumulators

    @cute.jit
    def allocate(self, tiled_mma: cute.TiledMma, warp: Int32, address: cute.Pointer) -> Any:
        """Return the accumulators ((lane, column), 1, 1, stage), once all blocks have allocated.

        Also makes the barriers initialized so far visible to the cluster.
        """
        if warp == 0:
            cute.arch.sync_warp()  # one lane has initialized barriers
            cute.arch.alloc_tmem(self.tmem_columns, address, is_two_cta=self.is_pair)
            cute.arch.relinquish_tmem_alloc_permit(is_two_cta=self.is_pair)
        cute.arch.mbarrier_init_fence()
        before_sync()
        self.sync()
        after_sync()
        pointer = cute.arch.retrieve_tmem_ptr(Float32, 16, address)
        shape = cute.append(tiled_mma.partition_shape_C(self.tile[:2]), self.arch.ACC_STAGES)
        return cute.make_tensor(pointer, tiled_mma.make_fragment_C(shape).layout)

    @cute.jit
    def free(self, warp: Int32, accumulators: cute.Tensor) -> None:
        """Free tensor memory, once all warps of the cluster have arrived here."""
        before_sync()
        self.sync()
        after_sync()
        if warp == 0:
            cute.arch.sync_warp()
            cute.arch.dealloc_tmem(
                accumulators.iterator, self.tmem_columns, is_two_cta=self.is_pair
            )

    @cute.jit
    def sync(self) -> None:
        """Wait for all threads of the cluster."""
        if cutlass.const_expr(self.config.cluster > 1):
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
        else:
            cute.arch.sync_threads()

    @cute.jit
    def load(
        self,
        scheduler: TileScheduler,
        stages: Any,
        tiled_mma: cute.TiledMma,
        h: Any,
        w: Any,
        semaphores: cute.Tensor,
    ) -> None:
        """Load warp: fill the stages of all tiles; h and w are (TMA atom, coordinates, smem)."""
        config, tile = self.config, self.tile
        mma = tiled_mma.get_slice(scheduler.rank)
        (load_h, g_h, s_h), (load_w, g_w, s_w) = h, w
        h_tiles = mma.partition_A(cute.local_tile(g_h, (tile[0], tile[2]), (None, None)))
        w_tiles = mma.partition_B(cute.local_tile(g_w, (tile[1], tile[2]), (None, None)))
        from_h, to_h = self.partition(load_h, h_tiles, s_h)
        from_w, to_w = self.partition(load_w, w_tiles, s_w)
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, config.stages)
        for index in cutlass.range(
            scheduler.cluster, scheduler.num_work_tiles(), scheduler.clusters
        ):
            row, split, n_end = scheduler.coord(
                index, config.raster_group, semaphores if self.only_flagged else None
            )
            for column in cutlass.range(split, n_end, scheduler.vocab_splits):
                for k_tile in cutlass.range(scheduler.k_tiles, unroll=1):
                    stages.producer_acquire(state)
                    filled = stages.producer_get_barrier(state)
                    cute.copy(
                        load_h,
                        from_h[None, row, k_tile],
                        to_h[None, state.index],
                        tma_bar_ptr=filled,
                    )
                    cute.copy(
                        load_w,
                        from_w[None, column, k_tile],
                        to_w[None, state.index],
                        tma_bar_ptr=filled,
                    )
                    stages.producer_commit(state)
                    state.advance()
        # MMAs of other blocks still arrive at this block's barriers
        stages.producer_tail(state)

    @cute.jit
    def partition(self, atom: Any, tiles: cute.Tensor, smem: cute.Tensor) -> Any:
        """Return the atom's sources by tile and K tile, and its destinations by stage."""
        destination, source = cpasync.tma_partition(
            atom,
            Int32(0),
            cute.make_layout(1),
            cute.group_modes(smem, 0, 3),
            cute.group_modes(tiles, 0, 3),
        )
        return source, destination

    @cute.jit
    def mma(
        self,
        scheduler: TileScheduler,
        pipes: Any,
        tiled_mma: cute.TiledMma,
        inputs: Any,
        accumulators: cute.Tensor,
        semaphores: cute.Tensor,
    ) -> None:
        """MMA warp: compute all tiles, alternating between the accumulators."""
        stages, acc_pipe = pipes
        config = self.config
        a, b = tiled_mma.make_fragment_A(inputs[0]), tiled_mma.make_fragment_B(inputs[1])
        user = pipeline.PipelineUserType
        state = pipeline.make_pipeline_state(user.Consumer, config.stages)
        acc_state = pipeline.make_pipeline_state(user.Producer, self.arch.ACC_STAGES)
        for index in cutlass.range(
            scheduler.cluster, scheduler.num_work_tiles(), scheduler.clusters
        ):
            _, split, n_end = scheduler.coord(
                index, config.raster_group, semaphores if self.only_flagged else None
            )
            for _ in cutlass.range(split, n_end, scheduler.vocab_splits):
                acc_pipe.producer_acquire(acc_state)
                after_sync()
                accumulator = accumulators[None, None, None, acc_state.index]
                tiled_mma.set(tcgen05.Field.ACCUMULATE, False)
                for _ in cutlass.range(scheduler.k_tiles, unroll=1):
                    stages.consumer_wait(state)
                    after_sync()
                    for k_block in cutlass.range_constexpr(self.tile[2] // 16):
                        coord = (None, None, k_block, state.index)
                        cute.gemm(tiled_mma, accumulator, a[coord], b[coord], accumulator)
                        tiled_mma.set(tcgen05.Field.ACCUMULATE, True)
                    stages.consumer_release(state)
                    state.advance()
                acc_pipe.producer_commit(acc_state)
                acc_state.advance()


@cute.jit
def before_sync() -> None:
    """Order this thread's tensor memory accesses before those of others after a barrier."""
    nvvm.tcgen05_fence(nvvm.Tcgen05FenceKind.BEFORE_THREAD_SYNC)


@cute.jit
def after_sync() -> None:
    """Order this thread's tensor memory accesses after those of others before a barrier."""
    nvvm.tcgen05_fence(nvvm.Tcgen05FenceKind.AFTER_THREAD_SYNC)
