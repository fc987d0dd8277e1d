"""`project_exp` for Hopper: logits z = h wᵀ that live and die in registers.

    sums (N, P)   log2 Σ exp(z_iv - ρ_i) over the columns of one part, without the target's
    exps (N, K)   exp(z_iv - ρ_i), 0 at the target, in the inputs' dtype; the first K columns

One producer warp loads tiles of h and w by TMA; the thread blocks of a cluster hold different rows
and share each tile of w by multicast.  Two consumer warpgroups multiply: in turns, each a tile of
its own, so that the exponentials of one run under the products of the other; or together, each one
half of every tile's rows.  A cluster walks units (`tile_order`), and a row's maximum and sum stay
in registers for a whole unit.

Sums are relative to the running maximum until they leave (online softmax, the paper's Algorithm
1), so that they are exact for any logits; exps are relative to the given ρ and may overflow.

Shapes: h (N, D), w (V, D), reference ρ (N,) float32, target (N,) int64 counted from `first`,
notes (2 + row blocks,) int32: see `dsl`.  N, V and D are dynamic; rows of h, w and exps begin at
multiples of 16 bytes.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, pipeline
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.cute.nvgpu.warp import StMatrix8x8x16bOp
from cutlass.cute.runtime import make_fake_stream
from cutlass.memory import SmemAllocator
from cutlass.tensor_utils import LayoutEnum
from cutlass.utils import hopper_helpers as sm90

from cutefce.cute_kernels import kernels, tile_order
from cutefce.cute_kernels.arch import STEP, arch_named
from cutefce.cute_kernels.dsl import (
    BLOCK_NOTES,
    DTYPES,
    FINISHED_NOTE,
    LOG2_E,
    MEETING_NOTE,
    exp2,
    matrix,
    vector,
)

GROUP = 128
"""Threads of a warpgroup."""
CONSUMERS = 2
"""Warpgroups that multiply."""
CHECKPOINT = 8
"""Stages between two meetings of all clusters."""
PATIENCE = 5000
"""Looks at who has arrived, of a microsecond or less each, after which meetings are given up."""


def trace(kernel: kernels.ProjectExp) -> tuple[Any, tuple[Any, ...]]:
    """Return the host function of `kernel` and arguments to compile it for."""
    dtype = DTYPES[kernel.dtype]
    tokens, vocab, hidden = cute.sym_int(), cute.sym_int(), cute.sym_int(divisibility=8)
    columns, parts = cute.sym_int(divisibility=8), cute.sym_int()
    return ProjectExpSm90(kernel), (
        matrix(dtype, tokens, hidden),
        matrix(dtype, vocab, hidden),
        vector(Float32, tokens),
        vector(Int64, tokens),
        matrix(Float32, tokens, parts, aligned=False) if kernel.sums else None,
        matrix(dtype, tokens, columns) if kernel.store else None,
        vector(Int32, cute.sym_int()),
        Int32(0),
        Int32(1),
        Int32(1),
        make_fake_stream(use_tvm_ffi_env_stream=True),
    )


class Walk(NamedTuple):
    """What every role must agree on, so that they meet at the same tiles."""

    row_blocks: Int32
    windows: Int32
    tiles: Int32
    """Vocabulary tiles."""
    steps: Int32
    """Stages of one tile."""
    cluster: Int32
    clusters: Int32
    rank: Int32
    """Thread block within the cluster."""


class ProjectExpSm90:
    """The kernel and its launch, for one description."""

    def __init__(self, kernel: kernels.ProjectExp) -> None:
        arch, config = arch_named(kernel.arch), kernel.config
        arch.check(config)
        self.config = config
        self.dtype = DTYPES[kernel.dtype]
        self.sums, self.store, self.masked = kernel.sums, kernel.store, kernel.masked
        self.tile = (config.tile_m, config.tile_n, STEP)
        self.producer_registers, self.consumer_registers = arch.registers(config)
        self.slab = arch.slab(config)
        # warpgroups that share a tile, and 64-row blocks of it that each of them holds
        self.sharing = 1 if config.pingpong else CONSUMERS
        self.blocks = config.tile_m // (64 * self.sharing)

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
        """Launch on `clusters` clusters, which must fit on the device at the same time."""
        config, tile, row_major = self.config, self.tile, LayoutEnum.ROW_MAJOR
        h_layout = sm90.make_smem_layout_a(row_major, tile, self.dtype, config.stages)
        w_layout = sm90.make_smem_layout_b(row_major, tile, self.dtype, config.stages)
        load = cpasync.CopyBulkTensorTileG2SOp()
        share = cpasync.CopyBulkTensorTileG2SMulticastOp() if config.cluster > 1 else load
        load_h, g_h = cpasync.make_tiled_tma_atom(
            load, h, cute.slice_(h_layout, (None, None, 0)), (tile[0], tile[2])
        )
        load_w, g_w = cpasync.make_tiled_tma_atom(
            share,
            w,
            cute.slice_(w_layout, (None, None, 0)),
            (tile[1], tile[2]),
            num_multicast=config.cluster,
        )
        store_e, g_e, e_layout = None, None, None
        if cutlass.const_expr(self.store):
            # a warp stores slabs of its own 16 rows; the four of a warpgroup lie together
            e_layout = sm90.make_smem_layout_epi(self.dtype, row_major, (64, self.slab), CONSUMERS)
            slab_layout = sm90.make_smem_layout_epi(self.dtype, row_major, (16, self.slab), 1)
            store_e, g_e = cpasync.make_tiled_tma_atom(
                cpasync.CopyBulkTensorTileS2GOp(),
                exps,
                cute.slice_(slab_layout, (None, None, 0)),
                (16, self.slab),
            )
        self.kernel(
            self.tiled_mma(self.sharing),
            (load_h, g_h, h_layout),
            (load_w, g_w, w_layout),
            (store_e, g_e, e_layout),
            reference,
            target,
            sums,
            notes,
            first,
            windows,
        ).launch(
            grid=[clusters * config.cluster, 1, 1],
            block=[GROUP * (1 + CONSUMERS), 1, 1],
            cluster=[config.cluster, 1, 1],
            min_blocks_per_mp=1,
            stream=stream,
        )

    def tiled_mma(self, sharing: int) -> cute.TiledMma:
        """Return wgmma over 64 rows and a tile's columns for each of `sharing` warpgroups."""
        return sm90.make_trivial_tiled_mma(
            self.dtype,
            self.dtype,
            OperandMajorMode.K,
            OperandMajorMode.K,
            Float32,
            (sharing, 1, 1),
            (64, self.tile[1]),
        )

    @cute.kernel
    def kernel(
        self,
        tiled_mma: cute.TiledMma,
        h: Any,
        w: Any,
        e: Any,
        reference: cute.Tensor,
        target: cute.Tensor,
        sums: cute.Tensor | None,
        notes: cute.Tensor,
        first: Int32,
        windows: Int32,
    ) -> None:
        """Hand out the roles; h, w and e are (TMA atom, coordinates, shared memory layout)."""
        config, tile = self.config, self.tile
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        (load_h, g_h, h_layout), (load_w, g_w, w_layout), (store_e, g_e, e_layout) = h, w, e
        if warp == 0:
            cpasync.prefetch_descriptor(load_h)
            cpasync.prefetch_descriptor(load_w)

        smem = SmemAllocator()
        barriers = smem.allocate_array(Int64, 2 * config.stages)
        s_h = smem.allocate_tensor(self.dtype, h_layout.outer, 1024, h_layout.inner)
        s_w = smem.allocate_tensor(self.dtype, w_layout.outer, 1024, w_layout.inner)
        s_e = None
        if cutlass.const_expr(self.store):
            s_e = smem.allocate_tensor(self.dtype, e_layout.outer, 1024, e_layout.inner)
        pipe = pipeline.PipelineTmaAsync.create(
            barrier_storage=barriers,
            num_stages=config.stages,
            producer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread),
            # one arrival of each warp that reads a stage, at every block that fills it
            consumer_group=pipeline.CooperativeGroup(
                pipeline.Agent.Thread, config.cluster * 4 * self.sharing
            ),
            tx_count=(tile[0] + tile[1]) * tile[2] * self.dtype.width // 8,
            cta_layout_vmnk=cute.make_layout((1, config.cluster, 1, 1)),
            defer_sync=True,
        )
        cluster_shape = cute.make_layout((config.cluster, 1))
        pipeline.pipeline_init_arrive(cluster_shape_mn=cluster_shape, is_relaxed=True)
        pipeline.pipeline_init_wait(cluster_shape_mn=cluster_shape)

        (tokens, hidden), vocab = g_h.shape, g_w.shape[0]
        walk = Walk(
            row_blocks=(tokens + config.rows - 1) // config.rows,
            windows=windows,
            tiles=(vocab + tile[1] - 1) // tile[1],
            steps=(hidden + tile[2] - 1) // tile[2],
            cluster=cute.arch.block_idx()[0] // config.cluster,
            clusters=cute.arch.grid_dim()[0] // config.cluster,
            rank=cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster()),
        )
        if warp < 4:
            cute.arch.setmaxregister_decrease(self.producer_registers)
            if warp == 0:
                self.load(walk, pipe, (load_h, g_h, s_h), (load_w, g_w, s_w), notes)
        else:
            cute.arch.setmaxregister_increase(self.consumer_registers)
            self.consume(
                walk, pipe, tiled_mma, s_h, s_w, (store_e, g_e, s_e),
                reference, target, sums, notes, tokens, vocab, first,
            )  # fmt: skip

    @cute.jit
    def unit(self, walk: Walk, notes: Any, index: Int32) -> Any:
        """Return row block, window and end of the tiles of a unit; 0, none, if it is masked."""
        row, window = tile_order.unit(
            index, walk.row_blocks, walk.windows, self.config.group, cutlass.min
        )
        end = walk.tiles
        if cutlass.const_expr(self.masked):
            if notes[BLOCK_NOTES + row] == 0:
                end = Int32(0)
        return row, window, end

    @cute.jit
    def load(self, walk: Walk, pipe: Any, h: Any, w: Any, notes: cute.Tensor) -> None:
        """Producer: fill the stages, tile after tile; h and w are (TMA atom, coordinates, smem)."""
        config, tile = self.config, self.tile
        load_h, from_h, to_h = self.partition(h, (tile[0], tile[2]), Int32(0), 1)
        load_w, from_w, to_w = self.partition(w, (tile[1], tile[2]), walk.rank, config.cluster)
        everyone = {"mcast_mask": cutlass.Int16((1 << config.cluster) - 1)}
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, config.stages)
        units, passed, patience = walk.row_blocks * walk.windows, Int32(0), Int32(PATIENCE)
        for index in cutlass.range(walk.cluster, units, walk.clusters):
            row, window, end = self.unit(walk, notes, index)
            row = row * config.cluster + walk.rank
            # up to where all clusters have tiles, and the same number; one row block shares none
            together = window + walk.tiles // walk.windows * walk.windows
            everyone_works = index - walk.cluster + walk.clusters <= units
            if not everyone_works or walk.rank != 0 or walk.row_blocks == 1:
                together = Int32(0)
            for column in cutlass.range(window, end, walk.windows):
                for step in cutlass.range(walk.steps, unroll=1):
                    if cutlass.const_expr(not self.masked):
                        if step % CHECKPOINT == 0 and column < together:
                            # all have been at the one before: nobody waits who is on time
                            patience = self.meet(notes, passed * walk.clusters, patience)
                            passed += 1
                    pipe.producer_acquire(state)
                    full = pipe.producer_get_barrier(state)
                    cute.copy(
                        load_h, from_h[None, row, step], to_h[None, state.index], tma_bar_ptr=full
                    )
                    cute.copy(
                        load_w,
                        from_w[None, column, step],
                        to_w[None, state.index],
                        tma_bar_ptr=full,
                        **(everyone if config.cluster > 1 else {}),
                    )
                    pipe.producer_commit(state)
                    state.advance()
        pipe.producer_tail(state)

    @cute.jit
    def meet(self, notes: cute.Tensor, target: Int32, patience: Int32) -> Int32:
        """Arrive at a checkpoint, and wait until `target` arrivals, or until patience ends.

        Clusters that read the same tiles must do so at about the same time, or the tiles have left
        the L2 cache and are read from memory again.  It is for speed alone: return the patience
        left, which is none after a wait that found no end, as when another kernel holds
        multiprocessors.
        """
        counter = notes.iterator + MEETING_NOTE
        if cute.arch.lane_idx() == 0:
            cute.arch.red(counter, Int32(1), op="add", dtype="s32", sem="relaxed", scope="gpu")
        cute.arch.sync_warp()
        seen = cute.arch.load(counter, Int32, sem="relaxed", scope="gpu")
        tries = Int32(0)
        while seen < target and tries < patience:
            seen = cute.arch.load(counter, Int32, sem="relaxed", scope="gpu")
            tries += 1
        left = patience
        if seen < target:
            left = Int32(0)
        return left

    @cute.jit
    def partition(self, operand: Any, shape: Any, rank: Int32, shared_by: int) -> Any:
        """Return (TMA atom, its sources by tile and step, its destinations by stage)."""
        atom, coordinates, smem = operand
        tiles = cute.local_tile(coordinates, shape, (None, None))
        destination, source = cpasync.tma_partition(
            atom,
            rank,
            cute.make_layout(shared_by),
            cute.group_modes(smem, 0, 2),
            cute.group_modes(tiles, 0, 2),
        )
        return atom, source, destination

    @cute.jit
    def consume(
        self,
        walk: Walk,
        pipe: Any,
        tiled_mma: cute.TiledMma,
        s_h: cute.Tensor,
        s_w: cute.Tensor,
        e: Any,
        reference: cute.Tensor,
        target: cute.Tensor,
        sums: Any,
        notes: Any,
        tokens: Int32,
        vocab: Int32,
        first: Int32,
    ) -> None:
        """Consumer: multiply tile after tile and turn the logits into sums and exponentials."""
        config, tile = self.config, self.tile
        thread = cute.arch.thread_idx()[0] % GROUP
        group = cute.arch.make_warp_uniform(cute.arch.thread_idx()[0] // GROUP) - 1
        # in turns, a warpgroup holds all rows of every second tile
        share = Int32(0) if cutlass.const_expr(config.pingpong) else group
        turn = group if cutlass.const_expr(config.pingpong) else Int32(0)
        slice_mma = tiled_mma.get_slice(share * GROUP)
        a = tiled_mma.make_fragment_A(slice_mma.partition_A(s_h))
        b = tiled_mma.make_fragment_B(slice_mma.partition_B(s_w))
        acc = cute.make_rmem_tensor(tiled_mma.partition_shape_C(tile[:2]), Float32)
        # row and column of the accumulators within 64 rows of a tile; see `hide` for the columns
        own = (
            self.tiled_mma(1)
            .get_slice(thread)
            .partition_C(cute.make_identity_tensor((64, tile[1])))
        )
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, config.stages)
        if cutlass.const_expr(config.pingpong):
            if group == 1:
                state.advance(walk.steps)
                self.pass_turn(group)
        highest = cute.make_rmem_tensor((2, self.blocks), Float32)
        total = cute.make_rmem_tensor((2, self.blocks), Float32)
        for index in cutlass.range(walk.cluster, walk.row_blocks * walk.windows, walk.clusters):
            row, window, end = self.unit(walk, notes, index)
            top = (row * config.cluster + walk.rank) * tile[0] + share * 64
            highest.fill(-Float32.inf)
            total.fill(0.0)
            for column in cutlass.range(
                window + turn * walk.windows, end, walk.windows * config.parts_of_window
            ):
                state = self.multiply(pipe, tiled_mma, acc, a, b, state, walk.steps, group)
                left = column * tile[1]
                self.hide(acc, own, target, top, left, tokens, vocab, first)
                if cutlass.const_expr(self.sums):
                    self.accumulate(acc, highest, total)
                if cutlass.const_expr(self.store):
                    self.put(acc, own, thread, group, e, reference, top, left, tokens)
            if cutlass.const_expr(config.pingpong):
                tiles = (end - window + walk.windows - 1) // walk.windows
                turn = (turn + cutlass.max(tiles, 0)) % 2
            if cutlass.const_expr(self.sums):
                part = window * config.parts_of_window
                if cutlass.const_expr(config.pingpong):
                    part += group
                self.flush(highest, total, own, thread, reference, sums, top, part, tokens)
                if window == 0 and thread == 0:
                    notes[FINISHED_NOTE] = Int32(0)
                    notes[BLOCK_NOTES + row] = Int32(0)
        if cutlass.const_expr(self.store):
            cute.arch.cp_async_bulk_wait_group(0, read=True)

    @cute.jit
    def multiply(
        self,
        pipe: Any,
        tiled_mma: cute.TiledMma,
        acc: cute.Tensor,
        a: cute.Tensor,
        b: cute.Tensor,
        state: Any,
        steps: Int32,
        group: Int32,
    ) -> Any:
        """Compute one tile of logits; return the state of this warpgroup's next tile."""
        if cutlass.const_expr(self.config.pingpong):
            cute.arch.barrier(barrier_id=1 + group, number_of_threads=2 * GROUP)
        done = state.clone()
        tiled_mma.set(warpgroup.Field.ACCUMULATE, False)
        for step in cutlass.range(steps, unroll=1):
            pipe.consumer_wait(state)
            warpgroup.fence()
            for block in cutlass.range_constexpr(self.tile[2] // 16):
                at = (None, None, block, state.index)
                cute.gemm(tiled_mma, acc, a[at], b[at], acc)
                tiled_mma.set(warpgroup.Field.ACCUMULATE, True)
            warpgroup.commit_group()
            warpgroup.wait_group(1)
            if step > 0:
                pipe.consumer_release(done)
                done.advance()
            state.advance()
        if cutlass.const_expr(self.config.pingpong):
            self.pass_turn(group)
            state.advance(steps)
        warpgroup.wait_group(0)
        pipe.consumer_release(done)
        return state

    @cute.jit
    def pass_turn(self, group: Int32) -> None:
        """Let the other warpgroup multiply.

        It must not wait for its stages earlier: a barrier tells a stage's next filling from the
        one before, but not from the one before that.
        """
        cute.arch.barrier_arrive(barrier_id=2 - group, number_of_threads=2 * GROUP)

    @cute.jit
    def row(self, own: cute.Tensor, top: Int32, block: int, half: int) -> Int32:
        """Return the token of the thread's accumulators (·, half, ·) of a 64-row block."""
        return top + block * 64 * self.sharing + own[(0, half, 0), 0, 0][0]

    @cute.jit
    def hide(
        self,
        acc: cute.Tensor,
        own: cute.Tensor,
        target: cute.Tensor,
        top: Int32,
        left: Int32,
        tokens: Int32,
        vocab: Int32,
        first: Int32,
    ) -> None:
        """Set the logits of targets, and of columns beyond the vocabulary, to -inf.

        Accumulator (v, half, j) of a thread lies 8·j + v columns to the right of its first one.
        """
        offset = own[0][1]
        limit = vocab - left - offset
        targets = cute.make_rmem_tensor((2, self.blocks), Int32)
        found = left + self.tile[1] > vocab
        for block in cutlass.range_constexpr(self.blocks):
            for half in cutlass.range_constexpr(2):
                row = self.row(own, top, block, half)
                column = Int32(-1)
                if row < tokens:
                    column = Int32(target[row] - first) - left
                targets[half, block] = column - offset
                found = found or (column >= 0 and column < self.tile[1])
        if found:
            for block in cutlass.range_constexpr(self.blocks):
                for half in cutlass.range_constexpr(2):
                    for j in cutlass.range_constexpr(self.tile[1] // 8):
                        for v in cutlass.range_constexpr(2):
                            column = 8 * j + v
                            if targets[half, block] == column or limit <= column:
                                acc[(v, half, j), block, 0] = -Float32.inf

    @cute.jit
    def accumulate(self, acc: cute.Tensor, highest: cute.Tensor, total: cute.Tensor) -> None:
        """Add the tile to the rows' sums: Σ exp2(z·log2 e - highest), per thread."""
        for block in cutlass.range_constexpr(self.blocks):
            for half in cutlass.range_constexpr(2):
                maximum = acc[(0, half, 0), block, 0]
                for j in cutlass.range_constexpr(self.tile[1] // 8):
                    for v in cutlass.range_constexpr(2):
                        maximum = cute.arch.fmax(maximum, acc[(v, half, j), block, 0])
                before = highest[half, block]
                after = cute.arch.fmax(before, maximum * LOG2_E)
                base = finite(after)
                even = total[half, block] * exp2(before - base)
                odd = Float32(0.0)
                for j in cutlass.range_constexpr(self.tile[1] // 8):
                    even += exp2(acc[(0, half, j), block, 0] * LOG2_E - base)
                    odd += exp2(acc[(1, half, j), block, 0] * LOG2_E - base)
                total[half, block] = even + odd
                highest[half, block] = after

    @cute.jit
    def flush(
        self,
        highest: cute.Tensor,
        total: cute.Tensor,
        own: cute.Tensor,
        thread: Int32,
        reference: cute.Tensor,
        sums: cute.Tensor,
        top: Int32,
        part: Int32,
        tokens: Int32,
    ) -> None:
        """Join the four threads that share a row and write log2 of its sum, relative to ρ."""
        for block in cutlass.range_constexpr(self.blocks):
            for half in cutlass.range_constexpr(2):
                row = self.row(own, top, block, half)
                before = highest[half, block]
                after = before
                for offset in cutlass.range_constexpr(1, 3):
                    other = cute.arch.shuffle_sync_bfly(after, offset=offset)
                    after = cute.arch.fmax(after, other)
                joint = total[half, block] * exp2(before - finite(after))
                for offset in cutlass.range_constexpr(1, 3):
                    joint += cute.arch.shuffle_sync_bfly(joint, offset=offset)
                if thread % 4 == 0 and row < tokens:
                    distance = after - reference[row] * LOG2_E
                    sums[row, part] = distance + cute.math.log2(joint, fastmath=True)

    @cute.jit
    def put(
        self,
        acc: cute.Tensor,
        own: cute.Tensor,
        thread: Int32,
        group: Int32,
        e: Any,
        reference: cute.Tensor,
        top: Int32,
        left: Int32,
        tokens: Int32,
    ) -> None:
        """Store the tile's exponentials, each warp its own 16 rows of every 64, slab by slab."""
        atom, g_e, s_e = e
        warp = cute.arch.make_warp_uniform(thread // 32)
        stmatrix = cute.make_copy_atom(StMatrix8x8x16bOp(False, 4), self.dtype)
        copy = cute.make_tiled_copy_S(
            stmatrix, cute.make_tiled_copy_C_atom(stmatrix, self.tiled_mma(1))
        )
        shared = s_e[None, None, group]
        to_slab = copy.get_slice(thread).partition_D(shared)
        slab = cute.local_tile(shared, (16, self.slab), (warp, 0))
        _, to_exps, from_slab = self.partition((atom, g_e, slab), (16, self.slab), Int32(0), 1)
        base = cute.make_rmem_tensor((2,), Float32)
        for block in cutlass.range_constexpr(self.blocks):
            for half in cutlass.range_constexpr(2):
                row = self.row(own, top, block, half)
                base[half] = Float32.inf
                if row < tokens:
                    base[half] = reference[row] * LOG2_E
            for number in cutlass.range_constexpr(self.tile[1] // self.slab):
                if left + number * self.slab < g_e.shape[1]:
                    values = cute.make_rmem_tensor((2, 2, self.slab // 8), Float32)
                    for j in cutlass.range_constexpr(self.slab // 8):
                        for half in cutlass.range_constexpr(2):
                            for v in cutlass.range_constexpr(2):
                                z = acc[(v, half, number * (self.slab // 8) + j), block, 0]
                                values[v, half, j] = exp2(z * LOG2_E - base[half])
                    rounded = cute.make_rmem_tensor(to_slab.shape, self.dtype)
                    flat = cute.make_tensor(values.iterator, rounded.layout)
                    rounded.store(flat.load().to(self.dtype))
                    # the slab before has been read, and all of this one is written
                    cute.arch.cp_async_bulk_wait_group(0, read=True)
                    cute.arch.sync_warp()
                    cute.copy(copy, rounded, to_slab)
                    cute.arch.fence_proxy("async.shared", space="cta")
                    cute.arch.sync_warp()
                    rows = (top + block * 64 * self.sharing) // 16 + warp
                    cute.copy(atom, from_slab, to_exps[None, rows, left // self.slab + number])
                    cute.arch.cp_async_bulk_commit_group()


@cute.jit
def finite(x: Float32) -> Float32:
    """Return x, or 0 for -inf: the maximum of nothing, which must not be subtracted from itself."""
    y = x
    if x == -Float32.inf:
        y = Float32(0.0)
    return y
