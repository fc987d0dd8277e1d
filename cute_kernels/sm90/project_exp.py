"""`project_exp` for Hopper: exponentials of logits z = h wᵀ, which remain in registers.

This file has its launch, the roles of its warps, and the epilogue.  The mainloop leaves a tile of
logits in a warpgroup's accumulators.  A row's running maximum and sum stay in registers for a whole
work tile.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from cutefce.cute_kernels.common.dsl import LOG2_E, exp2
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
from cutefce.cute_kernels.common.row_reductions import RowReducer, bounded_sum, finite
from cutefce.cute_kernels.common.sampling import append_entries, place_entries
from cutefce.cute_kernels.schedule.scheduler import RowCount, TileScheduler, make_tile_scheduler
from cutefce.cute_kernels.sm90.epilogue_store import EpilogueStoreSm90
from cutefce.cute_kernels.sm90.mainloop import Consumer, MainloopSm90, Operand
from cutefce.cute_kernels.spec import gemm as spec


def compile_signature(kernel: spec.ProjectExpSpec) -> Signature:
    """Return the host function of `kernel` and the arguments to compile it for."""
    return ProjectExpSm90(kernel).signature_of(kernel)


class LogitTile(NamedTuple):
    """A tile of logits in a warpgroup's accumulators, and what its epilogue reads."""

    consumer: Consumer
    rows: Rows
    m_start: Int32
    """The first token, along wgmma's M."""
    n_start: Int32
    """The first column, along its N."""
    scheduler: TileScheduler


class ProjectExpSm90(ProjectExp, MainloopSm90):
    """The kernel and its launch."""

    def __init__(self, kernel: spec.ProjectExpSpec) -> None:
        k_major = Operand(k_major=True)
        operands = kernel.arch, kernel.dtype, kernel.config, k_major, k_major
        super().__init__(*operands, only_flagged=kernel.only_flagged, skip_missing_rows=True)
        self.logits, self.sums, self.store = kernel.logits, kernel.sums, kernel.store
        self.softcap, self.floor = kernel.transform.softcap, kernel.transform.floor
        self.reducer = RowReducer(kernel.reductions)
        # of accumulators (v, ·, j) of a row, relative to the thread's first one
        self.columns = tuple(8 * j + v for j in range(self.tile[1] // 8) for v in range(2))
        stored = Float32 if kernel.logits else self.dtype
        self.epilogue = EpilogueStoreSm90(stored, kernel.config.tile_n)

    @cute.jit
    def launch(self, operands: Any, stream: Any) -> None:
        """See `ProjectExp`."""
        x = operands
        a_loads, b_load = self.tma_loads(x.h, x.w)
        e_store = None, None, None
        if cutlass.const_expr(self.store):
            e_store = self.epilogue.tma_store(x.exps)
        given = self.tiled_mma(self.m_halves), a_loads, b_load, e_store, self.rows_of(x)
        self.kernel(*given, RowCount(x.count, x.selects), x.vocab_splits).launch(
            **self.launch_shape(x.clusters), stream=stream
        )

    @cute.kernel
    def kernel(
        self,
        tiled_mma: cute.TiledMma,
        a: Any,
        b: Any,
        e: Any,
        rows: Rows,
        row_count: RowCount,
        vocab_splits: Int32,
    ) -> None:
        """Assign warps to roles; a, b and e are (TMA atoms, coordinates, shared memory layout)."""
        config = self.config
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        (loads_a, g_a, a_layout), (load_b, g_b, b_layout), (store_e, g_e, e_layout) = a, b, e
        if warp == 0:
            for load in (*loads_a, load_b):
                cpasync.prefetch_descriptor(load)

        smem = SmemAllocator()
        barriers = smem.allocate_array(Int64, 2 * config.stages)
        s_a = smem.allocate_tensor(self.dtype, a_layout.outer, 1024, a_layout.inner)
        s_b = smem.allocate_tensor(self.dtype, b_layout.outer, 1024, b_layout.inner)
        s_e = None
        if cutlass.const_expr(self.store):
            s_e = smem.allocate_tensor(self.epilogue.dtype, e_layout.outer, 1024, e_layout.inner)
        pipe = self.make_pipeline(barriers)
        most = (g_b.shape[0] + config.tile_n - 1) // config.tile_n
        if cutlass.const_expr(self.sums):
            most = rows.sums.shape[1] // config.partials_per_row
        splits = vocab_splits, most
        scheduler = make_tile_scheduler(config, self.tile[2], g_a, g_b, row_count, *splits)
        cute.arch.griddepcontrol_launch_dependents()
        if warp < 4:
            cute.arch.setmaxregister_decrease(self.producer_registers)
            if warp == 0:
                # one row block reads h and w alone: whoever launches sums has a launch that waits,
                # such as target_logit, between them and what writes these
                if self.logits or not self.sums or scheduler.row_blocks > 1:
                    cute.arch.griddepcontrol_wait()
                a_operand, b_operand = (loads_a, g_a, s_a), (load_b, g_b, s_b)
                self.load(scheduler, pipe, a_operand, b_operand, rows.semaphores)
        else:
            cute.arch.setmaxregister_increase(self.consumer_registers)
            self.consume(scheduler, pipe, tiled_mma, (s_a, s_b), (store_e, g_e, s_e), rows)

    @cute.jit
    def consume(
        self,
        scheduler: TileScheduler,
        pipe: Any,
        tiled_mma: cute.TiledMma,
        inputs: Any,
        e: Any,
        rows: Rows,
    ) -> None:
        """Consumer: run the MMAs of tile after tile and reduce or store their exponentials.

        `e` is (TMA atom, coordinates, shared memory) of stores.
        """
        config, tile, vocab_splits = self.config, self.tile, scheduler.vocab_splits
        consumer, state = self.make_consumer(scheduler, tiled_mma, *inputs)
        acc, parity = consumer.acc, consumer.parity
        if cutlass.const_expr(self.only_flagged):
            cute.arch.griddepcontrol_wait()  # the previous kernel writes the flags
        row_max = cute.make_rmem_tensor((2, self.m_blocks), Float32)
        row_sum = cute.make_rmem_tensor((2, self.m_blocks), Float32)
        reduced = self.reducer.registers(2 * self.m_blocks)
        for index in cutlass.range(
            scheduler.cluster, scheduler.num_work_tiles(), scheduler.clusters
        ):
            row, split, n_end = scheduler.coord(
                index, config.raster_group, rows.semaphores if self.only_flagged else None
            )
            m_start = (row * config.cluster + scheduler.rank) * tile[0] + consumer.m_half * 64
            row_max.fill(-Float32.inf)
            row_sum.fill(0.0)
            self.reducer.reset(reduced)
            for column in cutlass.range(
                split + parity * vocab_splits, n_end, vocab_splits * config.partials_per_row
            ):
                k_tiles = scheduler.k_tiles
                state = self.mma(pipe, tiled_mma, consumer, state, k_tiles, k_tiles)
                cute.arch.griddepcontrol_wait()  # the MMAs need nothing of the previous kernel
                n_start = column * tile[1]
                logits = LogitTile(consumer, rows, m_start, n_start, scheduler)
                if cutlass.const_expr(rows.transform is not None):
                    self.transform(logits)
                if cutlass.const_expr(self.reducer.options.of_all):
                    self.mask(logits, targets_too=False)
                    self.add_all(logits, reduced)
                self.mask(logits)
                if cutlass.const_expr(self.sums):
                    columns = rows.first + n_start + consumer.tCcC[0][1], self.columns
                    for m_block in cutlass.range_constexpr(self.m_blocks):
                        for half in cutlass.range_constexpr(2):
                            more = self.reducer.row(reduced, 2 * m_block + half)
                            z = acc[(None, half, None), m_block, 0]
                            reference = Float32.inf  # of a row that does not exist
                            if cutlass.const_expr(self.reducer.options.of_others):
                                row = self.row(consumer.tCcC, m_start, m_block, half)
                                if row < scheduler.rows:
                                    reference = rows.reference[row]
                            self.reducer.add_others(more, z, columns, reference)
                            if cutlass.const_expr(not self.reducer.options.of_all):
                                row_max[half, m_block], row_sum[half, m_block] = accumulate(
                                    z, row_max[half, m_block], row_sum[half, m_block]
                                )
                if cutlass.const_expr(rows.samples is not None):
                    self.sample(logits)
                if cutlass.const_expr(self.store and self.logits):
                    starts = m_start, n_start
                    self.epilogue.store_tile(consumer, self.m_halves, starts, e[1].shape[1], e)
                elif cutlass.const_expr(self.store):
                    self.store_exps(logits, e)
            first_parity = parity
            if cutlass.const_expr(config.pingpong):
                tiles = (n_end - split + vocab_splits - 1) // vocab_splits
                parity = (parity + cutlass.max(tiles, 0)) % 2
            if cutlass.const_expr(self.sums):
                cute.arch.griddepcontrol_wait()  # a warpgroup may have no tile of a work tile
                # sums for more splits than there are now receive those of no column
                splits = rows.sums.shape[1] // config.partials_per_row
                for written in cutlass.range(split, splits, vocab_splits, unroll=1):
                    partial = written * config.partials_per_row
                    if cutlass.const_expr(config.pingpong):
                        if cutlass.const_expr(self.reducer.options.of_all):
                            partial += first_parity  # in the same place for all row blocks
                        else:
                            partial += consumer.warp_group_idx
                    sums = row_max, row_sum, reduced
                    self.write_partials(consumer, sums, rows, m_start, partial, scheduler)
                    row_max.fill(-Float32.inf)
                    row_sum.fill(0.0)
                    self.reducer.reset(reduced)
        if cutlass.const_expr(self.store):
            cute.arch.cp_async_bulk_wait_group(0, read=True)

    @cute.jit
    def transform(self, logits: LogitTile) -> None:
        """Turn raw logits into the model's."""
        consumer, rows, m_start, n_start, scheduler = logits
        acc, offset = consumer.acc, consumer.tCcC[0][1]
        biases = load_bias(rows.transform, n_start, self.tile[1])
        for m_block in cutlass.range_constexpr(self.m_blocks):
            scales = []
            for half in cutlass.range_constexpr(2):
                row = self.row(consumer.tCcC, m_start, m_block, half)
                scales.append(row_scale(rows.transform, row, scheduler.rows))
            for start in cutlass.range_constexpr(0, self.tile[1], 16):
                # branches keep the compiler from computing many columns at once and spilling
                if n_start + start < scheduler.columns:
                    for i in cutlass.range_constexpr(4):
                        j, v = start // 8 + i // 2, i % 2
                        bias = column_bias(biases, 8 * j + v, offset)
                        for half in cutlass.range_constexpr(2):
                            t = acc[(v, half, j), m_block, 0]
                            u = transform_logit(t, rows.transform, scales[half], bias)
                            acc[(v, half, j), m_block, 0] = u
        if cutlass.const_expr(self.floor):
            for m_block in cutlass.range_constexpr(self.m_blocks):
                for half in cutlass.range_constexpr(2):
                    row = self.row(consumer.tCcC, m_start, m_block, half)
                    floor = row_floor(rows.transform, row, scheduler.rows)
                    target = self.target_column(logits, row) - offset
                    for j in cutlass.range_constexpr(self.tile[1] // 8):
                        for v in cutlass.range_constexpr(2):
                            u = acc[(v, half, j), m_block, 0]
                            acc[(v, half, j), m_block, 0] = floored(u, floor, target == 8 * j + v)

    @cute.jit
    def mask(self, logits: LogitTile, targets_too: bool = True) -> None:
        """Set the logits of columns beyond the vocabulary to -inf.

        If `targets_too`, also those of targets, and of rows that are stored but do not count.
        """
        consumer, rows, m_start, n_start, scheduler = logits
        acc, offset = consumer.acc, consumer.tCcC[0][1]
        limit = scheduler.columns - n_start - offset
        targets = cute.make_rmem_tensor((2, self.m_blocks), Int32)
        needs_mask = n_start + self.tile[1] > scheduler.columns
        for m_block in cutlass.range_constexpr(self.m_blocks):
            for half in cutlass.range_constexpr(2):
                row = self.row(consumer.tCcC, m_start, m_block, half)
                column = Int32(-1)
                if cutlass.const_expr(targets_too and rows.target is not None):
                    column = self.target_column(logits, row)
                targets[half, m_block] = column - offset
                needs_mask = needs_mask or (column >= 0 and column < self.tile[1])
        if needs_mask:
            for m_block in cutlass.range_constexpr(self.m_blocks):
                for half in cutlass.range_constexpr(2):
                    for j in cutlass.range_constexpr(self.tile[1] // 8):
                        for v in cutlass.range_constexpr(2):
                            column, coord = 8 * j + v, ((v, half, j), m_block, 0)
                            masked = (targets[half, m_block] == column) | (limit <= column)
                            logit = cutlass.select_(masked, -Float32.inf, acc[coord])
                            acc[coord] = Float32(logit)
        if cutlass.const_expr(targets_too and self.store):
            last = m_start + (self.m_blocks - 1) * 64 * self.m_halves + 63
            if scheduler.selects != 0 and last >= scheduler.rows:
                for m_block in cutlass.range_constexpr(self.m_blocks):
                    for half in cutlass.range_constexpr(2):
                        if self.row(consumer.tCcC, m_start, m_block, half) >= scheduler.rows:
                            for j in cutlass.range_constexpr(self.tile[1] // 8):
                                for v in cutlass.range_constexpr(2):
                                    acc[(v, half, j), m_block, 0] = -Float32.inf

    @cute.jit
    def target_column(self, logits: LogitTile, row: Int32) -> Int32:
        """Return the column of the tile that is the row's target; outside of it if none is."""
        rows, column = logits.rows, Int32(-1)
        if row < logits.scheduler.rows:
            column = Int32(rows.target[row] - rows.first) - logits.n_start
        return column

    @cute.jit
    def add_all(self, logits: LogitTile, reduced: Any) -> None:
        """Add the tile's logits, the targets' too, to the sums of all columns in `reduced`."""
        consumer = logits.consumer
        for m_block in cutlass.range_constexpr(self.m_blocks):
            for half in cutlass.range_constexpr(2):
                row = self.row(consumer.tCcC, logits.m_start, m_block, half)
                target = self.target_column(logits, row) - consumer.tCcC[0][1]
                more = self.reducer.row(reduced, 2 * m_block + half)
                u = consumer.acc[(None, half, None), m_block, 0]
                self.reducer.add(more, u, (target, self.columns))

    @cute.jit
    def sample(self, logits: LogitTile) -> None:
        """Sample the tile's entries."""
        consumer, rows, m_start, n_start, scheduler = logits
        column = rows.first + n_start + consumer.tCcC[0][1]
        before: Any = None
        for m_block in cutlass.range_constexpr(self.m_blocks):
            for half in cutlass.range_constexpr(2):
                row = self.row(consumer.tCcC, m_start, m_block, half)
                u, scale = consumer.acc[(None, half, None), m_block, 0], None
                if cutlass.const_expr(self.softcap):
                    scale = row_scale(rows.transform, row, scheduler.rows)
                launch_row = row, row < scheduler.rows
                found = place_entries(u, rows.samples, launch_row, column, self.columns, scale)
                if cutlass.const_expr(before is not None):
                    append_entries(before[0], rows.samples, before[1], self.columns)
                before = u, found
        append_entries(before[0], rows.samples, before[1], self.columns)

    @cute.jit
    def write_partials(
        self,
        consumer: Consumer,
        sums: Any,
        rows: Rows,
        m_start: Int32,
        partial: Int32,
        scheduler: TileScheduler,
    ) -> None:
        """Combine the four threads of each row and write its reductions, relative to ρ if there is.

        `sums` are the accumulators (row_max, row_sum, those of other reductions).
        """
        row_max, row_sum, reduced = sums
        for m_block in cutlass.range_constexpr(self.m_blocks):
            for half in cutlass.range_constexpr(2):
                row = self.row(consumer.tCcC, m_start, m_block, half)
                more = self.reducer.row(reduced, 2 * m_block + half)
                self.reducer.combine_lanes(more)
                writes = consumer.thread % 4 == 0 and row < scheduler.rows
                if cutlass.const_expr(self.reducer.options.of_all):
                    if writes:
                        rows.sums[row, partial] = self.reducer.log_sum(more, rows.reference[row])
                else:
                    thread_max = row_max[half, m_block]
                    quad_max = thread_max
                    for offset in cutlass.range_constexpr(1, 3):
                        other = cute.arch.shuffle_sync_bfly(quad_max, offset=offset)
                        quad_max = cute.arch.fmax(quad_max, other)
                    exponent = thread_max - finite(quad_max)
                    quad_sum = row_sum[half, m_block] * exp2(exponent)
                    for offset in cutlass.range_constexpr(1, 3):
                        quad_sum += cute.arch.shuffle_sync_bfly(quad_sum, offset=offset)
                    if cutlass.const_expr(self.logits):
                        if writes:
                            rows.sums[row, partial] = quad_max
                            rows.reductions[0, row, partial] = quad_sum
                    elif writes:
                        distance = quad_max - rows.reference[row] * LOG2_E
                        log_sum = cute.math.log2(bounded_sum(quad_sum), fastmath=True)
                        rows.sums[row, partial] = distance + log_sum
                if writes:
                    self.reducer.write(more, rows.reductions, row, partial)

    @cute.jit
    def store_exps(self, logits: LogitTile, e: Any) -> None:
        """Store the tile's exponentials, epilogue tile by epilogue tile."""
        consumer, rows, m_start, n_start, scheduler = logits
        epi_tile_n = self.epilogue.epi_tile_n
        base = cute.make_rmem_tensor((2,), Float32)
        inverse_scale = cute.make_rmem_tensor((2,), Float32)
        for m_block in cutlass.range_constexpr(self.m_blocks):
            for half in cutlass.range_constexpr(2):
                row = self.row(consumer.tCcC, m_start, m_block, half)
                base[half] = Float32.inf
                if row < scheduler.rows:
                    base[half] = rows.reference[row] * LOG2_E
                if cutlass.const_expr(self.softcap):
                    scale = row_scale(rows.transform, row, scheduler.rows)
                    inverse_scale[half] = cute.arch.rcp_approx(scale)
            if cutlass.const_expr(self.softcap):  # in place: see `transform`
                for j in cutlass.range_constexpr(self.tile[1] // 8):
                    if n_start + 8 * j < e[1].shape[1]:
                        for half in cutlass.range_constexpr(2):
                            for v in cutlass.range_constexpr(2):
                                z = consumer.acc[(v, half, j), m_block, 0]
                                exp = exp2(z * LOG2_E - base[half])
                                exp *= softcap_derivative(z, inverse_scale[half])
                                consumer.acc[(v, half, j), m_block, 0] = exp
            for epi_tile in cutlass.range_constexpr(self.tile[1] // epi_tile_n):
                if n_start + epi_tile * epi_tile_n < e[1].shape[1]:
                    values = cute.make_rmem_tensor((2, 2, epi_tile_n // 8), Float32)
                    for j in cutlass.range_constexpr(epi_tile_n // 8):
                        for half in cutlass.range_constexpr(2):
                            for v in cutlass.range_constexpr(2):
                                acc_j = epi_tile * (epi_tile_n // 8) + j
                                z = consumer.acc[(v, half, acc_j), m_block, 0]
                                if cutlass.const_expr(self.softcap):
                                    values[v, half, j] = z
                                else:
                                    values[v, half, j] = exp2(z * LOG2_E - base[half])
                    row_start = m_start + m_block * 64 * self.m_halves
                    coord = row_start, n_start // epi_tile_n + epi_tile
                    thread, warp_group_idx = consumer.thread, consumer.warp_group_idx
                    self.epilogue.store(values, thread, warp_group_idx, e, coord)
