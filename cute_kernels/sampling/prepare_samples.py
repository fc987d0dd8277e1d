"""Thresholds, hashes and counters of the rows to sample.

Those of all rows come from an estimate of their log-sum-exp, which is made of sums over some
columns; those of rows that are sampled again from the log-sum-exp itself.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from cutefce.cute_kernels import spec
from cutefce.cute_kernels.common.dsl import (
    LOG2_E,
    USE_PDL,
    current_stream,
    exp2,
    matrix,
    pdl_wait,
    vector,
)
from cutefce.cute_kernels.common.row_reductions import finite
from cutefce.cute_kernels.common.sampling import final_threshold, mix
from cutefce.cute_kernels.spec.sampling import HASH_BITS, ROW_FACTOR

THREADS = 128
ROWS = THREADS // 32
"""Rows of a block whose lse are estimated, each by a warp."""


def compile_signature(kernel: spec.PrepareSamplesSpec) -> tuple[Any, tuple[Any, ...]]:
    """Return the host function of a step and the arguments to compile it for."""
    rows = cute.sym_int()
    reference, order = vector(Float32, rows), vector(Int64, rows)
    threshold, counts = vector(Float32, rows), vector(Int32, rows)
    if kernel.step == "estimate":
        partials = (matrix(Float32, rows, cute.sym_int(), aligned=False) for _ in range(2))
        vectors = reference, vector(Float32, rows)
        return estimate_lse, (*partials, *vectors, Float32(0.0), Int32(0), current_stream())
    if kernel.step == "first":
        results = threshold, vector(Int32, rows), counts
        own = *results, Float32(0.0), Int32(0), current_stream()
        return prepare_samples, (reference, order, vector(Int32, 2), *own)
    given = order, vector(Int32, 1), reference, vector(Float32, rows)
    results = threshold, counts, vector(Float32, rows)
    return prepare_again, (*given, *results, Float32(0.0), current_stream())


@cute.jit
def estimate_lse(
    partials: cute.Tensor,
    drawn: cute.Tensor,
    reference: cute.Tensor,
    estimate: cute.Tensor,
    log2_ratio: Float32,
    only_drawn: Int32,
    stream: Any,
) -> None:
    """Write the estimates of lse (N,): +inf for ignored rows.

    `partials` (N, P) and `drawn` (N, Q) are log2 sums of exponentials relative to the target's
    logit `reference` (N,), over columns that count once and over those that count 2^log2_ratio
    times; `only_drawn` leaves out the first.
    """
    blocks = (reference.shape[0] + ROWS - 1) // ROWS
    numbers = log2_ratio, only_drawn
    estimate_kernel(partials, drawn, reference, estimate, numbers).launch(
        grid=[blocks, 1, 1], block=[THREADS, 1, 1], stream=stream, **USE_PDL
    )


@cute.kernel
def estimate_kernel(
    partials: cute.Tensor,
    drawn: cute.Tensor,
    reference: cute.Tensor,
    estimate: cute.Tensor,
    numbers: Any,
) -> None:
    """Estimate the lse of one row a warp."""
    log2_ratio, only_drawn = numbers
    pdl_wait()
    lane = cute.arch.lane_idx()
    row = cute.arch.block_idx()[0] * ROWS + cute.arch.thread_idx()[0] // 32
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


@cute.jit
def prepare_samples(
    estimate: cute.Tensor,
    order: cute.Tensor,
    seed: cute.Tensor,
    threshold: cute.Tensor,
    row_hash: cute.Tensor,
    counts: cute.Tensor,
    log2_samples: Float32,
    selects: Int32,
    stream: Any,
) -> None:
    """Write threshold, row_hash and zero counts (N,), see `common.sampling.Samples`.

    `estimate` (N,) is of lse, +inf for no entries.  With `selects`, row i is token `order`_i of the
    call.  Each parameter is one argument that the host passes by position.
    """
    blocks = (estimate.shape[0] + THREADS - 1) // THREADS
    rows = estimate, order, threshold, row_hash, counts
    prepare_samples_kernel(rows, seed, log2_samples, selects).launch(
        grid=[blocks, 1, 1], block=[THREADS, 1, 1], stream=stream, **USE_PDL
    )


@cute.kernel
def prepare_samples_kernel(
    rows: Any, seed: cute.Tensor, log2_samples: Float32, selects: Int32
) -> None:
    """Prepare one row a thread."""
    estimate, order, threshold, row_hash, counts = rows
    pdl_wait()
    row = cute.arch.block_idx()[0] * THREADS + cute.arch.thread_idx()[0]
    if row < estimate.shape[0]:
        token = Int64(row)
        if selects != 0:
            token = order[row]
        threshold[row] = estimate[row] * LOG2_E - log2_samples - HASH_BITS
        x = mix(Uint32(seed[0]) ^ (Uint32(Int32(token)) * Uint32(ROW_FACTOR)))
        row_hash[row] = Int32(x ^ Uint32(seed[1]))
        counts[row] = Int32(0)


@cute.jit
def prepare_again(
    order: cute.Tensor,
    count: cute.Tensor,
    reference: cute.Tensor,
    sum_exp: cute.Tensor,
    threshold: cute.Tensor,
    counts: cute.Tensor,
    own_reference: cute.Tensor,
    log2_samples: Float32,
    stream: Any,
) -> None:
    """Write what the rows `order`_i (N,), i < `count` (1,), are sampled with again.

    Their `threshold` (N,) becomes the final one of lse = ρ + log `sum_exp`, their `counts` (N,) 0.
    `own_reference` (N,) receives their `reference` ρ in this order, +inf beyond `count`.  Each
    parameter is one argument that the host passes by position.
    """
    blocks = (order.shape[0] + THREADS - 1) // THREADS
    rows = reference, sum_exp, threshold, counts, own_reference
    prepare_again_kernel(order, count, rows, log2_samples).launch(
        grid=[blocks, 1, 1], block=[THREADS, 1, 1], stream=stream, **USE_PDL
    )


@cute.kernel
def prepare_again_kernel(
    order: cute.Tensor, count: cute.Tensor, rows: Any, log2_samples: Float32
) -> None:
    """Prepare one row a thread."""
    reference, sum_exp, threshold, counts, own_reference = rows
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
