"""The gradient GEMMs for Hopper, of exponentials e (N, V) in memory.

    hidden          sums (N, D) = or += e w         float32
    hidden, packed  the same                        24 or 20 bits, see `sm90.packed_store`
    weight, final   out (V, D) = (eᵀ s + Σ_{i: y_i = v} c_i h_i) · grad_scale, rounded once
    weight, packed  sums (V, D) = or += that        float32, 24 or 20 bits

with s_i = scale_i h_i.  dW's terms of targets are added to the float32 accumulators, in a fixed
order: see `sm90.target_terms`; before them, if the spec has it, a matrix of rank one.

e may be some columns of a wider matrix.  N, V and D are dynamic; D is a multiple of 8 and rows
start at multiples of 16 bytes.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from cutefce.cute_kernels.common.dsl import (
    DTYPES,
    await_count,
    matrix,
    pdl_wait,
    transposed,
    vector,
)
from cutefce.cute_kernels.common.launch import HostFunction, Signature
from cutefce.cute_kernels.common.rank_one import RankOne, rank_one_signature
from cutefce.cute_kernels.problem import FLOAT32_LOW_BITS, LOW_BITS
from cutefce.cute_kernels.schedule.scheduler import (
    RowCount,
    TileScheduler,
    WorkTile,
    make_gemm_scheduler,
)
from cutefce.cute_kernels.sm90.epilogue_store import EpilogueStoreSm90
from cutefce.cute_kernels.sm90.mainloop import (
    MMA_WARP_GROUPS,
    WARP_GROUP_THREADS,
    Consumer,
    MainloopSm90,
    Operand,
)
from cutefce.cute_kernels.sm90.packed_store import PackedStoreSm90, packed_signature
from cutefce.cute_kernels.sm90.target_terms import TargetCsr, add_targets, target_ranges
from cutefce.cute_kernels.spec import gemm as spec
from cutefce.cute_kernels.workspace import SPLIT_K_COUNTERS


def compile_signature(kernel: spec.GradGemmSpec) -> Signature:
    """Return the host function of `kernel` and the arguments to compile it for."""
    dtype = DTYPES[kernel.dtype]
    rows, inner, hidden = cute.sym_int(), cute.sym_int(), cute.sym_int(divisibility=8)
    a = transposed(dtype, rows, inner) if kernel.wrt == "weight" else matrix(dtype, rows, inner)
    targets: TargetCsr | None = None
    out = matrix(dtype if kernel.final else Float32, rows, hidden)
    if kernel.low_bits is not None:
        out = packed_signature(rows, hidden, kernel.low_bits)
    if kernel.has_targets:
        entries = cute.sym_int()
        csr = vector(Int64, entries), vector(Int32, cute.sym_int()), vector(Float32, entries)
        factor = vector(Float32, 1) if kernel.final else None
        targets = TargetCsr(*csr, matrix(dtype, cute.sym_int(), hidden), factor)
    return GradGemmSm90(kernel).signature(
        a=a,
        b=transposed(dtype, hidden, inner),
        out=out,
        targets=targets,
        rank_one=rank_one_signature(rows, hidden, kernel.rank_one),
        semaphores=vector(Int32, cute.sym_int()),
        count=vector(Int32, cute.sym_int()),
        selects=Int32(0),
        clusters=Int32(1),
        k_splits=None if kernel.final or kernel.packed else Int32(1),
        overwrite=None if kernel.final else Int32(1),
    )


class GradGemmSm90(HostFunction, MainloopSm90):
    """The kernel and its launch."""

    def __init__(self, kernel: spec.GradGemmSpec) -> None:
        a, b = Operand(k_major=kernel.wrt == "hidden"), Operand(k_major=False)
        operands = kernel.arch, kernel.dtype, kernel.config, a, b
        super().__init__(*operands, only_flagged=False, skip_missing_rows=False)
        assert kernel.final or kernel.packed or not kernel.has_targets
        assert kernel.has_targets or not kernel.rank_one
        assert kernel.WARPS * 32 == MMA_WARP_GROUPS * WARP_GROUP_THREADS
        self.final, self.tokens_inside = kernel.final, kernel.wrt == "weight"
        out_dtype = self.dtype if self.final else Float32
        self.epilogue = EpilogueStoreSm90(out_dtype, kernel.config.tile_n)
        self.packed = kernel.packed
        if kernel.low_bits is not None:
            is_float32 = kernel.low_bits == FLOAT32_LOW_BITS
            assert not kernel.final and (is_float32 or kernel.dtype == "bfloat16")
            assert self.tokens_inside or kernel.low_bits in LOW_BITS
            self.packed_store = PackedStoreSm90(kernel.config, kernel.low_bits)

    @cute.jit
    def launch(self, operands: Any, stream: Any) -> None:
        """Launch on `clusters` clusters: a (M, K) and b (D, K) to out (M, D).

        Sums are added to `out` unless `overwrite`; float32 sums of dX split the K of the last
        wave's work tiles by `k_splits`.  `count` and `selects` are those of `RowCount`; operands
        are 0 from the tokens that count to the next multiple of `TILE_K`.
        """
        x, add = operands, None
        a_loads, b_load = self.tma_loads(x.a, x.b)
        if cutlass.const_expr(self.packed):
            out_store = self.packed_store.tma(x.out)
        else:
            out_store, add = self.epilogue.tma_store(x.out), self.epilogue.tma_add(x.out)
        sums = add, x.k_splits, x.overwrite, RowCount(x.count, x.selects)
        given = self.tiled_mma(self.m_halves), a_loads, b_load, out_store, (x.targets, x.rank_one)
        # a K split waits for the one before, whose cluster may come later: all run at the same time
        self.kernel(*given, x.semaphores, sums).launch(
            **self.launch_shape(x.clusters), cooperative=x.k_splits is not None, stream=stream
        )

    @cute.kernel
    def kernel(
        self,
        tiled_mma: cute.TiledMma,
        a: Any,
        b: Any,
        out: Any,
        terms: Any,
        semaphores: cute.Tensor,
        sums: Any,
    ) -> None:
        """Assign warps to roles; a, b and out are (TMA atoms, coordinates, smem layout).

        Of packed sums, out is what `PackedStoreSm90.tma` returns.
        """
        add, k_splits, overwrite, row_count = sums
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        (loads_a, g_a, a_layout), (load_b, g_b, b_layout) = a, b
        if warp == 0:
            for load in (*loads_a, load_b):
                cpasync.prefetch_descriptor(load)
        smem = SmemAllocator()
        barriers = smem.allocate_array(Int64, 2 * self.config.stages)
        s_a = smem.allocate_tensor(self.dtype, a_layout.outer, 1024, a_layout.inner)
        s_b = smem.allocate_tensor(self.dtype, b_layout.outer, 1024, b_layout.inner)
        outputs = None
        if cutlass.const_expr(self.packed):
            outputs = self.packed_store.staging(smem, out, overwrite == 0), None, overwrite
        else:
            store, g_out, layout = out
            s_out = smem.allocate_tensor(self.epilogue.dtype, layout.outer, 1024, layout.inner)
            outputs = (store, g_out, s_out), add, overwrite
        pipe = self.make_pipeline(barriers)
        pdl_wait()
        tokens = row_count, self.tokens_inside
        shape = self.config, self.tile[2], g_a, g_b
        must_write = overwrite
        if cutlass.const_expr(self.packed and self.tokens_inside):
            # a chunk of which no row counts is written, too, if it adds the terms of all tokens
            must_write = None if terms[1] is not None else overwrite + terms[0].order.shape[0]
        scheduler = make_gemm_scheduler(*shape, *tokens, k_splits, must_write)
        if warp < 4:
            cute.arch.setmaxregister_decrease(self.producer_registers)
            if warp == 0:
                a_operand, b_operand = (loads_a, g_a, s_a), (load_b, g_b, s_b)
                self.load(scheduler, pipe, a_operand, b_operand, semaphores)
            if cutlass.const_expr(self.packed):
                if warp == 1:
                    self.packed_store.load(scheduler, outputs[0])
        else:
            cute.arch.setmaxregister_increase(self.consumer_registers)
            self.consume(scheduler, pipe, tiled_mma, (s_a, s_b), outputs, terms, semaphores)

    @cute.jit
    def consume(
        self,
        scheduler: TileScheduler,
        pipe: Any,
        tiled_mma: cute.TiledMma,
        inputs: Any,
        outputs: Any,
        terms: Any,
        semaphores: cute.Tensor,
    ) -> None:
        """Consumer: run the MMAs of tile after tile, and store or add the results."""
        (out, add, overwrite), (targets, rank_one) = outputs, terms
        config, tile = self.config, self.tile
        consumer, state = self.make_consumer(scheduler, tiled_mma, *inputs)
        for index in cutlass.range(
            scheduler.cluster + consumer.parity * scheduler.clusters,
            scheduler.num_indices(),
            scheduler.clusters * config.partials_per_row,
        ):
            work_tile = scheduler.work_tile(index)
            other = scheduler.work_tile(index + scheduler.clusters)
            row, column, _ = scheduler.coord(work_tile.number, config.raster_group)
            m_start = (row * config.cluster + scheduler.rank) * tile[0] + consumer.m_half * 64
            n_start = column * tile[1]
            k_tiles = work_tile.k_end - work_tile.k_start
            other_k_tiles = other.k_end - other.k_start
            ranges, last_k = None, None
            if cutlass.const_expr(self.tokens_inside):
                ranges = target_ranges(self, consumer, targets, m_start, scheduler)
            # the GEMM that finishes dW skips MMAs behind the last token; sums add zeros
            if cutlass.const_expr(self.tokens_inside and self.final):
                last_k = Int32(tile[2])
                if work_tile.k_end == scheduler.k_tiles:
                    last_k = scheduler.last_k
            state = self.mma(pipe, tiled_mma, consumer, state, k_tiles, other_k_tiles, last_k)
            if cutlass.const_expr(rank_one is not None):
                self.add_rank_one(consumer, rank_one, m_start, n_start, scheduler)
            if cutlass.const_expr(self.tokens_inside):
                add_targets(self, consumer, targets, ranges, n_start, scheduler)
            starts, columns = (m_start, n_start), scheduler.columns
            if cutlass.const_expr(self.final):
                self.epilogue.store_tile(consumer, self.m_halves, starts, columns, out)
            elif cutlass.const_expr(self.packed):
                tile_number = index // (scheduler.clusters * config.partials_per_row)
                self.packed_store.add(consumer, out, *starts, tile_number)
            else:
                counter = semaphores.iterator + self.counter_index(work_tile, scheduler, consumer)
                if work_tile.splits_before > 0:
                    await_splits(counter, work_tile.splits_before)
                must_add = overwrite == 0 or work_tile.splits_before > 0
                how = out, (add, must_add)
                self.epilogue.store_tile(consumer, self.m_halves, starts, columns, *how)
                if work_tile.splits_after > 0:
                    signal_split(counter)
        cute.arch.cp_async_bulk_wait_group(0, read=True)

    @cute.jit
    def add_rank_one(
        self,
        consumer: Consumer,
        rank_one: RankOne,
        m_start: Int32,
        n_start: Int32,
        scheduler: TileScheduler,
    ) -> None:
        """Add factor_i row to each row i of the tile."""
        acc = consumer.acc
        first = n_start + consumer.tCcC[0][1]
        limit = scheduler.columns - first
        factors = cute.make_rmem_tensor((2, self.m_blocks), Float32)
        for m_block in cutlass.range_constexpr(self.m_blocks):
            for half in cutlass.range_constexpr(2):
                row = self.row(consumer.tCcC, m_start, m_block, half)
                factors[half, m_block] = Float32(0.0)
                if row < scheduler.rows:
                    factors[half, m_block] = rank_one.factor[row]
        pairs = cute.zipped_divide(rank_one.row, (2,))
        for j in cutlass.range_constexpr(self.tile[1] // 8):
            if 8 * j < limit:
                pair = cute.make_rmem_tensor((2,), Float32)
                cute.autovec_copy(pairs[None, first // 2 + 4 * j], pair)
                for m_block in cutlass.range_constexpr(self.m_blocks):
                    for half in cutlass.range_constexpr(2):
                        for v in cutlass.range_constexpr(2):
                            coord = (v, half, j), m_block, 0
                            acc[coord] = acc[coord] + factors[half, m_block] * pair[v]

    @cute.jit
    def counter_index(
        self, work_tile: WorkTile, scheduler: TileScheduler, consumer: Consumer
    ) -> Int32:
        """Return the index of the warp's counter of added K splits of a work tile."""
        warp = cute.arch.make_warp_uniform(
            (consumer.m_half * WARP_GROUP_THREADS + consumer.thread) // 32
        )
        cluster = work_tile.number % scheduler.clusters
        block = cluster * self.config.cluster + scheduler.rank
        return SPLIT_K_COUNTERS + block * spec.GradGemmSpec.WARPS + warp


@cute.jit
def await_splits(counter: Any, splits: Int32) -> None:
    """Wait until `splits` K splits of a work tile were added, so that sums are deterministic."""
    await_count(counter, splits)
    cute.arch.fence_proxy("async.global")


@cute.jit
def signal_split(counter: Any) -> None:
    """Count a warp's part of a K split as added."""
    cute.arch.cp_async_bulk_wait_group(0)
    cute.arch.sync_warp()
    if cute.arch.lane_idx() == 0:
        cute.arch.red(counter, Int32(1), op="add", dtype="s32", sem="release", scope="gpu")
