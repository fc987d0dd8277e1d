"""Logits h_i · w_v of the soft targets v of each token."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from cutefce.cute_kernels.common.dsl import DTYPES, matrix, pdl_wait, vector
from cutefce.cute_kernels.common.launch import WARPS, Signature, blocks_of, row_launch
from cutefce.cute_kernels.common.row_vectors import (
    clamped,
    load_fp32,
    mapped,
    row_vectors,
    widened,
)
from cutefce.cute_kernels.spec import rowwise as spec

CLASSES = 4
"""Classes of a warp at a time: they share the loads of the hidden states."""


def compile_signature(kernel: spec.SoftLogitsSpec) -> Signature:
    """Return the host function of `kernel` and the arguments to compile it for."""
    dtype, hidden, rows = DTYPES[kernel.dtype], cute.sym_int(divisibility=8), cute.sym_int()
    classes = cute.sym_int()
    return row_launch(
        soft_logits_kernel,
        blocks_of("order"),
        h=matrix(dtype, cute.sym_int(), hidden),
        w=matrix(dtype, cute.sym_int(), hidden),
        index=matrix(Int64, rows, classes, aligned=False),
        coefficient=matrix(Float32, rows, classes, aligned=False),
        logits=matrix(Float32, rows, classes, aligned=False),
        order=vector(Int64, rows),
        selects=Int32(0),
    )


@cute.kernel
def soft_logits_kernel(operands: Any) -> None:
    """Write the raw `logits` (N, K) of the classes `index` (N, K), rows of w.

    Those without a `coefficient` (N, K) are left out.  A token has a block, and a warp `CLASSES`
    at a time.  If `selects`, the hidden states of token i are row `order`_i of h.
    """
    h, w, index, coefficient, logits, order, selects = operands
    pdl_wait()
    row, lane = cute.arch.block_idx()[0], cute.arch.lane_idx()
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    states = row_vectors(h, mapped(row, order, selects))
    count, vectors = index.shape[1], h.shape[1] // 8
    for begin in cutlass.range(warp * CLASSES, count, WARPS * CLASSES, unroll=1):
        counts, rows_w = Int32(0), []
        for c in cutlass.range_constexpr(CLASSES):
            place = cutlass.min(begin + c, count - 1)
            counts |= Int32(coefficient[row, place] != 0.0)
            rows_w.append(row_vectors(w, clamped(index[row, place], w)))
        if counts != 0:
            acc = cute.make_rmem_tensor((CLASSES,), Float32)
            acc.fill(0.0)
            for i in cutlass.range(lane, vectors, 32, unroll=1):
                raw = cute.make_rmem_tensor((8, CLASSES), w.element_type)
                for c in cutlass.range_constexpr(CLASSES):
                    cute.autovec_copy(rows_w[c][None, i], raw[None, c])
                x = load_fp32(states, i)
                for c in cutlass.range_constexpr(CLASSES):
                    y, total = widened(raw[None, c]), acc[c]
                    for j in cutlass.range_constexpr(8):
                        total += x[j] * y[j]
                    acc[c] = total
            for c in cutlass.range_constexpr(CLASSES):
                total = cute.arch.warp_reduction_sum(acc[c])
                if lane == 0 and begin + c < count:
                    is_class = coefficient[row, begin + c] != 0.0
                    if is_class:
                        logits[row, begin + c] = total
