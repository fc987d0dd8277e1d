"""Thresholds, hashes and counters of the rows to sample, from an estimate of their log-sum-exp."""

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
from cutefce.cute_kernels.common.sampling import HASH_BITS, ROW_FACTOR, mix

THREADS = 128


def compile_signature(_: spec.PrepareSamplesSpec) -> tuple[Any, tuple[Any, ...]]:
    """Return the host function and the arguments to compile it for."""
    rows = cute.sym_int()
    partials = matrix(Float32, rows, cute.sym_int(), aligned=False)
    given = partials, vector(Float32, rows), vector(Int64, rows), vector(Int32, 2)
    results = vector(Float32, rows), vector(Int32, rows), vector(Int32, rows)
    numbers = Float32(0.0), Float32(0.0), Int32(0)
    return prepare_samples, (*given, *results, *numbers, current_stream())


@cute.jit
def prepare_samples(
    partials: cute.Tensor,
    reference: cute.Tensor,
    order: cute.Tensor,
    seed: cute.Tensor,
    threshold: cute.Tensor,
    row_hash: cute.Tensor,
    counts: cute.Tensor,
    log2_ratio: Float32,
    log2_samples: Float32,
    selects: Int32,
    stream: Any,
) -> None:
    """Write threshold, row_hash and zero counts (N,), see `common.sampling.Samples`.

    `partials` (N, P) are log2 sums of exponentials over drawn columns, relative to the target's
    logit `reference` (N,); 2^log2_ratio is the number of columns over that of drawn ones.  With
    `selects`, row i is token `order`_i of the call.  More than eight parameters: each is one
    argument that the host passes by position.
    """
    blocks = (reference.shape[0] + THREADS - 1) // THREADS
    results, numbers = (threshold, row_hash, counts), (log2_ratio, log2_samples, selects)
    prepare_samples_kernel(partials, reference, order, seed, results, numbers).launch(
        grid=[blocks, 1, 1], block=[THREADS, 1, 1], stream=stream, **USE_PDL
    )


@cute.kernel
def prepare_samples_kernel(
    partials: cute.Tensor,
    reference: cute.Tensor,
    order: cute.Tensor,
    seed: cute.Tensor,
    results: Any,
    numbers: Any,
) -> None:
    """Prepare one row a thread."""
    (threshold, row_hash, counts), (log2_ratio, log2_samples, selects) = results, numbers
    pdl_wait()
    row = cute.arch.block_idx()[0] * THREADS + cute.arch.thread_idx()[0]
    if row < reference.shape[0]:
        token = Int64(row)
        if selects != 0:
            token = order[row]
        largest = Float32(0.0)  # the target's own exponential
        for i in cutlass.range(partials.shape[1], unroll=4):
            largest = cute.arch.fmax(largest, partials[row, i] + log2_ratio)
        total = exp2(-largest)
        for i in cutlass.range(partials.shape[1], unroll=4):
            total += exp2(partials[row, i] + log2_ratio - finite(largest))
        target_logit = reference[row]
        estimate = target_logit * LOG2_E + largest + cute.math.log2(total, fastmath=True)
        result = estimate - log2_samples - HASH_BITS
        if target_logit == Float32.inf:
            result = Float32.inf  # ignored
        threshold[row] = result
        x = mix(Uint32(seed[0]) ^ (Uint32(Int32(token)) * Uint32(ROW_FACTOR)))
        row_hash[row] = Int32(x ^ Uint32(seed[1]))
        counts[row] = Int32(0)
