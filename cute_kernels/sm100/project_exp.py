"""`project_exp` for Blackwell: exponentials of logits z = h wᵀ, which never leave the SM.

The mainloop leaves tiles of logits in tensor memory; this file is the epilogue.  Each thread holds
a row: its running maximum and sum stay in registers for a whole work tile, without exchange between
threads.  A warp reads and stores epilogue tiles of 64 columns.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, pipeline
from cutlass.cute.nvgpu import cpasync, tcgen05
from cutlass.memory import SmemAllocator
from cutlass.tensor_utils import LayoutEnum
from cutlass.utils import blackwell_helpers as sm100

from cutefce.cute_kernels.common.dsl import LOG2_E, exp2, partition
from cutefce.cute_kernels.common.launch import Signature
from cutefce.cute_kernels.common.logit_transform import (
    column_bias,
    floored,
    load_bias,
    row_floor,
    row_scale,
    softcap_derivative,
    transform_logit,
)
from cutefce.cute_kernels.common.online_softmax import ProjectExp, Rows, accumulate
from cutefce.cute_kernels.common.row_reductions import RowReducer, bounded_sum
from cutefce.cute_kernels.common.sampling import append_entries, place_entries
from cutefce.cute_kernels.schedule.scheduler import (
    RowCount,
    TileScheduler,
    make_tile_scheduler,
)
from cutefce.cute_kernels.sm100.mainloop import (
    EPILOGUE_WARPS,
    LOAD_WARP,
    MMA_WARP,
    WARPS,
    MainloopSm100,
    after_sync,
    before_sync,
)
from cutefce.cute_kernels.spec import gemm as spec


def compile_signature(kernel: spec.ProjectExpSpec) -> Signature:
    """Return the host function of `kernel` and the arguments to compile it for."""
    return ProjectExpSm100(kernel).signature_of(kernel)


class ProjectExpSm100(ProjectExp, MainloopSm100):
    """The kernel and its launch."""

    def __init__(self, kernel: spec.ProjectExpSpec) -> None:
        super().__init__(kernel)
        self.sums, self.store = kernel.sums, kernel.store
        self.softcap = kernel.transform.softcap
        self.reducer = RowReducer(kernel.reductions)
        self.epi_tile_n = self.arch.EPI_TILE_COLUMNS

    @cute.jit
    def launch(self, operands: Any, stream: Any) -> None:
        """See `ProjectExp`."""
        x, cluster = operands, self.config.cluster
        h_load, w_load = self.tma_loads(x.h, x.w)
        store_e, g_e, e_layout = None, None, None
        if cutlass.const_expr(self.store):
            e_layout = sm100.make_smem_layout_epi(
                self.dtype,
                LayoutEnum.ROW_MAJOR,
                (32, self.epi_tile_n),
                EPILOGUE_WARPS * self.arch.EPI_STAGES,
            )
            store_e, g_e = cpasync.make_tiled_tma_atom(
                cpasync.CopyBulkTensorTileS2GOp(),
                x.exps,
                cute.slice_(e_layout, (None, None, 0)),
                (32, self.epi_tile_n),
            )
        e_store = store_e, g_e, e_layout
        tiles = RowCount(x.count, x.selects), x.vocab_splits
        self.kernel(h_load, w_load, e_store, self.rows_of(x), *tiles).launch(
            grid=[x.clusters * cluster, 1, 1],
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
        row_count: RowCount,
        vocab_splits: Int32,
    ) -> None:
        """Assign warps to roles; h, w and e are (TMA atom, coordinates, shared memory layout)."""
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        (load_h, g_h, h_layout), (load_w, g_w, w_layout), (store_e, g_e, e_layout) = h, w, e
        if warp == LOAD_WARP:
            cpasync.prefetch_descriptor(load_h)
            cpasync.prefetch_descriptor(load_w)

        smem = SmemAllocator()
        stage_barriers = smem.allocate_array(Int64, 2 * self.config.stages)
        acc_barriers = smem.allocate_array(Int64, 2 * self.arch.ACC_STAGES)
        address = smem.allocate_array(Int32, 1)
        s_h = smem.allocate_tensor(self.dtype, h_layout.outer, 1024, h_layout.inner)
        s_w = smem.allocate_tensor(self.dtype, w_layout.outer, 1024, w_layout.inner)
        s_e = None
        if cutlass.const_expr(self.store):
            s_e = smem.allocate_tensor(self.dtype, e_layout.outer, 1024, e_layout.inner)
        stages, acc_pipe = self.make_pipelines(stage_barriers, acc_barriers)
        # made on the device, so that its fields are constants
        tiled_mma = self.tiled_mma()
        accumulators = self.allocate(tiled_mma, warp, address)
        most = (g_w.shape[0] + self.tile[1] - 1) // self.tile[1]
        if cutlass.const_expr(self.sums):
            most = rows.sums.shape[1]
        splits = vocab_splits, most
        scheduler = make_tile_scheduler(self.config, self.tile[2], g_h, g_w, row_count, *splits)
        if warp == LOAD_WARP:
            h_operand, w_operand = (load_h, g_h, s_h), (load_w, g_w, s_w)
            self.load(scheduler, stages, tiled_mma, h_operand, w_operand, rows.semaphores)
        # the first block of a pair issues the MMAs of both
        if warp == MMA_WARP and scheduler.rank == 0:
            pipes, inputs = (stages, acc_pipe), (s_h, s_w)
            self.mma(scheduler, pipes, tiled_mma, inputs, accumulators, rows.semaphores)
        if warp < EPILOGUE_WARPS:
            self.epilogue(scheduler, acc_pipe, accumulators, (store_e, g_e, s_e), rows)
        self.free(warp, accumulators)

    @cute.jit
    def epilogue(
        self, scheduler: TileScheduler, acc_pipe: Any, accumulators: cute.Tensor, e: Any, rows: Rows
    ) -> None:
        """Epilogue warps: reduce or store the exponentials of one row a thread."""
        config, epi_tile_n = self.config, self.epi_tile_n
        epi_tiles, vocab_splits = self.tile[1] // epi_tile_n, scheduler.vocab_splits
        thread = cute.arch.thread_idx()[0]
        copy, logits, fragment = self.tmem_copy(accumulators, thread)
        z = cute.make_tensor(fragment.iterator, cute.make_layout(epi_tile_n))
        state = pipeline.make_pipeline_state(
            pipeline.PipelineUserType.Consumer, self.arch.ACC_STAGES
        )
        buffer, reduced = Int32(0), self.reducer.registers(1)
        for index in cutlass.range(
            scheduler.cluster, scheduler.num_work_tiles(), scheduler.clusters
        ):
            row_block, split, n_end = scheduler.coord(
                index, config.raster_group, rows.semaphores if self.only_flagged else None
            )
            m_start = (row_block * config.cluster + scheduler.rank) * config.tile_m
            row = m_start + thread
            target, reference, limit = Int32(-1), Float32.inf, scheduler.columns
            if row < scheduler.rows:
                target = Int32(rows.target[row] - rows.first)
                reference = rows.reference[row]
            elif scheduler.selects != 0:
                limit = Int32(0)  # stored, but does not count
            base = reference * LOG2_E
            scale = row_scale(rows.transform, row, scheduler.rows)
            row_max, row_sum = -Float32.inf, Float32(0.0)
            self.reducer.reset(reduced)
            for column in cutlass.range(split, n_end, vocab_splits):
                acc_pipe.consumer_wait(state)
                after_sync()
                for epi_tile in cutlass.range(epi_tiles, unroll=1):
                    n_start = column * self.tile[1] + epi_tile * epi_tile_n
                    biases = load_bias(rows.transform, n_start, epi_tile_n)
                    # lanes diverge where they wait and mask; reads need the whole warp
                    cute.arch.sync_warp()
                    cute.copy(copy, logits[None, epi_tile, state.index], fragment)
                    cute.arch.fence_view_async_tmem_load()
                    if epi_tile == epi_tiles - 1:
                        before_sync()
                        with cute.arch.elect_one():
                            acc_pipe.consumer_release(state)
                    of_row = scale, row_floor(rows.transform, row, scheduler.rows), target - n_start
                    self.transform(z, rows.transform, of_row, biases)
                    if cutlass.const_expr(self.reducer.options.of_all):
                        self.mask(z, Int32(-1), limit - n_start)
                        of_tile = target - n_start, range(epi_tile_n)
                        self.reducer.add(self.reducer.row(reduced, 0), z, of_tile)
                    self.mask(z, target - n_start, limit - n_start)
                    if cutlass.const_expr(self.sums):
                        columns = rows.first + n_start, range(epi_tile_n)
                        more = self.reducer.row(reduced, 0)
                        self.reducer.add_others(more, z, columns, reference)
                    if cutlass.const_expr(self.sums and not self.reducer.options.of_all):
                        row_max, row_sum = accumulate(z, row_max, row_sum)
                    if cutlass.const_expr(rows.samples is not None):
                        capped, offsets = None, range(self.epi_tile_n)
                        if cutlass.const_expr(self.softcap):
                            capped = scale
                        launch_row, first = (row, row < scheduler.rows), rows.first + n_start
                        found = place_entries(z, rows.samples, launch_row, first, offsets, capped)
                        append_entries(z, rows.samples, found, offsets)
                    if cutlass.const_expr(self.store):
                        buffer = self.store_exps(z, (base, scale), e, m_start, n_start, buffer)
                state.advance()
            if cutlass.const_expr(self.sums):
                # sums for more splits than there are now receive those of no column
                for written in cutlass.range(split, rows.sums.shape[1], vocab_splits, unroll=1):
                    if row < scheduler.rows:
                        more = self.reducer.row(reduced, 0)
                        if cutlass.const_expr(self.reducer.options.of_all):
                            log_sum = self.reducer.log_sum(more, rows.reference[row])
                            rows.sums[row, written] = log_sum
                        else:
                            distance = row_max - base
                            row_sum = bounded_sum(row_sum)
                            log_sum = distance + cute.math.log2(row_sum, fastmath=True)
                            rows.sums[row, written] = log_sum
                        self.reducer.write(more, rows.reductions, row, written)
                    row_max, row_sum = -Float32.inf, Float32(0.0)
                    self.reducer.reset(reduced)
        if cutlass.const_expr(self.store):
            cute.arch.cp_async_bulk_wait_group(0, read=True)

    @cute.jit
    def tmem_copy(self, accumulators: cute.Tensor, thread: Int32) -> Any:
        """Return (copy of an epilogue tile, its sources by tile and accumulator, its registers)."""
        shape = self.config.tile_m, self.epi_tile_n
        atom = cute.make_copy_atom(tcgen05.Ld32x32bOp(tcgen05.Repetition(shape[1])), Float32)
        epi_tiles = cute.flat_divide(accumulators[(None, None), 0, 0, None], shape)
        copy = tcgen05.make_tmem_copy(atom, epi_tiles[None, None, 0, 0, 0])
        thread_copy = copy.get_slice(thread)
        tDcC = thread_copy.partition_D(cute.make_identity_tensor(shape))
        fragment = cute.make_rmem_tensor(tDcC[None, 0, 0].shape, Float32)
        return copy, thread_copy.partition_S(epi_tiles)[None, 0, 0, 0, None, None], fragment

    @cute.jit
    def transform(self, z: cute.Tensor, operands: Any, of_row: Any, biases: Any) -> None:
        """Turn raw logits into the model's; `of_row` are (κ, floor, column of the target)."""
        scale, floor, target = of_row
        if cutlass.const_expr(operands is not None):
            for column in cutlass.range_constexpr(self.epi_tile_n):
                bias = column_bias(biases, column, 0)
                u = transform_logit(z[column], operands, scale, bias)
                z[column] = floored(u, floor, target == column)

    @cute.jit
    def mask(self, z: cute.Tensor, target: Int32, limit: Int32) -> None:
        """Set the logit of column `target`, and those from column `limit` on, to -inf."""
        if (target >= 0 and target < self.epi_tile_n) or limit < self.epi_tile_n:
            for column in cutlass.range_constexpr(self.epi_tile_n):
                if column == target or column >= limit:
                    z[column] = -Float32.inf

    @cute.jit
    def store_exps(
        self, z: cute.Tensor, row: Any, e: Any, m_start: Int32, n_start: Int32, buffer: Int32
    ) -> Int32:
        """Store an epilogue tile of exponentials, 32 rows a warp; return the next tile's buffer.

        `row` is (ρ · log2 e, κ).
        """
        (base, scale), (atom, g_e, s_e) = row, e
        next_buffer = buffer
        if n_start < g_e.shape[1]:
            thread = cute.arch.thread_idx()[0]
            warp = cute.arch.make_warp_uniform(thread // 32)
            s_warp = s_e[None, None, warp * self.arch.EPI_STAGES + buffer]
            exps = cute.make_rmem_tensor((self.epi_tile_n,), Float32)
            for column in cutlass.range_constexpr(self.epi_tile_n):
                exp = exp2(z[column] * LOG2_E - base)
                if cutlass.const_expr(self.softcap):
                    exp *= softcap_derivative(z[column], cute.arch.rcp_approx(scale))
                exps[column] = exp
            rounded = cute.make_rmem_tensor((self.epi_tile_n,), self.dtype)
            rounded.store(exps.load().to(self.dtype))
            # TMA has read the previous tile of this buffer before this one is written
            cute.arch.cp_async_bulk_wait_group(self.arch.EPI_STAGES - 1, read=True)
            cute.arch.sync_warp()
            cute.autovec_copy(rounded, s_warp[thread % 32, None])
            cute.arch.fence_proxy("async.shared", space="cta")
            cute.arch.sync_warp()
            box = 32, self.epi_tile_n
            _, destinations, source = partition((atom, g_e, s_warp), box, Int32(0), 1)
            coord = m_start // 32 + warp, n_start // self.epi_tile_n
            cute.copy(atom, source, destinations[None, coord[0], coord[1]])
            cute.arch.cp_async_bulk_commit_group()
            next_buffer = (buffer + 1) % self.arch.EPI_STAGES
        return next_buffer
