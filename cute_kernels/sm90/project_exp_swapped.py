"""`project_exp` for Hopper with operands swapped: w hᵀ, for tokens that would not fill a tile.

The vocabulary is along wgmma's M, and all tokens of a row block, a multiple of 16, along its N.  So
a token's logits of a tile are in the same accumulators of 8 lanes of each warp.  These lanes share
the tokens' maxima and sums among them: lane l of them has token l of every 8 of a thread.  Maxima
are those of earlier tiles, and seldom raised, so that a tile is reduced over lanes once.
"""

import operator
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.memory import SmemAllocator

from cutefce.cute_kernels.common.dsl import LOG2_E, exp2
from cutefce.cute_kernels.common.online_softmax import Rows
from cutefce.cute_kernels.common.row_reductions import bounded_sum, finite
from cutefce.cute_kernels.integers import ceil_div
from cutefce.cute_kernels.schedule.scheduler import TileScheduler
from cutefce.cute_kernels.sm90.mainloop import (
    MMA_WARP_GROUPS,
    WARP_GROUP_THREADS,
    Consumer,
    NamedBarrier,
)
from cutefce.cute_kernels.sm90.project_exp_launch import LogitTile, ProjectExpLaunchSm90
from cutefce.cute_kernels.sm90.transposed_store import TransposedStoreSm90
from cutefce.cute_kernels.spec import gemm as spec
from cutefce.cute_kernels.variant import IDENTITY, SUM_ONLY

WARPS = WARP_GROUP_THREADS // 32
"""Warps of a warpgroup."""
SHARING_LANES = 8
"""Lanes of a warp that have the same tokens, every fourth."""
MAX_TILE_SUM = 2.0**32
"""Sum of a tile's exponentials up to which they may be relative to a maximum of earlier tiles."""


class ProjectExpSwappedSm90(ProjectExpLaunchSm90):
    """The kernel of plain losses with the vocabulary along wgmma's M."""

    def __init__(self, kernel: spec.ProjectExpSpec) -> None:
        assert (kernel.transform, kernel.reductions) == (IDENTITY, SUM_ONLY) and not kernel.samples
        assert not kernel.logits
        super().__init__(kernel)
        self.epilogue = TransposedStoreSm90(self.dtype, kernel.config.tile_n)
        # accumulators (v, ·, j) of a thread, in groups of which each lane has one's statistics
        tokens = [(v, j) for j in range(self.tile[1] // 8) for v in range(2)]
        self.groups = [tokens[i : i + SHARING_LANES] for i in range(0, len(tokens), SHARING_LANES)]
        # of the warpgroup's accumulators (·, half, ·) of a 64-row block
        self.places = [(half, block) for block in range(self.m_blocks) for half in range(2)]

    def allocate(self, smem: SmemAllocator) -> Any:
        """Return (max and sum, tokens, warps of a warpgroup, warpgroups), if there are sums."""
        if not self.sums:
            return None
        shape = 2, self.tile[1], WARPS, MMA_WARP_GROUPS
        return smem.allocate_tensor(Float32, cute.make_layout(shape), 16)

    @cute.jit
    def consume(
        self,
        scheduler: TileScheduler,
        pipe: Any,
        tiled_mma: cute.TiledMma,
        inputs: Any,
        outputs: Any,
        rows: Rows,
    ) -> None:
        """Consumer: see `ProjectExpLaunchSm90`."""
        config, tile, vocab_splits = self.config, self.tile, scheduler.vocab_splits
        tiles_at_once = 2 if config.pingpong else 1
        e, statistics = outputs
        consumer, state = self.make_consumer(scheduler, tiled_mma, *inputs)
        parity = consumer.parity
        if cutlass.const_expr(self.only_flagged):
            cute.arch.griddepcontrol_wait()  # the previous kernel writes the flags
        row_max = cute.make_rmem_tensor((len(self.groups),), Float32)
        row_sum = cute.make_rmem_tensor((len(self.groups),), Float32)
        for index in cutlass.range(
            scheduler.cluster, scheduler.num_work_tiles(), scheduler.clusters
        ):
            row, split, n_end = scheduler.coord(
                index, config.raster_group, rows.semaphores if self.only_flagged else None
            )
            token_start = row * tile[1]
            row_max.fill(-Float32.inf)
            row_sum.fill(0.0)
            for column in cutlass.range(
                split + parity * vocab_splits, n_end, vocab_splits * tiles_at_once
            ):
                k_tiles = scheduler.k_tiles
                state = self.mma(pipe, tiled_mma, consumer, state, k_tiles, k_tiles)
                cute.arch.griddepcontrol_wait()  # the MMAs need nothing of the previous kernel
                tile_start = (column * config.cluster + scheduler.rank) * tile[0]
                column_start = tile_start + consumer.m_half * 64
                logits = LogitTile(consumer, rows, column_start, token_start, scheduler)
                self.mask(logits)
                if cutlass.const_expr(self.sums):
                    self.accumulate(consumer, row_max, row_sum)
                if cutlass.const_expr(self.store):
                    self.store_exps(logits, e)
            if cutlass.const_expr(config.pingpong):
                tiles = (n_end - split + vocab_splits - 1) // vocab_splits
                parity = (parity + cutlass.max(tiles, 0)) % 2
            if cutlass.const_expr(self.sums):
                cute.arch.griddepcontrol_wait()  # a warpgroup may have no tile of a work tile
                # sums for more splits than there are now receive those of no column
                splits = rows.sums.shape[1] // config.partials_per_row
                for written in cutlass.range(split, splits, vocab_splits, unroll=1):
                    partial = written * config.partials_per_row + scheduler.rank * MMA_WARP_GROUPS
                    partial += consumer.warp_group_idx
                    own = row_max, row_sum, statistics
                    self.write_partials(consumer, own, rows, token_start, partial, scheduler)
                    row_max.fill(-Float32.inf)
                    row_sum.fill(0.0)
        if cutlass.const_expr(self.store):
            cute.arch.cp_async_bulk_wait_group(0, read=True)

    @cute.jit
    def mask(self, logits: LogitTile) -> None:
        """Set the logits of targets, and of columns beyond the vocabulary, to -inf.

        Also of tokens that are stored but do not count.
        """
        consumer, rows, column_start, token_start, scheduler = logits
        acc, lane = consumer.acc, consumer.thread % 32
        span = 64 * self.m_halves * (self.m_blocks - 1) + 64
        needs_mask = column_start + span > scheduler.columns
        for i in cutlass.range_constexpr(ceil_div(self.tile[1], 32)):
            token = token_start + 32 * i + lane
            if token < scheduler.rows:
                column = Int32(rows.target[token] - rows.first) - column_start
                needs_mask = needs_mask or (column >= 0 and column < span)
        if cute.arch.vote_any_sync(needs_mask):
            for group in self.groups:
                for v, j in group:
                    token, column = self.token(consumer, token_start, v, j), Int32(-1)
                    if token < scheduler.rows:
                        column = Int32(rows.target[token] - rows.first)
                    for half, m_block in self.places:
                        own = self.row(consumer.tCcC, column_start, m_block, half)
                        if own == column or own >= scheduler.columns:
                            acc[(v, half, j), m_block, 0] = -Float32.inf
        if cutlass.const_expr(self.store):
            if scheduler.selects != 0 and token_start + self.tile[1] > scheduler.rows:
                for group in self.groups:
                    for v, j in group:
                        if self.token(consumer, token_start, v, j) >= scheduler.rows:
                            for half, m_block in self.places:
                                acc[(v, half, j), m_block, 0] = -Float32.inf

    @cute.jit
    def token(self, consumer: Consumer, token_start: Int32, v: int, j: int) -> Int32:
        """Return the token of the thread's accumulators (v, ·, j)."""
        return token_start + consumer.tCcC[0][1] + (8 * j + v)

    @cute.jit
    def accumulate(self, consumer: Consumer, row_max: cute.Tensor, row_sum: cute.Tensor) -> None:
        """Add the tile's logits to the sums of the lane's tokens, relative to `row_max`.

        A maximum, of z·log2 e, is raised only where the tile's sum exceeds `MAX_TILE_SUM`, as it
        does in the first tile; then the tile is summed again.
        """
        tile_sum = cute.make_rmem_tensor((len(self.groups),), Float32)
        exceeds = cutlass.Boolean(False)
        for number in cutlass.range_constexpr(len(self.groups)):
            tile_sum[number] = self.sum_of(consumer, number, row_max[number])
            exceeds = exceeds or not tile_sum[number] <= MAX_TILE_SUM  # NaN does too
        if cute.arch.vote_any_sync(exceeds):
            for number in cutlass.range_constexpr(len(self.groups)):
                tile_max, new_max = self.max_of(consumer, number) * LOG2_E, row_max[number]
                if not tile_sum[number] <= MAX_TILE_SUM:
                    new_max = cute.arch.fmax(new_max, tile_max)
                base = finite(new_max)
                row_sum[number] *= exp2(row_max[number] - base)
                row_max[number] = new_max
                tile_sum[number] = self.sum_of(consumer, number, base)
        for number in cutlass.range_constexpr(len(self.groups)):
            row_sum[number] += tile_sum[number]

    @cute.jit
    def max_of(self, consumer: Consumer, number: int) -> Float32:
        """Return the largest logit of the lane's token of a group."""
        maxima = []
        for v, j in self.groups[number]:
            z_max = -Float32.inf
            for half, m_block in self.places:
                z_max = cute.arch.fmax(z_max, consumer.acc[(v, half, j), m_block, 0])
            maxima.append(z_max)
        return own_reduction(maxima, consumer.thread % 32, cute.arch.fmax)

    @cute.jit
    def sum_of(self, consumer: Consumer, number: int, own_base: Float32) -> Float32:
        """Return Σ 2^(z·log2 e - base) of the lane's token of a group, with that token's base."""
        group, lane, sums = self.groups[number], consumer.thread % 32, []
        for i in cutlass.range_constexpr(len(group)):
            (v, j), total = group[i], Float32(0.0)
            owner = 4 * (SHARING_LANES // len(group)) * i + lane % 4
            base = cute.arch.shuffle_sync(own_base, owner)
            for half, m_block in self.places:
                total += exp2(consumer.acc[(v, half, j), m_block, 0] * LOG2_E - base)
            sums.append(total)
        return own_reduction(sums, lane, operator.add)

    @cute.jit
    def write_partials(
        self,
        consumer: Consumer,
        sums: Any,
        rows: Rows,
        token_start: Int32,
        partial: Int32,
        scheduler: TileScheduler,
    ) -> None:
        """Combine a warpgroup's maxima and sums and write those of its tokens, relative to ρ.

        `sums` are (row_max, row_sum, shared memory for those of all warps).
        """
        row_max, row_sum, statistics = sums
        lane, warp = consumer.thread % 32, consumer.thread // 32
        own = statistics[None, None, None, consumer.warp_group_idx]
        self.meet_warp_group(consumer)  # the previous ones have been read
        for number in cutlass.range_constexpr(len(self.groups)):
            # lanes that have the same token write the same
            place = lane // 4 // (SHARING_LANES // len(self.groups[number]))
            token = SHARING_LANES * 4 * number + place // 2 * 8 + place % 2 + lane % 4 * 2
            own[0, token, warp] = row_max[number]
            own[1, token, warp] = row_sum[number]
        self.meet_warp_group(consumer)
        for i in cutlass.range(consumer.thread, self.tile[1], WARP_GROUP_THREADS, unroll=1):
            row = token_start + i
            if row < scheduler.rows:
                largest = own[0, i, 0]
                for of_warp in cutlass.range_constexpr(1, WARPS):
                    largest = cute.arch.fmax(largest, own[0, i, of_warp])
                base, total = finite(largest), Float32(0.0)
                for of_warp in cutlass.range_constexpr(WARPS):
                    total += own[1, i, of_warp] * exp2(own[0, i, of_warp] - base)
                distance = largest - rows.reference[row] * LOG2_E
                total = bounded_sum(total, MAX_TILE_SUM)
                logarithm = cute.math.log2(total, fastmath=True)
                rows.sums[row, partial] = distance + logarithm

    @cute.jit
    def meet_warp_group(self, consumer: Consumer) -> None:
        """Wait for all warps of the warpgroup."""
        cute.arch.barrier(
            barrier_id=NamedBarrier.WARP_GROUP0 + consumer.warp_group_idx,
            number_of_threads=WARP_GROUP_THREADS,
        )

    @cute.jit
    def store_exps(self, logits: LogitTile, e: Any) -> None:
        """Store the tile's exponentials, 16 columns of some tokens a warp at a time."""
        consumer, rows, column_start, token_start, scheduler = logits
        count = self.epilogue.tokens
        for m_block in cutlass.range_constexpr(self.m_blocks):
            first = column_start + m_block * 64 * self.m_halves
            for part in cutlass.range_constexpr(self.tile[1] // count):
                values = cute.make_rmem_tensor((2, 2, count // 8), Float32)
                for j in cutlass.range_constexpr(count // 8):
                    for v in cutlass.range_constexpr(2):
                        acc_j = part * (count // 8) + j
                        row = self.token(consumer, token_start, v, acc_j)
                        base = Float32.inf
                        if row < scheduler.rows:
                            base = rows.reference[row] * LOG2_E
                        for half in cutlass.range_constexpr(2):
                            z = consumer.acc[(v, half, acc_j), m_block, 0]
                            values[v, half, j] = exp2(z * LOG2_E - base)
                coord = token_start // count + part, first
                self.epilogue.store(values, consumer.thread, consumer.warp_group_idx, e, coord)


@cute.jit
def own_reduction(values: list[Any], lane: Int32, combine: Any) -> Any:
    """Return the sum or maximum over the lanes that share tokens of the lane's own one of 8 values.

    Of 4 values, two lanes own each.  Every value is combined in the same order, so that it does not
    matter whose it is.
    """
    for offset in (16, 8, 4):
        if cutlass.const_expr(len(values) > 1):
            kept, sent = halves(values, (lane & offset) != 0)
        else:
            kept = sent = values
        values = [
            combine(of_lane, cute.arch.shuffle_sync_bfly(other, offset=offset))
            for of_lane, other in zip(kept, sent, strict=True)
        ]
    return values[0]


def halves(values: list[Any], upper: Any) -> tuple[list[Any], list[Any]]:
    """Return the upper half of `values` and the lower one if `upper`, else the other way round."""
    middle = len(values) // 2
    pairs = list(zip(values[:middle], values[middle:], strict=True))
    kept = [Float32(cutlass.select_(upper, high, low)) for low, high in pairs]
    sent = [Float32(cutlass.select_(upper, low, high)) for low, high in pairs]
    return kept, sent
