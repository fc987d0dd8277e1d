"""The Blackwell mainloop of `project_exp`: tiles of h wᵀ, from memory to tensor memory.

One warp loads tiles of h and w by TMA, one lets the tensor cores multiply them into one of two
accumulators in tensor memory, and four read the accumulators (`project_exp_sm100`); each runs
ahead of the next as far as stages and accumulators go.  The thread blocks of a cluster hold
different rows and share each tile of w: by multicast; or as a pair, whose first block multiplies
for both, with half of w's tile in the shared memory of each.  A cluster walks units (`tile_order`).

Who waits for whom, through barriers in shared memory:

    filled    loads of a stage, of both blocks of a pair → the products that read them
    drained   these products, of all blocks that share w → the loads that fill the stage again
    computed  all products of a tile → the warps that read it, in both blocks of a pair
    read      these warps, of both blocks of a pair → the products of the tile after the next
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, pipeline
from cutlass._mlir.dialects import nvvm
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, tcgen05
from cutlass.utils import blackwell_helpers as sm100

from cutefce.cute_kernels import spec
from cutefce.cute_kernels.arch import arch_named
from cutefce.cute_kernels.arch.base import STEP
from cutefce.cute_kernels.arch.sm100 import Sm100
from cutefce.cute_kernels.common.dsl import DTYPES
from cutefce.cute_kernels.schedule.scheduler import Walk, unit

READERS = 4
"""Warps that read accumulators, the first ones: warp i can reach lanes 32·i to 32·i + 31."""
MULTIPLIER, LOADER = 4, 5
"""The other warps."""
WARPS = 6


class MainloopSm100:
    """Loading and multiplying, for one description."""

    def __init__(self, kernel: spec.ProjectExpSpec) -> None:
        arch, config = arch_named(kernel.arch), kernel.config
        assert isinstance(arch, Sm100)
        arch.check(config)
        self.arch, self.config = arch, config
        self.dtype = DTYPES[kernel.dtype]
        self.masked = kernel.masked
        # thread blocks that multiply as one, and how many of such hold different rows of a cluster
        self.pair = 2 if config.two_cta else 1
        self.sharing = config.cluster // self.pair
        self.tile = (config.tile_m * self.pair, config.tile_n, STEP)
        self.columns = arch.used_tmem_columns(config)

    def tiled_mma(self) -> cute.TiledMma:
        """Return tcgen05.mma over a tile of one thread block, or of a pair."""
        return sm100.make_trivial_tiled_mma(
            self.dtype,
            self.dtype,
            OperandMajorMode.K,
            OperandMajorMode.K,
            Float32,
            tcgen05.CtaGroup.TWO if self.config.two_cta else tcgen05.CtaGroup.ONE,
            self.tile[:2],
        )

    def blocks(self) -> cute.Layout:
        """Return the thread blocks of a cluster as (pair, rows, columns, features)."""
        return cute.make_layout((self.pair, self.sharing, 1, 1))

    @cute.jit
    def inputs(self, h: cute.Tensor, w: cute.Tensor) -> Any:
        """Return (TMA atom, coordinates, shared memory layout) of h and of w."""
        tiled_mma = self.tiled_mma()
        stages, shape = self.config.stages, self.blocks().shape
        h_layout = sm100.make_smem_layout_a(tiled_mma, self.tile, self.dtype, stages)
        w_layout = sm100.make_smem_layout_b(tiled_mma, self.tile, self.dtype, stages)
        one = (None, None, None, 0)
        load = cpasync.CopyBulkTensorTileG2SOp(tiled_mma.op.cta_group)
        share = load
        if cutlass.const_expr(self.sharing > 1):
            share = cpasync.CopyBulkTensorTileG2SMulticastOp(tiled_mma.op.cta_group)
        load_h, g_h = cute.nvgpu.make_tiled_tma_atom_A(
            load, h, cute.slice_(h_layout, one), self.tile, tiled_mma, shape
        )
        load_w, g_w = cute.nvgpu.make_tiled_tma_atom_B(
            share, w, cute.slice_(w_layout, one), self.tile, tiled_mma, shape
        )
        return (load_h, g_h, h_layout), (load_w, g_w, w_layout)

    @cute.jit
    def pipelines(self, stage_barriers: Any, tile_barriers: Any) -> Any:
        """Return the pipelines of stages and of accumulators; barriers are set up, not yet seen."""
        tile, threads = self.tile, pipeline.Agent.Thread
        stages = pipeline.PipelineTmaUmma.create(
            barrier_storage=stage_barriers,
            num_stages=self.config.stages,
            producer_group=pipeline.CooperativeGroup(threads),
            # one arrival for each multiplier that reads what a block has loaded
            consumer_group=pipeline.CooperativeGroup(threads, self.sharing),
            tx_count=(tile[0] + tile[1]) * tile[2] * self.dtype.width // 8,
            cta_layout_vmnk=self.blocks(),
            defer_sync=True,
        )
        tiles = pipeline.PipelineUmmaAsync.create(
            barrier_storage=tile_barriers,
            num_stages=self.arch.ACCUMULATORS,
            producer_group=pipeline.CooperativeGroup(threads),
            consumer_group=pipeline.CooperativeGroup(threads, READERS * self.pair),
            cta_layout_vmnk=self.blocks(),
            defer_sync=True,
        )
        return stages, tiles

    @cute.jit
    def allocate(self, tiled_mma: cute.TiledMma, warp: Int32, address: cute.Pointer) -> Any:
        """Return the accumulators (lane and column, 1, 1, number), once all blocks have theirs.

        Also makes every barrier that was set up before visible to the cluster.
        """
        if warp == 0:
            cute.arch.sync_warp()  # one lane has set up barriers
            cute.arch.alloc_tmem(self.columns, address, is_two_cta=self.config.two_cta)
            cute.arch.relinquish_tmem_alloc_permit(is_two_cta=self.config.two_cta)
        cute.arch.mbarrier_init_fence()
        before_sync()
        self.sync()
        after_sync()
        pointer = cute.arch.retrieve_tmem_ptr(Float32, 16, address)
        shape = cute.append(tiled_mma.partition_shape_C(self.tile[:2]), self.arch.ACCUMULATORS)
        return cute.make_tensor(pointer, tiled_mma.make_fragment_C(shape).layout)

    @cute.jit
    def free(self, warp: Int32, accumulators: cute.Tensor) -> None:
        """Give tensor memory back, once all warps of the cluster have come here."""
        before_sync()
        self.sync()
        after_sync()
        if warp == 0:
            cute.arch.sync_warp()
            cute.arch.dealloc_tmem(
                accumulators.iterator, self.columns, is_two_cta=self.config.two_cta
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
        walk: Walk,
        stages: Any,
        tiled_mma: cute.TiledMma,
        h: Any,
        w: Any,
        notes: cute.Tensor,
    ) -> None:
        """Loader: fill the stages, tile after tile; h and w are (TMA atom, coordinates, smem)."""
        config, tile = self.config, self.tile
        mma = tiled_mma.get_slice(walk.rank % self.pair)
        (load_h, g_h, s_h), (load_w, g_w, s_w) = h, w
        h_tiles = mma.partition_A(cute.local_tile(g_h, (tile[0], tile[2]), (None, None)))
        w_tiles = mma.partition_B(cute.local_tile(g_w, (tile[1], tile[2]), (None, None)))
        from_h, to_h = self.partition(load_h, h_tiles, s_h, Int32(0), 1)
        member = walk.rank // self.pair
        from_w, to_w = self.partition(load_w, w_tiles, s_w, member, self.sharing)
        everyone = {"mcast_mask": cutlass.Int16((1 << config.cluster) - 1)}
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, config.stages)
        for index in cutlass.range(walk.cluster, walk.row_blocks * walk.windows, walk.clusters):
            row, window, end = unit(
                walk, config.raster_group, notes if self.masked else None, index
            )
            row = row * self.sharing + member
            for column in cutlass.range(window, end, walk.windows):
                for step in cutlass.range(walk.steps, unroll=1):
                    stages.producer_acquire(state)
                    filled = stages.producer_get_barrier(state)
                    cute.copy(
                        load_h, from_h[None, row, step], to_h[None, state.index], tma_bar_ptr=filled
                    )
                    cute.copy(
                        load_w,
                        from_w[None, column, step],
                        to_w[None, state.index],
                        tma_bar_ptr=filled,
                        **(everyone if self.sharing > 1 else {}),
                    )
                    stages.producer_commit(state)
                    state.advance()
        # others' products still arrive at the barriers of this block
        stages.producer_tail(state)

    @cute.jit
    def partition(
        self, atom: Any, tiles: cute.Tensor, smem: cute.Tensor, member: Int32, shared_by: int
    ) -> Any:
        """Return the atom's sources by tile and step, and its destinations by stage."""
        destination, source = cpasync.tma_partition(
            atom,
            member,
            cute.make_layout(shared_by),
            cute.group_modes(smem, 0, 3),
            cute.group_modes(tiles, 0, 3),
        )
        return source, destination

    @cute.jit
    def multiply(
        self,
        walk: Walk,
        stages: Any,
        tiles: Any,
        tiled_mma: cute.TiledMma,
        inputs: Any,
        accumulators: cute.Tensor,
        notes: cute.Tensor,
    ) -> None:
        """Multiplier: tile after tile, into one accumulator and the other one in turns."""
        config = self.config
        a, b = tiled_mma.make_fragment_A(inputs[0]), tiled_mma.make_fragment_B(inputs[1])
        user = pipeline.PipelineUserType
        state = pipeline.make_pipeline_state(user.Consumer, config.stages)
        turn = pipeline.make_pipeline_state(user.Producer, self.arch.ACCUMULATORS)
        for index in cutlass.range(walk.cluster, walk.row_blocks * walk.windows, walk.clusters):
            _, window, end = unit(walk, config.raster_group, notes if self.masked else None, index)
            for _ in cutlass.range(window, end, walk.windows):
                tiles.producer_acquire(turn)
                after_sync()
                accumulator = accumulators[None, None, None, turn.index]
                tiled_mma.set(tcgen05.Field.ACCUMULATE, False)
                for _ in cutlass.range(walk.steps, unroll=1):
                    stages.consumer_wait(state)
                    after_sync()
                    for block in cutlass.range_constexpr(self.tile[2] // 16):
                        at = (None, None, block, state.index)
                        cute.gemm(tiled_mma, accumulator, a[at], b[at], accumulator)
                        tiled_mma.set(tcgen05.Field.ACCUMULATE, True)
                    stages.consumer_release(state)
                    state.advance()
                tiles.producer_commit(turn)
                turn.advance()


@cute.jit
def before_sync() -> None:
    """Order what this thread did to tensor memory before what others do after a barrier."""
    nvvm.tcgen05_fence(nvvm.Tcgen05FenceKind.BEFORE_THREAD_SYNC)


@cute.jit
def after_sync() -> None:
    """Order what this thread does to tensor memory after what others did before a barrier."""
    nvvm.tcgen05_fence(nvvm.Tcgen05FenceKind.AFTER_THREAD_SYNC)
