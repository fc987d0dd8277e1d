"""TODO."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.memory import SmemAllocator

from cutefce.cute_kernels.common.dsl import (
    EARLY,
    LN_2,
    LOG2_E,
    await_previous,
    exp2,
)
from cutefce.cute_kernels.common.row_vectors import WARPS
from cutefce.cute_kernels.problem import SLACK
from cutefce.cute_kernels.workspace import Semaphore, Stat


class Finish:
    """Join the parts of every row, and reduce the losses."""

    def __init__(self, rows: int) -> None:
        self.rows = rows

    @cute.jit
    def __call__(
        self,
        parts: cute.Tensor,
        logit: cute.Tensor,
        target: cute.Tensor,
        stats: cute.Tensor,
        reduced: cute.Tensor,
        notes: cute.Tensor,
        ignored: Int64,
        mean: Int32,
        stream: Any,
    ) -> None:
        """Write ρ, S, T and the loss to stats (4, N), of parts (N, P) and r (N,).

        ρ is r, unless a part lies beyond the slack: then ρ is about the largest part, and the row
        block is noted.  Losses of rows with r = +inf are 0.  `reduced` () receives their sum, or
        the mean over the targets that are not `ignored`.

        notes (2 + row blocks,) are described in `dsl`.
        """
        blocks = (logit.shape[0] + WARPS - 1) // WARPS
        self.kernel(parts, logit, target, stats, reduced, notes, ignored, mean).launch(
            grid=[blocks, 1, 1], block=[32 * WARPS, 1, 1], stream=stream, **EARLY
        )

    @cute.kernel
    def kernel(
        self,
        parts: cute.Tensor,
        logit: cute.Tensor,
        target: cute.Tensor,
        stats: cute.Tensor,
        reduced: cute.Tensor,
        notes: cute.Tensor,
        ignored: Int64,
        mean: Int32,
    ) -> None:
        """Join one row a warp; the block that finishes last adds all losses."""
        await_previous()
        thread = cute.arch.thread_idx()[0]
        smem = SmemAllocator()
        shared = smem.allocate_tensor(Float32, cute.make_layout(2 * WARPS), 16)
        ticket = smem.allocate_tensor(Int32, cute.make_layout(1), 4)
        row = cute.arch.block_idx()[0] * WARPS + cute.arch.warp_idx()
        if row < logit.shape[0]:
            self.join(parts, logit, stats, notes, row)
        others = cute.arch.grid_dim()[0] - 1
        if others > 0:  # for a few rows the round trips to memory would take longer than the rest
            cute.arch.fence_acq_rel_gpu()
        cute.arch.sync_threads()
        if thread == 0:
            ticket[0] = Int32(0)
            if others > 0:
                ticket[0] = cute.arch.atomic_add(
                    notes.iterator + Semaphore.DONE_COUNTER, Int32(1), sem="acq_rel", scope="gpu"
                )
        cute.arch.sync_threads()
        if ticket[0] == others:
            self.reduce(stats, target, reduced, shared, ignored, mean)

    @cute.jit
    def join(
        self,
        parts: cute.Tensor,
        logit: cute.Tensor,
        stats: cute.Tensor,
        notes: cute.Tensor,
        row: Int32,
    ) -> None:
        """Join the parts of one row."""
        lane = cute.arch.lane_idx()
        largest = -Float32.inf
        for part in cutlass.range(lane, parts.shape[1], 32, unroll=4):
            largest = cute.arch.fmax(largest, parts[row, part])
        largest = cute.arch.warp_reduction_max(largest)
        own = logit[row]
        reference = own
        if largest > SLACK * LOG2_E:
            reference = own + largest * LN_2
            if lane == 0:
                notes[Semaphore.REPAIR_FLAGS + row // self.rows] = Int32(1)
        # what the rounded reference is above the target's logit; not inf - inf
        distance = Float32(0.0)
        if reference != own:
            distance = reference - own
        shift = distance * LOG2_E
        total = Float32(0.0)
        for part in cutlass.range(lane, parts.shape[1], 32, unroll=4):
            total += exp2(parts[row, part] - shift)
        total = cute.arch.warp_reduction_sum(total)
        if lane == 0:
            stats[Stat.REFERENCE, row] = reference
            stats[Stat.SUM_EXP_OTHERS, row] = total
            stats[Stat.SUM_EXP, row] = total + exp2(-shift)
            # exp(r - ρ) - 1 is exactly 0 where the target's logit is the reference
            excess = total
            if distance != 0.0:
                excess = total + (exp2(-shift) - 1.0)
            stats[Stat.LOSS, row] = distance + log1p(excess)

    @cute.jit
    def reduce(
        self,
        stats: cute.Tensor,
        target: cute.Tensor,
        reduced: cute.Tensor,
        shared: cute.Tensor,
        ignored: Int64,
        mean: Int32,
    ) -> None:
        """Add all losses, in an order that is always the same."""
        thread, warp = cute.arch.thread_idx()[0], cute.arch.warp_idx()
        total, count = Float32(0.0), Float32(0.0)
        for row in cutlass.range(thread, target.shape[0], 32 * WARPS, unroll=8):
            total += stats[Stat.LOSS, row]
            if target[row] != ignored:
                count += 1.0
        total = cute.arch.warp_reduction_sum(total)
        count = cute.arch.warp_reduction_sum(count)
        if cute.arch.lane_idx() == 0:
            shared[warp] = total
            shared[WARPS + warp] = count
        cute.arch.sync_threads()
        if thread == 0:
            total, count = Float32(0.0), Float32(0.0)
            for other in cutlass.range_constexpr(WARPS):
                total += shared[other]
                count += shared[WARPS + other]
            if mean != 0:
                total = total / cute.arch.fmax(count, Float32(1.0))
            reduced[()] = total


@cute.jit
def log1p(x: Float32) -> Float32:
    """Return log(1 + x): 2·atanh(x / (2 + x)) by its series where 1 + x would round x away."""
    result = Float32(0.0)
    if cute.arch.fmax(x, -x) < 0.5:
        u = x / (2.0 + x)
        square = u * u
        series = Float32(1.0 / 13.0)
        for odd in cutlass.range_constexpr(11, 0, -2):
            series = series * square + 1.0 / odd
        result = 2.0 * u * series
    else:
        result = cute.math.log2(1.0 + x) * LN_2
    return result
