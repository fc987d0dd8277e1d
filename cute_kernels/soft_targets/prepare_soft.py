"""The soft targets of each token but its lead, ascending, with what they add to its loss.

A warp sorts a row's classes in shared memory, and adds the probabilities of equal ones by a scan of
fixed order.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.memory import SmemAllocator

from cutefce.cute_kernels.common.dsl import matrix, pdl_wait, vector
from cutefce.cute_kernels.common.launch import WARPS, Signature, blocks_of, row_launch
from cutefce.cute_kernels.common.sort import bitonic_sort
from cutefce.cute_kernels.spec import rowwise as spec
from cutefce.cute_kernels.workspace import LEAST_DERIVATIVE, NUM_SOFT_ROWS, SoftRow

MOST = spec.PrepareSoftSpec.MAX_CLASSES
"""Classes of a token at most."""
LEVELS = MOST.bit_length() - 1
"""Levels of a tree of all of them; bits of a key below its class, which are its place in the row.
"""
LAST = (1 << 63) - 1
"""The key of what has no entry, which is sorted to the end."""


def compile_signature(_: spec.PrepareSoftSpec) -> Signature:
    """Return the host function and the arguments to compile it for."""
    rows, classes = cute.sym_int(), cute.sym_int()
    return row_launch(
        prepare_soft_kernel,
        blocks_of("lead", WARPS),
        index=matrix(Int64, rows, classes, aligned=False),
        probs=matrix(Float32, rows, classes, aligned=False),
        lead=vector(Int64, rows),
        token=vector(Float32, rows),
        own_index=matrix(Int64, rows, classes, aligned=False),
        coefficient=matrix(Float32, rows, classes, aligned=False),
        sums=matrix(Float32, NUM_SOFT_ROWS, rows, aligned=False),
        factor=Float32(1.0),
        ignored=Int64(0),
        first=Int64(0),
        vocab=Int64(0),
    )


@cute.kernel
def prepare_soft_kernel(operands: Any) -> None:
    """Write `own_index` and `coefficient` b (N, K), and of `sums` (R, N) the rows of `SoftRow`.

    Of the classes `index` (N, K) with `probs` q (N, K), b are factor · token_i q_ik; 0 for the lead
    (N,) and for tokens with an `ignored` lead.  Those among the `vocab` classes from `first` on
    come first, ascending, and are counted from there.  The last of equal ones has their sum, the
    others 0.  What has no coefficient is class 0.  A warp has a row.
    """
    index, probs, lead, token, own_index, coefficient, sums, *numbers = operands
    factor, ignored, first, vocab = numbers
    smem = SmemAllocator()
    all_keys = smem.allocate_tensor(Int64, cute.make_layout((MOST, WARPS)), 16)
    all_b = smem.allocate_tensor(Float32, cute.make_layout((MOST, WARPS)), 16)
    all_totals = smem.allocate_tensor(Float32, cute.make_layout((MOST, WARPS)), 16)
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    keys, b, totals = all_keys[None, warp], all_b[None, warp], all_totals[None, warp]
    pdl_wait()
    row, lane = cute.arch.block_idx()[0] * WARPS + warp, cute.arch.lane_idx()
    if row < lead.shape[0]:
        classes, scale = index.shape[1], factor * token[row]
        if lead[row] == ignored:
            scale = Float32(0.0)
        padded = Int32(1)
        for level in cutlass.range_constexpr(LEVELS):
            if 1 << level < classes:
                padded = Int32(2 << level)
        of_lead, others, size = Float32(0.0), Float32(0.0), Float32(0.0)
        for k in cutlass.range(lane, padded, 32, unroll=1):
            key = Int64(LAST)
            if k < classes and scale != 0.0:
                column, value = index[row, k], probs[row, k] * scale
                b[k] = value
                if column == lead[row]:
                    of_lead += value
                else:
                    others += value
                    size += cute.arch.fmax(value, -value)
                    if value != 0.0 and column >= first and column < first + vocab:
                        key = (column - first) * MOST + k
            keys[k] = key
        of_lead, others = (
            cute.arch.warp_reduction_sum(of_lead),
            cute.arch.warp_reduction_sum(others),
        )
        size = cute.arch.warp_reduction_sum(size)
        if lane == 0:
            sums[SoftRow.LEAD, row], sums[SoftRow.OTHERS, row] = of_lead, others
            sums[SoftRow.ALL, row] = of_lead + others
            sums[SoftRow.LEAST, row] = size * LEAST_DERIVATIVE
        bitonic_sort(keys, padded // 2, MOST, (lane, 32))
        add_equal(keys, b, totals, classes, lane)
        for k in cutlass.range(lane, classes, 32, unroll=1):
            value, column, other = totals[k], Int64(0), keys[cutlass.min(k + 1, classes - 1)]
            if k + 1 < classes and keys[k] >> LEVELS == other >> LEVELS:
                value = Float32(0.0)
            if value != 0.0:
                column = keys[k] >> LEVELS
            own_index[row, k], coefficient[row, k] = column, value


@cute.jit
def add_equal(
    keys: cute.Tensor, b: cute.Tensor, totals: cute.Tensor, classes: Int32, lane: Int32
) -> None:
    """Write `totals` (MOST,) of the sorted keys: the sum of b of equal classes up to each."""
    equal = Int32(0)
    for k in cutlass.range(lane, classes, 32, unroll=1):
        value, other = Float32(0.0), keys[cutlass.max(k - 1, 0)]
        if keys[k] != LAST:
            value = b[Int32(keys[k] & (MOST - 1))]
            if k > 0 and keys[k] >> LEVELS == other >> LEVELS:
                equal = Int32(1)
        totals[k] = value
    equal = cute.arch.warp_reduction_sum(equal)
    cute.arch.sync_warp()
    if equal > 0:
        for level in cutlass.range_constexpr(LEVELS):
            step = 1 << level
            if step < classes:
                sums = cute.make_rmem_tensor((MOST // 32,), Float32)
                for j in cutlass.range_constexpr(MOST // 32):
                    k = lane + 32 * j
                    if k < classes:
                        other = cutlass.max(k - step, 0)
                        sums[j] = totals[k]
                        if k >= step and keys[k] >> LEVELS == keys[other] >> LEVELS:
                            sums[j] = sums[j] + totals[other]
                cute.arch.sync_warp()
                for j in cutlass.range_constexpr(MOST // 32):
                    k = lane + 32 * j
                    if k < classes:
                        totals[k] = sums[j]
                cute.arch.sync_warp()
