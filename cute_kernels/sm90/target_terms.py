"""The targets' terms of dW, Σ_{i: y_i = v} c_i h_i, in the epilogue of its GEMM."""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from cutefce.cute_kernels.integers import ceil_div
from cutefce.cute_kernels.schedule.scheduler import TileScheduler
from cutefce.cute_kernels.sm90.mainloop import Consumer, MainloopSm90

MANY = 8
"""Tokens of a row that a warp adds together: as many as it has quads."""
GROUPS = 8
"""Groups of 8 columns whose sums a thread holds beside its accumulators."""
MAX_ROW_BLOCKS = 2
"""Blocks of 64 rows of tiles beside whose accumulators it can: of taller ones they are spilled."""


class TargetCsr(NamedTuple):
    """Tokens sorted by target, in compressed sparse rows, and their terms of dW."""

    order: cute.Tensor
    """(N,) int64: tokens by target; (0,) if no target has terms."""
    offsets: cute.Tensor
    """(V + 1,) int32: start of each target's tokens in `order`."""
    coef: cute.Tensor
    """(N,) float32: c in that order."""
    h: cute.Tensor
    """(N, D)"""
    grad_scale: cute.Tensor | None
    """(1,) float32: factor of the whole result; None of packed sums."""


@cute.jit
def target_ranges(
    gemm: MainloopSm90,
    consumer: Consumer,
    targets: TargetCsr,
    m_start: Int32,
    scheduler: TileScheduler,
) -> Any:
    """Return where the tokens begin and end whose targets are a lane's rows of the tile.

    Each row of a warp has one lane, and a lane one of every 32 rows.  Before the MMAs, which hide
    the latency, this is one read of the offsets; behind them a warp without tokens does nothing.
    """
    ranges = cute.make_rmem_tensor((2, ceil_div(gemm.m_blocks, 2)), Int32)
    warp, lane = consumer.thread // 32, consumer.thread % 32
    for i in cutlass.range_constexpr(ceil_div(gemm.m_blocks, 2)):
        m_block = 2 * i + lane // 16
        row = m_start + m_block * (64 * gemm.m_halves) + warp * 16 + lane % 16
        ranges[0, i], ranges[1, i] = Int32(0), Int32(0)
        is_listed = targets.order.shape[0] > 0 and row < scheduler.rows
        if m_block < gemm.m_blocks and is_listed:
            ranges[0, i], ranges[1, i] = targets.offsets[row], targets.offsets[row + 1]
    return ranges


@cute.jit
def add_targets(
    gemm: MainloopSm90,
    consumer: Consumer,
    targets: TargetCsr,
    ranges: Any,
    n_start: Int32,
    scheduler: TileScheduler,
) -> None:
    """Add the terms of the tokens in `target_ranges`, and multiply by `grad_scale` if it is given.

    A quad adds few tokens of its row one after the other; a warp adds many, as frequent targets
    have them.
    """
    acc, lane = consumer.acc, consumer.thread % 32
    first, groups = n_start + consumer.tCcC[0][1], gemm.tile[1] // 8
    tokens = Int32(0)
    for i in cutlass.range_constexpr(ceil_div(gemm.m_blocks, 2)):
        tokens += ranges[1, i] - ranges[0, i]
    if cute.arch.vote_any_sync(tokens > 0):
        for m_block in cutlass.range_constexpr(gemm.m_blocks):
            for half in cutlass.range_constexpr(2):
                i, lanes = m_block // 2, 16 * (m_block % 2) + 8 * half
                begin = cute.arch.shuffle_sync(ranges[0, i], lanes + lane // 4)
                end = cute.arch.shuffle_sync(ranges[1, i], lanes + lane // 4)
                if cutlass.const_expr(gemm.m_blocks <= MAX_ROW_BLOCKS):
                    if end - begin >= MANY:
                        end = begin
                for slot in cutlass.range(begin, end, unroll=1):
                    row, factor = targets.h[targets.order[slot], None], targets.coef[slot]
                    for start in cutlass.range_constexpr(0, groups, GROUPS):
                        count = min(GROUPS, groups - start)
                        h = _pairs(row, first + 8 * start, scheduler.columns, count)
                        for k in cutlass.range_constexpr(2 * count):
                            coord = (k % 2, half, start + k // 2), m_block, 0
                            acc[coord] = acc[coord] + factor * h[k]
    if cutlass.const_expr(gemm.m_blocks <= MAX_ROW_BLOCKS):
        if cute.arch.vote_any_sync(tokens >= MANY):
            for row in cutlass.range(16 * gemm.m_blocks, unroll=1):
                begin = cute.arch.shuffle_sync(ranges[0, 0], row)
                end = cute.arch.shuffle_sync(ranges[1, 0], row)
                if end - begin >= MANY:
                    _add_many(
                        gemm, consumer, targets, (begin, end), (first, scheduler.columns), row
                    )
    if cutlass.const_expr(targets.grad_scale is not None):
        assert targets.grad_scale is not None
        grad_scale = targets.grad_scale[0]
        for m_block in cutlass.range_constexpr(gemm.m_blocks):
            for j in cutlass.range_constexpr(groups):
                for k in cutlass.range_constexpr(4):
                    coord = (k % 2, k // 2, j), m_block, 0
                    acc[coord] = acc[coord] * grad_scale


@cute.jit
def _add_many(
    gemm: MainloopSm90,
    consumer: Consumer,
    targets: TargetCsr,
    slots: tuple[Int32, Int32],
    columns: tuple[Int32, Int32],
    row: Int32,
) -> None:
    """Add the terms of many tokens to one `row` of a warp's: each quad sums every eighth token.

    `slots` are [begin, end) of its tokens, `columns` the thread's first one and those of h.
    """
    (begin, end), (first, total) = slots, columns
    lane, groups = consumer.thread % 32, gemm.tile[1] // 8
    for start in cutlass.range_constexpr(0, groups, GROUPS):
        count = min(GROUPS, groups - start)
        sums = cute.make_rmem_tensor((2 * count,), Float32)
        sums.fill(0.0)
        for slot in cutlass.range(begin + lane // 4, end, 8, unroll=1):
            h = _pairs(targets.h[targets.order[slot], None], first + 8 * start, total, count)
            factor = targets.coef[slot]
            for k in cutlass.range_constexpr(2 * count):
                sums[k] = sums[k] + factor * h[k]
        for k in cutlass.range_constexpr(2 * count):
            for step in cutlass.range_constexpr(3):
                sums[k] = sums[k] + cute.arch.shuffle_sync_bfly(sums[k], offset=4 << step)
        for m_block in cutlass.range_constexpr(gemm.m_blocks):
            for half in cutlass.range_constexpr(2):
                if row == 16 * m_block + 8 * half + lane // 4:
                    for k in cutlass.range_constexpr(2 * count):
                        coord = (k % 2, half, start + k // 2), m_block, 0
                        consumer.acc[coord] = consumer.acc[coord] + sums[k]


@cute.jit
def _pairs(row: cute.Tensor, first: Int32, columns: Int32, count: int) -> Any:
    """Return `count` pairs of float32 elements of `row` (D,), at `first` and every 8th column on.

    Those behind its `columns` are 0; all of these are even.
    """
    words, pairs = cute.recast_tensor(row, Int32), cute.make_rmem_tensor((count,), Int32)
    pairs.fill(0)
    place, limit = first // 2, columns - first
    for j in cutlass.range_constexpr(count):
        if 8 * j < limit:
            pairs[j] = words[place + 4 * j]
    return cute.recast_tensor(pairs, row.element_type).load().to(Float32)
