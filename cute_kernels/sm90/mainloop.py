"""The Hopper mainloop: tiles of a bᵀ, from memory to accumulators.

One producer warp loads tiles of a (M, K) and b (N, K) by TMA; the thread blocks of a cluster hold
different rows and share each tile of b by multicast.  Two consumer warpgroups multiply: in turns,
each a tile of its own, so that the epilogue of one runs under the products of the other; or
together, each one half of every tile's rows.  A cluster walks units (`tile_order`).
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, pipeline
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.tensor_utils import LayoutEnum
from cutlass.utils import hopper_helpers as sm90

from cutefce.cute_kernels.arch import arch_named
from cutefce.cute_kernels.arch.base import STEP
from cutefce.cute_kernels.arch.sm90 import Sm90
from cutefce.cute_kernels.common.dsl import DTYPES, EARLY
from cutefce.cute_kernels.config import GemmConfig
from cutefce.cute_kernels.problem import ITEM_BYTES
from cutefce.cute_kernels.schedule.scheduler import Walk, indices, piece, unit
from cutefce.cute_kernels.workspace import Semaphore

GROUP = 128
"""Threads of a warpgroup."""
CONSUMERS = 2
"""Warpgroups that multiply."""
CHECKPOINT = 4
"""Stages between two meetings of all clusters."""
PATIENCE = 5000
"""Looks at who has arrived, of a microsecond or less each, after which meetings are given up."""
BLOCK, BOX = 64, 8
"""Rows of a that are loaded at a time where those beyond the last are left out: as long as there
are so many, and then.  In loads, rows that do not exist take longer than others; but the producer
must have the time to make several of one."""


@dataclass(frozen=True)
class Operand:
    """How an operand lies in memory: by rows, so that its inner dimension K is contiguous, or not.

    What lies by columns is the transpose of a matrix that lies by rows.
    """

    by_rows: bool

    @property
    def major(self) -> OperandMajorMode:
        """What wgmma calls it."""
        return OperandMajorMode.K if self.by_rows else OperandMajorMode.MN

    @property
    def layout(self) -> LayoutEnum:
        """What the DSL calls it."""
        return LayoutEnum.ROW_MAJOR if self.by_rows else LayoutEnum.COL_MAJOR


class Consumer(NamedTuple):
    """What a thread of a consumer has."""

    thread: Int32
    """Within its warpgroup."""
    group: Int32
    """Its warpgroup."""
    share: Int32
    """Which half of a tile's rows the warpgroup holds; in turns, 0: it holds all rows."""
    turn: Int32
    """Which of two tiles is its first; 0 if the warpgroups share each tile."""
    a: cute.Tensor
    b: cute.Tensor
    acc: cute.Tensor
    own: cute.Tensor


class MainloopSm90:
    """Loading and multiplying, for one configuration and the layouts of the operands."""

    def __init__(
        self,
        arch_name: str,
        dtype: str,
        config: GemmConfig,
        a: Operand,
        b: Operand,
        *,
        masked: bool,
        leaves_out: bool,
    ) -> None:
        """Leave out units that are not noted if `masked`, and rows beyond the last of a."""
        arch = arch_named(arch_name)
        assert isinstance(arch, Sm90)
        arch.check(config)
        self.config = config
        self.dtype = DTYPES[dtype]
        self.a, self.b = a, b
        self.masked = masked
        self.tile = (config.tile_m, config.tile_n, STEP)
        self.leaves_out = leaves_out
        self.heights = (BLOCK, BOX) if leaves_out else (config.tile_m,)
        self.row_bytes = STEP * ITEM_BYTES[dtype]
        self.producer_registers, self.consumer_registers = arch.registers(config)
        # warpgroups that share a tile, and 64-row blocks of it that each of them holds
        self.sharing = 1 if config.pingpong else CONSUMERS
        self.blocks = config.tile_m // (64 * self.sharing)

    def launch_shape(self, clusters: Int32) -> dict[str, Any]:
        """Return what a launch on `clusters` clusters asks for."""
        return {
            "grid": [clusters * self.config.cluster, 1, 1],
            "block": [GROUP * (1 + CONSUMERS), 1, 1],
            "cluster": [self.config.cluster, 1, 1],
            "min_blocks_per_mp": 1,
            **EARLY,
        }

    def tiled_mma(self, sharing: int) -> cute.TiledMma:
        """Return wgmma over 64 rows and a tile's columns for each of `sharing` warpgroups."""
        return sm90.make_trivial_tiled_mma(
            self.dtype,
            self.dtype,
            self.a.major,
            self.b.major,
            Float32,
            (sharing, 1, 1),
            (64, self.tile[1]),
        )

    def own(self, thread: Int32) -> Any:
        """Return row and column of a thread's accumulators within 64 rows of a tile.

        Accumulator (v, half, j) lies 8·j + v columns to the right of the thread's first one.
        """
        one = self.tiled_mma(1).get_slice(thread)
        return one.partition_C(cute.make_identity_tensor((64, self.tile[1])))

    @cute.jit
    def row(self, own: cute.Tensor, top: Int32, block: int, half: int) -> Int32:
        """Return the row of the thread's accumulators (·, half, ·) of a 64-row block."""
        return top + block * 64 * self.sharing + own[(0, half, 0), 0, 0][0]

    @cute.jit
    def inputs(self, a: cute.Tensor, b: cute.Tensor) -> Any:
        """Return (TMA atoms, coordinates, shared memory layout) of a, and the same of b.

        Those of a are for `BLOCK` rows and for `BOX`, or for a tile; that of b is for a tile.
        """
        config, tile = self.config, self.tile
        a_layout = sm90.make_smem_layout_a(self.a.layout, tile, self.dtype, config.stages)
        b_layout = sm90.make_smem_layout_b(self.b.layout, tile, self.dtype, config.stages)
        load = cpasync.CopyBulkTensorTileG2SOp()
        share = cpasync.CopyBulkTensorTileG2SMulticastOp() if config.cluster > 1 else load
        loads_a, g_a = [], None
        for rows in self.heights:
            part = sm90.make_smem_layout_a(self.a.layout, (rows, *tile[1:]), self.dtype, 1)
            part = cute.slice_(part, (None, None, 0))
            load_a, g_a = cpasync.make_tiled_tma_atom(load, a, part, (rows, tile[2]))
            loads_a.append(load_a)
        load_b, g_b = cpasync.make_tiled_tma_atom(
            share,
            b,
            cute.slice_(b_layout, (None, None, 0)),
            (tile[1], tile[2]),
            num_multicast=config.cluster,
        )
        return (loads_a, g_a, a_layout), (load_b, g_b, b_layout)

    @cute.jit
    def stages(self, barriers: Any) -> Any:
        """Return the pipeline of stages, after all blocks of the cluster have set theirs up."""
        config, tile = self.config, self.tile
        pipe = pipeline.PipelineTmaAsync.create(
            barrier_storage=barriers,
            num_stages=config.stages,
            producer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread),
            # one arrival of each warp that reads a stage, at every block that fills it
            consumer_group=pipeline.CooperativeGroup(
                pipeline.Agent.Thread, config.cluster * 4 * self.sharing
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
    def load(self, walk: Walk, pipe: Any, a: Any, b: Any, notes: cute.Tensor) -> None:
        """Producer: fill the stages, tile after tile; a and b are those of `inputs`, in smem."""
        config, tile = self.config, self.tile
        atoms_a, g_a, s_a = a
        loads_a = []
        for height, atom_a in zip(self.heights, atoms_a, strict=True):
            shape = height, tile[2]
            operand = atom_a, g_a, cute.flat_divide(s_a, shape)
            loads_a.append(partition(operand, shape, Int32(0), 1))
        load_b, from_b, to_b = partition(b, (tile[1], tile[2]), walk.rank, config.cluster)
        everyone = {"mcast_mask": cutlass.Int16((1 << config.cluster) - 1)}
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, config.stages)
        units, passed, patience = walk.row_blocks * walk.windows, Int32(0), Int32(PATIENCE)
        for index in cutlass.range(walk.cluster, indices(walk), walk.clusters):
            part = piece(walk, index)
            row, window, end = unit(
                walk, config.raster_group, notes if self.masked else None, part.unit
            )
            row = row * config.cluster + walk.rank
            filled, spans = self.rows_to_load(walk, row)
            tile_bytes = (filled + tile[1]) * self.row_bytes
            # up to where all clusters have tiles, and the same number; one row block shares none
            together = window + walk.tiles // walk.windows * walk.windows
            everyone_works = index - walk.cluster + walk.clusters <= units
            if not everyone_works or walk.rank != 0 or walk.row_blocks == 1:
                together = Int32(0)
            for column in cutlass.range(window, end, walk.windows):
                for step in cutlass.range(part.first, part.end, unroll=1):
                    if cutlass.const_expr(not self.masked):
                        if step % CHECKPOINT == 0 and column < together:
                            # all have been at the one before: nobody waits who is on time
                            patience = self.meet(notes, passed * walk.clusters, patience)
                            passed += 1
                    pipe.sync_object_empty.wait(state.index, state.phase)
                    pipe.sync_object_full.arrive_and_expect_tx(state.index, tile_bytes)
                    full = pipe.producer_get_barrier(state)
                    for kind in cutlass.range_constexpr(len(spans)):
                        (load_a, from_a, to_a), (first, last) = loads_a[kind], spans[kind]
                        for rows in cutlass.range(first, last, unroll=1):
                            cute.copy(
                                load_a,
                                from_a[None, row * (tile[0] // self.heights[kind]) + rows, step],
                                to_a[None, rows, 0, state.index],
                                tma_bar_ptr=full,
                            )
                    cute.copy(
                        load_b,
                        from_b[None, column, step],
                        to_b[None, state.index],
                        tma_bar_ptr=full,
                        **(everyone if config.cluster > 1 else {}),
                    )
                    pipe.producer_commit(state)
                    state.advance()
        pipe.producer_tail(state)

    @cute.jit
    def rows_to_load(self, walk: Walk, row: Int32) -> Any:
        """Return how many rows of a tile of a are loaded, and in which parts of each height."""
        if cutlass.const_expr(not self.leaves_out):
            return self.tile[0], ((0, 1),)
        there = cutlass.min(cutlass.max(walk.rows - row * self.tile[0], 0), self.tile[0])
        blocks, boxes = there // BLOCK, (there + BOX - 1) // BOX
        return boxes * BOX, ((0, blocks), (blocks * (BLOCK // BOX), boxes))

    @cute.jit
    def meet(self, notes: cute.Tensor, target: Int32, patience: Int32) -> Int32:
        """Arrive at a checkpoint, and wait until `target` arrivals, or until patience ends.

        Clusters that read the same tiles must do so at about the same time, or the tiles have left
        the L2 cache and are read from memory again.  It is for speed alone: return the patience
        left, which is none after a wait that found no end, as when another kernel holds
        num_sms.
        """
        counter = notes.iterator + Semaphore.SYNC_COUNTER
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
    def begin(self, walk: Walk, tiled_mma: cute.TiledMma, a: cute.Tensor, b: cute.Tensor) -> Any:
        """Return what a consumer has of its own, and the state of its first tile."""
        config = self.config
        thread = cute.arch.thread_idx()[0] % GROUP
        group = cute.arch.make_warp_uniform(cute.arch.thread_idx()[0] // GROUP) - 1
        share = Int32(0) if cutlass.const_expr(config.pingpong) else group
        slice_mma = tiled_mma.get_slice(share * GROUP)
        consumer = Consumer(
            thread=thread,
            group=group,
            share=share,
            turn=group if cutlass.const_expr(config.pingpong) else Int32(0),
            a=tiled_mma.make_fragment_A(slice_mma.partition_A(a)),
            b=tiled_mma.make_fragment_B(slice_mma.partition_B(b)),
            acc=cute.make_rmem_tensor(tiled_mma.partition_shape_C(self.tile[:2]), Float32),
            own=self.own(thread),
        )
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, config.stages)
        if cutlass.const_expr(config.pingpong):
            if group == 1:
                others = piece(walk, walk.cluster)
                state.advance(others.end - others.first)
                self.pass_turn(group)
        return consumer, state

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
        others: Int32,
        group: Int32,
    ) -> Any:
        """Compute one tile, in `steps`; return the state of this warpgroup's next tile.

        In turns, `others` are the steps of the other warpgroup's tile in between.
        """
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
            state.advance(others)
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
def partition(operand: Any, shape: Any, rank: Int32, shared_by: int) -> Any:
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
