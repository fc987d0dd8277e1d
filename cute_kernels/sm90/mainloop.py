"""The Hopper mainloop: tiles of a bᵀ, from memory to accumulators.

One load warp fills pipeline stages with tiles of a (M, K) and b (N, K) by TMA; the thread blocks of
a cluster hold different rows and share each tile of b by multicast.  Two warpgroups run MMAs:
ping-pong, each on separate tiles, so that one's epilogue overlaps the other's MMAs; or cooperative,
each on half of every tile's rows.  Clusters take work tiles in the order of `schedule.order`.
"""

from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, pipeline
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.tensor_utils import LayoutEnum
from cutlass.utils import hopper_helpers as sm90

from cutefce.cute_kernels.arch import arch_named
from cutefce.cute_kernels.arch.base import TILE_K
from cutefce.cute_kernels.arch.sm90 import Sm90
from cutefce.cute_kernels.common.dsl import DTYPES, USE_PDL, partition
from cutefce.cute_kernels.config import GemmConfig
from cutefce.cute_kernels.problem import ITEM_BYTES
from cutefce.cute_kernels.schedule.scheduler import TileScheduler
from cutefce.cute_kernels.workspace import Semaphore

WARP_GROUP_THREADS = 128
MMA_WARP_GROUPS = 2
"""Warpgroups that run MMAs and epilogues."""
SYNC_EVERY_STAGES = 4
"""Stages between two sync points of all clusters."""
MAX_POLLS = 5000
"""Polls of the arrival counter (about 1 us each) before cluster throttling is disabled."""
LOAD_ROWS, LOAD_ROWS_TAIL = 64, 8
"""Rows of a that one TMA load covers when out-of-range rows are skipped: full blocks, and the tail.
Loads of out-of-range rows are slower than others, but each load costs the load warp issue slots."""


class NamedBarrier(IntEnum):
    """Barriers of a thread block; 0 is that of `sync_threads`."""

    MMA_TURN_WG0 = 1
    """Ping-pong: warpgroup 0 may issue MMAs."""
    MMA_TURN_WG1 = 2


@dataclass(frozen=True)
class Operand:
    """The memory layout of an operand of a GEMM."""

    k_major: bool
    """Whether the inner dimension K is contiguous; otherwise the outer one is."""

    @property
    def major(self) -> OperandMajorMode:
        """The layout for wgmma."""
        return OperandMajorMode.K if self.k_major else OperandMajorMode.MN

    @property
    def layout(self) -> LayoutEnum:
        """The layout for the DSL's helpers."""
        return LayoutEnum.ROW_MAJOR if self.k_major else LayoutEnum.COL_MAJOR


class Consumer(NamedTuple):
    """A consumer thread's indices, operands and accumulators."""

    thread: Int32
    """Index within the warpgroup."""
    warp_group_idx: Int32
    """Index among the MMA warpgroups."""
    m_half: Int32
    """Half of each tile's rows that the warpgroup computes; 0 in ping-pong: it computes all."""
    parity: Int32
    """Ping-pong: parity of the tiles that the warpgroup computes first; 0 in cooperative mode."""
    tCrA: cute.Tensor
    tCrB: cute.Tensor
    acc: cute.Tensor
    tCcC: cute.Tensor
    """Coordinates of the accumulators within 64 rows of a tile."""


class MainloopSm90:
    """Loads and MMAs for one configuration and operand layout."""

    def __init__(
        self,
        arch_name: str,
        dtype: str,
        config: GemmConfig,
        a: Operand,
        b: Operand,
        *,
        only_flagged: bool,
        skip_missing_rows: bool,
    ) -> None:
        """Skip row blocks without a repair flag and loads of out-of-range rows of a, if asked."""
        arch = arch_named(arch_name)
        assert isinstance(arch, Sm90)
        self.config = config
        self.dtype = DTYPES[dtype]
        self.a, self.b = a, b
        self.only_flagged = only_flagged
        self.tile = (config.tile_m, config.tile_n, TILE_K)
        self.skip_missing_rows = skip_missing_rows
        self.load_rows = (LOAD_ROWS, LOAD_ROWS_TAIL) if skip_missing_rows else (config.tile_m,)
        self.row_bytes = TILE_K * ITEM_BYTES[dtype]
        self.producer_registers, self.consumer_registers = arch.registers(config)
        # warpgroups that share a tile, and 64-row blocks of it that each of them computes
        self.m_halves = 1 if config.pingpong else MMA_WARP_GROUPS
        self.m_blocks = config.tile_m // (64 * self.m_halves)

    def launch_shape(self, clusters: Int32) -> dict[str, Any]:
        """Return the launch parameters for `clusters` clusters."""
        return {
            "grid": [clusters * self.config.cluster, 1, 1],
            "block": [WARP_GROUP_THREADS * (1 + MMA_WARP_GROUPS), 1, 1],
            "cluster": [self.config.cluster, 1, 1],
            "min_blocks_per_mp": 1,
            **USE_PDL,
        }

    def tiled_mma(self, m_halves: int) -> cute.TiledMma:
        """Return wgmma over 64 rows and a tile's columns for each of `m_halves` warpgroups."""
        return sm90.make_trivial_tiled_mma(
            self.dtype,
            self.dtype,
            self.a.major,
            self.b.major,
            Float32,
            (m_halves, 1, 1),
            (64, self.tile[1]),
        )

    def acc_coords(self, thread: Int32) -> Any:
        """Return tCcC, (row, column) of a thread's accumulators within 64 rows of a tile.

        Accumulator (v, half, j) is 8·j + v columns to the right of the thread's first one.
        """
        one = self.tiled_mma(1).get_slice(thread)
        return one.partition_C(cute.make_identity_tensor((64, self.tile[1])))

    @cute.jit
    def row(self, tCcC: cute.Tensor, m_start: Int32, m_block: int, half: int) -> Int32:
        """Return the row of the thread's accumulators (·, half, ·) of a 64-row block."""
        return m_start + m_block * 64 * self.m_halves + tCcC[(0, half, 0), 0, 0][0]

    @cute.jit
    def tma_loads(self, a: cute.Tensor, b: cute.Tensor) -> Any:
        """Return (TMA atoms, coordinates, shared memory layout) of a, and (atom, …) of b.

        a has one atom for each of `load_rows`; b has one for a tile.
        """
        config, tile = self.config, self.tile
        a_layout = sm90.make_smem_layout_a(self.a.layout, tile, self.dtype, config.stages)
        b_layout = sm90.make_smem_layout_b(self.b.layout, tile, self.dtype, config.stages)
        load = cpasync.CopyBulkTensorTileG2SOp()
        multicast = cpasync.CopyBulkTensorTileG2SMulticastOp() if config.cluster > 1 else load
        loads_a, g_a = [], None
        for rows in self.load_rows:
            box = sm90.make_smem_layout_a(self.a.layout, (rows, *tile[1:]), self.dtype, 1)
            box = cute.slice_(box, (None, None, 0))
            load_a, g_a = cpasync.make_tiled_tma_atom(load, a, box, (rows, tile[2]))
            loads_a.append(load_a)
        load_b, g_b = cpasync.make_tiled_tma_atom(
            multicast,
            b,
            cute.slice_(b_layout, (None, None, 0)),
            (tile[1], tile[2]),
            num_multicast=config.cluster,
        )
        return (loads_a, g_a, a_layout), (load_b, g_b, b_layout)

    @cute.jit
    def make_pipeline(self, barriers: Any) -> Any:
        """Return the pipeline of stages, once all blocks of the cluster have initialized theirs."""
        config, tile = self.config, self.tile
        pipe = pipeline.PipelineTmaAsync.create(
            barrier_storage=barriers,
            num_stages=config.stages,
            producer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread),
            # one arrival of each warp that reads a stage, at every block that fills it
            consumer_group=pipeline.CooperativeGroup(
                pipeline.Agent.Thread, config.cluster * 4 * self.m_halves
            ),
            tx_count=self.row_bytes * (tile[0] + tile[1]),
            cta_layout_vmnk=cute.make_layout((1, config.cluster, 1, 1)),
            defer_sync=True,
        )
        cluster_shape = cute.make_layout((config.cluster, 1))
        pipeline.pipeline_init_arrive(cluster_shape_mn=cluster_shape, is_relaxed=True)
        pipeline.pipeline_init_wait(cluster_shape_mn=cluster_shape)
        return pipe

    @cute.jit
    def load(
        self, scheduler: TileScheduler, pipe: Any, a: Any, b: Any, semaphores: cute.Tensor
    ) -> None:
        """Producer: fill the stages of all tiles; a and b are (TMA atoms, coordinates, smem)."""
        config, tile = self.config, self.tile
        atoms_a, g_a, s_a = a
        loads_a = []
        for load_rows, atom_a in zip(self.load_rows, atoms_a, strict=True):
            operand = atom_a, g_a, cute.flat_divide(s_a, (load_rows, tile[2]))
            loads_a.append(partition(operand, (load_rows, tile[2]), Int32(0), 1))
        load_b, from_b, to_b = partition(b, (tile[1], tile[2]), scheduler.rank, config.cluster)
        multicast = {"mcast_mask": cutlass.Int16((1 << config.cluster) - 1)}
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, config.stages)
        work_tiles = scheduler.num_work_tiles()
        syncs, max_polls = Int32(0), Int32(MAX_POLLS)
        for index in cutlass.range(scheduler.cluster, scheduler.num_indices(), scheduler.clusters):
            work_tile = scheduler.work_tile(index)
            row_block, split, n_end = scheduler.coord(
                work_tile.number, config.raster_group, semaphores if self.only_flagged else None
            )
            row = row_block * config.cluster + scheduler.rank
            loaded_rows, spans = self.rows_to_load(scheduler, row)
            tile_bytes = (loaded_rows + tile[1]) * self.row_bytes
            # sync while all clusters have tiles left; a single row block shares no tiles
            sync_end = split + scheduler.n_tiles // scheduler.vocab_splits * scheduler.vocab_splits
            is_full_wave = index - scheduler.cluster + scheduler.clusters <= work_tiles
            if not is_full_wave or scheduler.rank != 0 or scheduler.row_blocks == 1:
                sync_end = Int32(0)
            for column in cutlass.range(split, n_end, scheduler.vocab_splits):
                for k_tile in cutlass.range(work_tile.k_start, work_tile.k_end, unroll=1):
                    if cutlass.const_expr(not self.only_flagged):
                        if k_tile % SYNC_EVERY_STAGES == 0 and column < sync_end:
                            # wait for arrivals at the previous sync point: punctual clusters
                            # never wait
                            max_polls = self.throttle_clusters(
                                semaphores, syncs * scheduler.clusters, max_polls
                            )
                            syncs += 1
                    pipe.sync_object_empty.wait(state.index, state.phase)
                    pipe.sync_object_full.arrive_and_expect_tx(state.index, tile_bytes)
                    full = pipe.producer_get_barrier(state)
                    for i in cutlass.range_constexpr(len(spans)):
                        (load_a, from_a, to_a), (first, last) = loads_a[i], spans[i]
                        start = row * (tile[0] // self.load_rows[i])
                        for rows in cutlass.range(first, last, unroll=1):
                            cute.copy(
                                load_a,
                                from_a[None, start + rows, k_tile],
                                to_a[None, rows, 0, state.index],
                                tma_bar_ptr=full,
                            )
                    cute.copy(
                        load_b,
                        from_b[None, column, k_tile],
                        to_b[None, state.index],
                        tma_bar_ptr=full,
                        **(multicast if config.cluster > 1 else {}),
                    )
                    pipe.producer_commit(state)
                    state.advance()
        pipe.producer_tail(state)

    @cute.jit
    def rows_to_load(self, scheduler: TileScheduler, row: Int32) -> Any:
        """Return the rows of a's tile to load, and the span of boxes for each of `load_rows`."""
        if cutlass.const_expr(not self.skip_missing_rows):
            return self.tile[0], ((0, 1),)
        rows = cutlass.min(cutlass.max(scheduler.rows - row * self.tile[0], 0), self.tile[0])
        blocks, tail_end = rows // LOAD_ROWS, (rows + LOAD_ROWS_TAIL - 1) // LOAD_ROWS_TAIL
        tail_start = blocks * (LOAD_ROWS // LOAD_ROWS_TAIL)
        return tail_end * LOAD_ROWS_TAIL, ((0, blocks), (tail_start, tail_end))

    @cute.jit
    def throttle_clusters(self, semaphores: cute.Tensor, target: Int32, max_polls: Int32) -> Int32:
        """Arrive at a sync point and wait for `target` arrivals, for at most `max_polls` polls.

        Clusters that read the same tiles at about the same time find them in the L2 cache.  This
        affects speed only: return the limit for the next sync point, which is 0 after a wait
        without success, as when another kernel occupies some SMs.
        """
        counter = semaphores.iterator + Semaphore.SYNC_COUNTER
        if cute.arch.lane_idx() == 0:
            cute.arch.red(counter, Int32(1), op="add", dtype="s32", sem="relaxed", scope="gpu")
        cute.arch.sync_warp()
        arrivals = cute.arch.load(counter, Int32, sem="relaxed", scope="gpu")
        polls = Int32(0)
        while arrivals < target and polls < max_polls:
            arrivals = cute.arch.load(counter, Int32, sem="relaxed", scope="gpu")
            polls += 1
        return max_polls * Int32(arrivals >= target)

    @cute.jit
    def make_consumer(
        self, scheduler: TileScheduler, tiled_mma: cute.TiledMma, a: cute.Tensor, b: cute.Tensor
    ) -> Any:
        """Return the thread's `Consumer` and the pipeline state of its first tile."""
        config = self.config
        thread_idx = cute.arch.thread_idx()[0]
        warp_group_idx = cute.arch.make_warp_uniform(thread_idx // WARP_GROUP_THREADS) - 1
        thread = thread_idx % WARP_GROUP_THREADS
        m_half = Int32(0) if cutlass.const_expr(config.pingpong) else warp_group_idx
        slice_mma = tiled_mma.get_slice(m_half * WARP_GROUP_THREADS)
        consumer = Consumer(
            thread=thread,
            warp_group_idx=warp_group_idx,
            m_half=m_half,
            parity=warp_group_idx if cutlass.const_expr(config.pingpong) else Int32(0),
            tCrA=tiled_mma.make_fragment_A(slice_mma.partition_A(a)),
            tCrB=tiled_mma.make_fragment_B(slice_mma.partition_B(b)),
            acc=cute.make_rmem_tensor(tiled_mma.partition_shape_C(self.tile[:2]), Float32),
            tCcC=self.acc_coords(thread),
        )
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, config.stages)
        if cutlass.const_expr(config.pingpong):
            if warp_group_idx == 1:
                first = scheduler.work_tile(scheduler.cluster)
                state.advance(first.k_end - first.k_start)
                self.yield_mma_turn(warp_group_idx)
        return consumer, state

    @cute.jit
    def mma(
        self,
        pipe: Any,
        tiled_mma: cute.TiledMma,
        consumer: Consumer,
        state: Any,
        k_tiles: Int32,
        other_k_tiles: Int32,
        last_k: Any = None,
    ) -> Any:
        """Compute one tile of `k_tiles` stages; return the state of the warpgroup's next tile.

        In ping-pong, `other_k_tiles` are the stages of the other warpgroup's tile in between.  With
        `last_k`, operands are 0 from that K of the last stage on.
        """
        acc, a, b = consumer.acc, consumer.tCrA, consumer.tCrB
        if cutlass.const_expr(self.config.pingpong):
            self.await_mma_turn(consumer.warp_group_idx)
        release_state = state.clone()
        tiled_mma.set(warpgroup.Field.ACCUMULATE, False)
        whole = k_tiles if cutlass.const_expr(last_k is None) else k_tiles - 1
        for k_tile in cutlass.range(whole, unroll=1):
            pipe.consumer_wait(state)
            warpgroup.fence()
            for k_block in cutlass.range_constexpr(self.tile[2] // 16):
                coord = (None, None, k_block, state.index)
                cute.gemm(tiled_mma, acc, a[coord], b[coord], acc)
                tiled_mma.set(warpgroup.Field.ACCUMULATE, True)
            warpgroup.commit_group()
            warpgroup.wait_group(1)
            if k_tile > 0:
                pipe.consumer_release(release_state)
                release_state.advance()
            state.advance()
        if cutlass.const_expr(last_k is not None):  # branches would delay the MMAs of other stages
            pipe.consumer_wait(state)
            warpgroup.fence()
            for k_block in cutlass.range_constexpr(self.tile[2] // 16):
                if 16 * k_block < last_k:
                    coord = (None, None, k_block, state.index)
                    cute.gemm(tiled_mma, acc, a[coord], b[coord], acc)
                    tiled_mma.set(warpgroup.Field.ACCUMULATE, True)
            warpgroup.commit_group()
            state.advance()
        if cutlass.const_expr(self.config.pingpong):
            self.yield_mma_turn(consumer.warp_group_idx)
            state.advance(other_k_tiles)
        warpgroup.wait_group(0)
        if cutlass.const_expr(last_k is not None):
            if k_tiles > 1:
                pipe.consumer_release(release_state)
                release_state.advance()
        pipe.consumer_release(release_state)
        return state

    @cute.jit
    def await_mma_turn(self, warp_group_idx: Int32) -> None:
        """Wait until the other warpgroup yields its turn."""
        cute.arch.barrier(
            barrier_id=NamedBarrier.MMA_TURN_WG0 + warp_group_idx,
            number_of_threads=2 * WARP_GROUP_THREADS,
        )

    @cute.jit
    def yield_mma_turn(self, warp_group_idx: Int32) -> None:
        """Let the other warpgroup issue MMAs.

        That one must not wait for its stages before its turn: the phase bit of an mbarrier tells a
        stage's next fill from the previous one, but not from the one before that.
        """
        cute.arch.barrier_arrive(
            barrier_id=NamedBarrier.MMA_TURN_WG1 - warp_group_idx,
            number_of_threads=2 * WARP_GROUP_THREADS,
        )
