"""`project_exp` for Blackwell: logits z = h wᵀ that live and die in tensor memory.

The mainloop (`mainloop_sm100`) leaves tiles of logits in tensor memory; what is done with them
there is this file.  A thread holds a row: its maximum and sum stay in registers for a whole unit,
and no thread needs another's.  A warp reads and stores slabs of 64 columns.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, pipeline
from cutlass.cute.nvgpu import cpasync, tcgen05
from cutlass.memory import SmemAllocator
from cutlass.tensor_utils import LayoutEnum
from cutlass.utils import blackwell_helpers as sm100

from cutefce.cute_kernels import spec
from cutefce.cute_kernels.common.dsl import LOG2_E, exp2
from cutefce.cute_kernels.common.online_softmax import Rows, accumulate, arguments, is_emulated
from cutefce.cute_kernels.schedule.scheduler import Walk, make_walk, unit
from cutefce.cute_kernels.sm100.mainloop import (
    LOADER,
    MULTIPLIER,
    READERS,
    WARPS,
    MainloopSm100,
    after_sync,
    before_sync,
)


def trace(kernel: spec.ProjectExpSpec) -> tuple[Any, tuple[Any, ...]]:
    """Return the host function of `kernel` and arguments to compile it for."""
    return ProjectExpSm100(kernel), arguments(kernel)


class ProjectExpSm100(MainloopSm100):
    """The kernel and its launch, for one description."""

    def __init__(self, kernel: spec.ProjectExpSpec) -> None:
        super().__init__(kernel)
        self.sums, self.store = kernel.sums, kernel.store
        self.slab = self.arch.SLAB

    @cute.jit
    def __call__(
        self,
        h: cute.Tensor,
        w: cute.Tensor,
        reference: cute.Tensor,
        target: cute.Tensor,
        sums: cute.Tensor | None,
        exps: cute.Tensor | None,
        notes: cute.Tensor,
        first: Int32,
        windows: Int32,
        clusters: Int32,
        stream: Any,
    ) -> None:
        """Launch on `clusters` clusters."""
        cluster = self.config.cluster
        h_parts, w_parts = self.inputs(h, w)
        store_e, g_e, e_layout = None, None, None
        if cutlass.const_expr(self.store):
            e_layout = sm100.make_smem_layout_epi(
                self.dtype, LayoutEnum.ROW_MAJOR, (32, self.slab), READERS * self.arch.SLABS
            )
            store_e, g_e = cpasync.make_tiled_tma_atom(
                cpasync.CopyBulkTensorTileS2GOp(),
                exps,
                cute.slice_(e_layout, (None, None, 0)),
                (32, self.slab),
            )
        self.kernel(
            h_parts,
            w_parts,
            (store_e, g_e, e_layout),
            Rows(reference, target, sums, notes, first),
            windows,
        ).launch(
            grid=[clusters * cluster, 1, 1],
            block=[32 * WARPS, 1, 1],
            cluster=[cluster, 1, 1],
            min_blocks_per_mp=1,
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self,
        h: Any,
        w: Any,
        e: Any,
        rows: Rows,
        windows: Int32,
    ) -> None:
        """Hand out the roles; h, w and e are (TMA atom, coordinates, shared memory layout)."""
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        (load_h, g_h, h_layout), (load_w, g_w, w_layout), (store_e, g_e, e_layout) = h, w, e
        if warp == LOADER:
            cpasync.prefetch_descriptor(load_h)
            cpasync.prefetch_descriptor(load_w)

        smem = SmemAllocator()
        stage_barriers = smem.allocate_array(Int64, 2 * self.config.stages)
        tile_barriers = smem.allocate_array(Int64, 2 * self.arch.ACCUMULATORS)
        address = smem.allocate_array(Int32, 1)
        s_h = smem.allocate_tensor(self.dtype, h_layout.outer, 1024, h_layout.inner)
        s_w = smem.allocate_tensor(self.dtype, w_layout.outer, 1024, w_layout.inner)
        s_e = None
        if cutlass.const_expr(self.store):
            s_e = smem.allocate_tensor(self.dtype, e_layout.outer, 1024, e_layout.inner)
        stages, tiles = self.pipelines(stage_barriers, tile_barriers)
        # made here, not on the host, its fields are constants
        tiled_mma = self.tiled_mma()
        accumulators = self.allocate(tiled_mma, warp, address)
        walk = make_walk(self.config, self.tile[2], g_h, g_w, windows)
        if warp == LOADER:
            self.load(walk, stages, tiled_mma, (load_h, g_h, s_h), (load_w, g_w, s_w), rows.notes)
        # the first block of a pair multiplies for both
        if warp == MULTIPLIER and walk.rank % self.pair == 0:
            self.multiply(walk, stages, tiles, tiled_mma, (s_h, s_w), accumulators, rows.notes)
        if warp < READERS:
            self.read(walk, tiles, accumulators, (store_e, g_e, s_e), rows)
        self.free(warp, accumulators)

    @cute.jit
    def read(self, walk: Walk, tiles: Any, accumulators: cute.Tensor, e: Any, rows: Rows) -> None:
        """Reader: turn the logits of one row a thread into sums and exponentials."""
        config, slab, slabs = self.config, self.slab, self.tile[1] // self.slab
        thread = cute.arch.thread_idx()[0]
        copy, logits, fragment = self.reader(accumulators, thread)
        z = cute.make_tensor(fragment.iterator, cute.make_layout(slab))
        state = pipeline.make_pipeline_state(
            pipeline.PipelineUserType.Consumer, self.arch.ACCUMULATORS
        )
        buffer = Int32(0)
        for index in cutlass.range(walk.cluster, walk.row_blocks * walk.windows, walk.clusters):
            block, window, end = unit(
                walk, config.raster_group, rows.notes if self.masked else None, index
            )
            top = (block * config.cluster + walk.rank) * config.tile_m
            row = top + thread
            target, base = Int32(-1), Float32.inf
            if row < walk.rows:
                target = Int32(rows.target[row] - rows.first)
                base = rows.reference[row] * LOG2_E
            highest, total = -Float32.inf, Float32(0.0)
            for column in cutlass.range(window, end, walk.windows):
                tiles.consumer_wait(state)
                after_sync()
                for number in cutlass.range(slabs, unroll=1):
                    # lanes part where they wait and where they hide logits; they read as one
                    cute.arch.sync_warp()
                    cute.copy(copy, logits[None, number, state.index], fragment)
                    cute.arch.fence_view_async_tmem_load()
                    if number == slabs - 1:
                        before_sync()
                        with cute.arch.elect_one():
                            tiles.consumer_release(state)
                    left = column * self.tile[1] + number * slab
                    self.hide(z, target - left, walk.columns - left)
                    if cutlass.const_expr(self.sums):
                        highest, total = accumulate(z, highest, total, config.poly_exp2_per_16)
                    if cutlass.const_expr(self.store):
                        buffer = self.put(z, base, e, top, left, buffer)
                state.advance()
            if cutlass.const_expr(self.sums):
                if row < walk.rows:
                    rows.sums[row, window] = highest - base + cute.math.log2(total, fastmath=True)
        if cutlass.const_expr(self.store):
            cute.arch.cp_async_bulk_wait_group(0, read=True)

    @cute.jit
    def reader(self, accumulators: cute.Tensor, thread: Int32) -> Any:
        """Return the copy of a slab, its sources by slab and accumulator, and its registers."""
        atom = cute.make_copy_atom(tcgen05.Ld32x32bOp(tcgen05.Repetition(self.slab)), Float32)
        slabs = cute.flat_divide(
            accumulators[(None, None), 0, 0, None], (self.config.tile_m, self.slab)
        )
        copy = tcgen05.make_tmem_copy(atom, slabs[None, None, 0, 0, 0])
        part = copy.get_slice(thread)
        own = part.partition_D(cute.make_identity_tensor((self.config.tile_m, self.slab)))
        fragment = cute.make_rmem_tensor(own[None, 0, 0].shape, Float32)
        return copy, part.partition_S(slabs)[None, 0, 0, 0, None, None], fragment

    @cute.jit
    def hide(self, z: cute.Tensor, target: Int32, limit: Int32) -> None:
        """Set the logit of column `target`, and those from column `limit` on, to -inf."""
        if (target >= 0 and target < self.slab) or limit < self.slab:
            for column in cutlass.range_constexpr(self.slab):
                if column == target or column >= limit:
                    z[column] = -Float32.inf

    @cute.jit
    def put(
        self, z: cute.Tensor, base: Float32, e: Any, top: Int32, left: Int32, buffer: Int32
    ) -> Int32:
        """Store a slab of exponentials, each warp its own 32 rows; return the next one's buffer."""
        atom, g_e, s_e = e
        following = buffer
        if left < g_e.shape[1]:
            thread = cute.arch.thread_idx()[0]
            warp = cute.arch.make_warp_uniform(thread // 32)
            shared = s_e[None, None, warp * self.arch.SLABS + buffer]
            exps = cute.make_rmem_tensor((self.slab,), Float32)
            for column in cutlass.range_constexpr(self.slab):
                emulated = is_emulated(column, self.config.poly_exp2_per_16)
                exps[column] = exp2(z[column] * LOG2_E - base, emulated)
            rounded = cute.make_rmem_tensor((self.slab,), self.dtype)
            rounded.store(exps.load().to(self.dtype))
            # the slab that lay in this buffer has been read, and all of this one is written
            cute.arch.cp_async_bulk_wait_group(self.arch.SLABS - 1, read=True)
            cute.arch.sync_warp()
            cute.autovec_copy(rounded, shared[thread % 32, None])
            cute.arch.fence_proxy("async.shared", space="cta")
            cute.arch.sync_warp()
            to, source = self.destination(atom, g_e, shared)
            cute.copy(atom, source, to[None, top // 32 + warp, left // self.slab])
            cute.arch.cp_async_bulk_commit_group()
            following = (buffer + 1) % self.arch.SLABS
        return following

    @cute.jit
    def destination(self, atom: Any, g_e: cute.Tensor, shared: cute.Tensor) -> Any:
        """Return where slabs go, by row and column, and where `shared` is read."""
        slabs = cute.local_tile(g_e, (32, self.slab), (None, None))
        source, to = cpasync.tma_partition(
            atom,
            Int32(0),
            cute.make_layout(1),
            cute.group_modes(shared, 0, 2),
            cute.group_modes(slabs, 0, 2),
        )
        return to, source
