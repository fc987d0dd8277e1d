"""Thresholds, hashes and counters of the rows to sample.

Those of all rows come from an estimate of their log-sum-exp, which is made of sums over some
columns; those of rows that are sampled again from the log-sum-exp itself.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from cutefce.cute_kernels.common.dsl import LOG2_E, exp2, matrix, pdl_wait, vector
from cutefce.cute_kernels.common.launch import Signature, blocks_of, row_launch
from cutefce.cute_kernels.common.row_reductions import finite
from cutefce.cute_kernels.common.row_vectors import mapped
from cutefce.cute_kernels.common.sampling import final_threshold, mix
from cutefce.cute_kernels.spec import sampling as spec
from cutefce.cute_kernels.spec.sampling import HASH_BITS, ROW_FACTOR

WARPS = 4
THREADS = 32 * WARPS


def compile_signature(kernel: spec.PrepareSamplesSpec) -> Signature:
    """Return the host function of a step and the arguments to compile it for."""
    rows = cute.sym_int()
    if kernel.step == "estimate":
        return row_launch(
            estimate_kernel,
            blocks_of("reference", WARPS),
            warps=WARPS,
            partials=matrix(Float32, rows, cute.sym_int(), aligned=False),
            drawn=matrix(Float32, rows, cute.sym_int(), aligned=False),
            reference=vector(Float32, rows),
            estimate=vector(Float32, rows),
            log2_ratio=Float32(0.0),
            only_drawn=Int32(0),
        )
    if kernel.step == "first":
        return row_launch(
            prepare_kernel,
            blocks_of("estimate", THREADS),
            warps=WARPS,
            estimate=vector(Float32, rows),
            order=vector(Int64, rows),
            seed=vector(Int32, 2),
            threshold=vector(Float32, rows),
            row_hash=vector(Int32, rows),
            counts=vector(Int32, rows),
            log2_samples=Float32(0.0),
            selects=Int32(0),
        )
    return row_launch(
        prepare_again_kernel,
        blocks_of("order", THREADS),
        warps=WARPS,
        order=vector(Int64, rows),
        count=vector(Int32, 1),
        reference=vector(Float32, rows),
        sum_exp=vector(Float32, rows),
        threshold=vector(Float32, rows),
        counts=vector(Int32, rows),
        own_reference=vector(Float32, rows),
        log2_samples=Float32(0.0),
    )


@cute.kernel
def estimate_kernel(operands: Any) -> None:
    """Write the estimates of lse (N,): +inf for ignored rows; a warp has a row.

    `partials` (N, P) and `drawn` (N, Q) are log2 sums of exponentials relative to the target's
    logit `reference` (N,), over columns that count once and over those that count 2^log2_ratio
    times; `only_drawn` leaves out the first.
    """
    partials, drawn, reference, estimate, log2_ratio, only_drawn = operands
    pdl_wait()
    lane = cute.arch.lane_idx()
    row = cute.arch.block_idx()[0] * WARPS + cute.arch.thread_idx()[0] // 32
    if row < reference.shape[0]:
        count = partials.shape[1]
        if only_drawn != 0:
            count = Int32(0)
        largest = Float32(0.0)  # the target's own exponential
        for i in cutlass.range(lane, count, 32):
            largest = cute.arch.fmax(largest, partials[row, i])
        for i in cutlass.range(lane, drawn.shape[1], 32):
            largest = cute.arch.fmax(largest, drawn[row, i] + log2_ratio)
        largest = cute.arch.warp_reduction_max(largest)
        total = Float32(0.0)
        for i in cutlass.range(lane, count, 32):
            total += exp2(partials[row, i] - finite(largest))
        for i in cutlass.range(lane, drawn.shape[1], 32):
            total += exp2(drawn[row, i] + log2_ratio - finite(largest))
        total = cute.arch.warp_reduction_sum(total) + exp2(-largest)
        result = largest + cute.math.log2(total, fastmath=True)
        result = reference[row] + result * Float32(1.0 / LOG2_E)
        if reference[row] == Float32.inf:
            result = Float32.inf  # ignored
        if lane == 0:
            estimate[row] = result


@cute.kernel
def prepare_kernel(operands: Any) -> None:
    """Write threshold, row_hash and zero counts (N,), see `common.sampling.Samples`.

    `estimate` (N,) is of lse, +inf for no entries.  With `selects`, row i is token `order`_i of the
    call.  A thread has a row.
    """
    estimate, order, seed, threshold, row_hash, counts, log2_samples, selects = operands
    pdl_wait()
    row = cute.arch.block_idx()[0] * THREADS + cute.arch.thread_idx()[0]
    if row < estimate.shape[0]:
        token = mapped(row, order, selects)
        threshold[row] = estimate[row] * LOG2_E - log2_samples - HASH_BITS
        x = mix(Uint32(seed[0]) ^ (Uint32(Int32(token)) * Uint32(ROW_FACTOR)))
        row_hash[row] = Int32(x ^ Uint32(seed[1]))
        counts[row] = Int32(0)


@cute.kernel
def prepare_again_kernel(operands: Any) -> None:
    """Write what the rows `order`_i (N,), i < `count` (1,), are sampled with again.

    Their `threshold` (N,) becomes the final one of lse = ρ + log `sum_exp`, their `counts` (N,) 0.
    `own_reference` (N,) receives their `reference` ρ in this order, +inf beyond `count`.  A thread
    has a row.
    """
    order, count, reference, sum_exp, threshold, counts, own_reference, log2_samples = operands
    pdl_wait()
    index = cute.arch.block_idx()[0] * THREADS + cute.arch.thread_idx()[0]
    if index < order.shape[0]:
        own = Float32.inf
        if index < count[0]:
            row = order[index]
            own = reference[row]
            lse = own * LOG2_E + cute.math.log2(sum_exp[row], fastmath=True)
            threshold[row] = final_threshold(threshold[row], lse, log2_samples)
            counts[row] = Int32(0)
        own_reference[index] = own
