"""Partial sums to row statistics and the loss, with repair flags for far rows."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.memory import SmemAllocator

from cutefce.cute_kernels.common.dsl import LN_2, LOG2_E, exp2, matrix, pdl_wait, scalar, vector
from cutefce.cute_kernels.common.launch import WARPS, Signature, blocks_of, row_launch
from cutefce.cute_kernels.common.row_reductions import bounded_sum
from cutefce.cute_kernels.problem import GRADIENT_LOSS, LOWEST_LOGIT, SLACK
from cutefce.cute_kernels.spec import rowwise as spec
from cutefce.cute_kernels.workspace import NUM_STATS, Semaphore, Stat


def compile_signature(kernel: spec.ReducePartialsSpec) -> Signature:
    """Return the host function of `kernel` and the arguments to compile it for."""
    rows = cute.sym_int()
    return row_launch(
        ReducePartials(kernel).kernel,
        blocks_of("logit", WARPS),
        partials=matrix(Float32, rows, cute.sym_int(), aligned=False),
        logit=vector(Float32, rows),
        target=vector(Int64, rows),
        stats=matrix(Float32, NUM_STATS, rows, aligned=False),
        reduced=scalar(Float32),
        semaphores=vector(Int32, cute.sym_int()),
        ignored=Int64(0),
        mean=Int32(0),
    )


class ReducePartials:
    """The kernel."""

    def __init__(self, kernel: spec.ReducePartialsSpec) -> None:
        self.rows = kernel.rows

    @cute.kernel
    def kernel(self, operands: Any) -> None:
        """Write stats (NUM_STATS, N) from partials (N, P), log2 sums relative to logit r (N,).

        ρ is r, unless a partial exceeds the slack: then ρ is about the largest partial, and the row
        block is flagged for repair.  The loss is 0 where target (N,) is `ignored`, whatever the
        sums; T is NaN unless the loss is below `GRADIENT_LOSS`.  `reduced` () receives the sum of
        losses, or their mean over the targets that are not `ignored`.

        semaphores are laid out as in `workspace.Semaphore`.  A warp reduces a row; the last block
        to finish reduces the losses.
        """
        partials, logit, target, stats, reduced, semaphores, ignored, mean = operands
        pdl_wait()
        thread = cute.arch.thread_idx()[0]
        smem = SmemAllocator()
        sums = smem.allocate_tensor(Float32, cute.make_layout(2 * WARPS), 16)
        ticket = smem.allocate_tensor(Int32, cute.make_layout(1), 4)
        row = cute.arch.block_idx()[0] * WARPS + cute.arch.warp_idx()
        if row < logit.shape[0]:
            count = partials.shape[1]
            if target[row] == ignored:
                count = Int32(0)  # sums of an ignored row may be NaN
            self.reduce_row(partials, count, logit, stats, semaphores, row)
        others = cute.arch.grid_dim()[0] - 1
        if others > 0:  # a single block saves the round trips to memory
            cute.arch.fence_acq_rel_gpu()
        cute.arch.sync_threads()
        if thread == 0:
            ticket[0] = Int32(0)
            if others > 0:
                ticket[0] = cute.arch.atomic_add(
                    semaphores.iterator + Semaphore.DONE_COUNTER,
                    Int32(1),
                    sem="acq_rel",
                    scope="gpu",
                )
        cute.arch.sync_threads()
        if ticket[0] == others:
            self.reduce_losses(stats, target, (reduced, sums), ignored, mean)

    @cute.jit
    def reduce_row(
        self,
        partials: cute.Tensor,
        count: Int32,
        logit: cute.Tensor,
        stats: cute.Tensor,
        semaphores: cute.Tensor,
        row: Int32,
    ) -> None:
        """Reduce the first `count` partials of one row."""
        lane = cute.arch.lane_idx()
        largest = -Float32.inf
        for i in cutlass.range(lane, count, 32, unroll=4):
            largest = cute.arch.fmax(largest, partials[row, i])
        largest = cute.arch.warp_reduction_max(largest)
        target_logit = logit[row]
        reference = target_logit
        if largest > SLACK * LOG2_E:
            reference = target_logit + largest * LN_2
            if lane == 0:
                semaphores[Semaphore.REPAIR_FLAGS + row // self.rows] = Int32(1)
                semaphores[Semaphore.REPAIR_ROWS] = Int32(logit.shape[0])
        # distance of the rounded reference above the target's logit
        distance = Float32(0.0)
        if reference != target_logit:
            distance = reference - target_logit
        shift = distance * LOG2_E
        row_sum = Float32(0.0)
        for i in cutlass.range(lane, count, 32, unroll=4):
            row_sum += exp2(partials[row, i] - shift)
        row_sum = cute.arch.warp_reduction_sum(row_sum)
        if lane == 0:
            stats[Stat.REFERENCE, row] = reference
            stats[Stat.SUM_EXP_OTHERS, row] = row_sum
            # exp(r - ρ) - 1 is exactly 0 where the target's logit is the reference
            excess = row_sum
            if distance != 0.0:
                excess = bounded_sum(row_sum) + (exp2(-shift) - 1.0)
            loss = distance + log1p(excess)
            if target_logit == LOWEST_LOGIT:
                loss = loss * Float32.inf  # NaN where no logit is higher
            stats[Stat.LOSS, row] = loss
            total = Float32.nan
            if loss < GRADIENT_LOSS:
                total = row_sum + exp2(-shift)
            stats[Stat.SUM_EXP, row] = total

    @cute.jit
    def reduce_losses(
        self,
        stats: cute.Tensor,
        target: cute.Tensor,
        results: Any,
        ignored: Int64,
        mean: Int32,
    ) -> None:
        """Add all losses in a fixed order; `results` are (reduced, sums of warps)."""
        reduced, sums = results
        thread, warp = cute.arch.thread_idx()[0], cute.arch.warp_idx()
        total, count = Float32(0.0), Float32(0.0)
        for row in cutlass.range(thread, target.shape[0], 32 * WARPS, unroll=8):
            total += stats[Stat.LOSS, row]
            if target[row] != ignored:
                count += 1.0
        total = cute.arch.warp_reduction_sum(total)
        count = cute.arch.warp_reduction_sum(count)
        if cute.arch.lane_idx() == 0:
            sums[warp] = total
            sums[WARPS + warp] = count
        cute.arch.sync_threads()
        if thread == 0:
            total, count = Float32(0.0), Float32(0.0)
            for i in cutlass.range_constexpr(WARPS):
                total += sums[i]
                count += sums[WARPS + i]
            if mean != 0:
                total = total / cute.arch.fmax(count, Float32(1.0))
            reduced[()] = total


@cute.jit
def log1p(x: Float32) -> Float32:
    """Return log(1 + x), for small x by the series of 2·atanh(x / (2 + x))."""
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
