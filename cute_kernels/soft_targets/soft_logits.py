"""Logits h_i · w_v of the soft targets v of each token."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from cutefce.cute_kernels import spec
from cutefce.cute_kernels.common.dsl import (
    DTYPES,
    USE_PDL,
    current_stream,
    matrix,
    pdl_wait,
    vector,
)
from cutefce.cute_kernels.common.row_vectors import WARPS, clamped, load_fp32, row_vectors, widened

CLASSES = 4
"""Classes of a warp at a time: they share the loads of the hidden states."""


def compile_signature(kernel: spec.SoftLogitsSpec) -> tuple[Any, tuple[Any, ...]]:
    """Return the host function of `kernel` and the arguments to compile it for."""
    dtype, hidden = DTYPES[kernel.dtype], cute.sym_int(divisibility=8)
    rows, classes = cute.sym_int(), cute.sym_int()
    h, w = matrix(dtype, cute.sym_int(), hidden), matrix(dtype, cute.sym_int(), hidden)
    given = matrix(Int64, rows, classes, aligned=False), matrix(Float32, rows, classes, False)
    logits = matrix(Float32, rows, classes, aligned=False)
    return soft_logits, (logits, h, w, *given, vector(Int64, rows), Int32(0), current_stream())


@cute.jit
def soft_logits(
    logits: cute.Tensor,
    h: cute.Tensor,
    w: cute.Tensor,
    index: cute.Tensor,
    coefficient: cute.Tensor,
    order: cute.Tensor,
    selects: Int32,
    stream: Any,
) -> None:
    """Write logits (N, K) of the classes `index` (N, K), where the `coefficient` (N, K) is not 0.

    If `selects`, the hidden states of token i are row `order`_i of h.  Others are undefined.
    """
    soft_logits_kernel(logits, h, w, index, coefficient, order, selects).launch(
        grid=[logits.shape[0], 1, 1], block=[32 * WARPS, 1, 1], stream=stream, **USE_PDL
    )


@cute.kernel
def soft_logits_kernel(
    logits: cute.Tensor,
    h: cute.Tensor,
    w: cute.Tensor,
    index: cute.Tensor,
    coefficient: cute.Tensor,
    order: cute.Tensor,
    selects: Int32,
) -> None:
    """Compute the logits of a token a block, some classes a warp."""
    pdl_wait()
    row, lane = cute.arch.block_idx()[0], cute.arch.lane_idx()
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    source, classes, vectors = Int64(row), logits.shape[1], h.shape[1] // 8
    if selects != 0:
        source = order[row]
    hidden = row_vectors(h, source)
    for begin in cutlass.range(warp * CLASSES, classes, WARPS * CLASSES, unroll=1):
        counts = Int32(0)
        rows_w = []
        for c in cutlass.range_constexpr(CLASSES):
            place = cutlass.min(begin + c, classes - 1)
            if coefficient[row, place] != 0.0:
                counts = Int32(1)
            rows_w.append(row_vectors(w, clamped(index[row, place], w)))
        if counts != 0:
            acc = cute.make_rmem_tensor((CLASSES,), Float32)
            acc.fill(0.0)
            for i in cutlass.range(lane, vectors, 32, unroll=1):
                raw = cute.make_rmem_tensor((8, CLASSES), w.element_type)
                for c in cutlass.range_constexpr(CLASSES):
                    cute.autovec_copy(rows_w[c][None, i], raw[None, c])
                x = load_fp32(hidden, i)
                for c in cutlass.range_constexpr(CLASSES):
                    y, total = widened(raw[None, c]), acc[c]
                    for j in cutlass.range_constexpr(8):
                        total += x[j] * y[j]
                    acc[c] = total
            for c in cutlass.range_constexpr(CLASSES):
                total = cute.arch.warp_reduction_sum(acc[c])
                if lane == 0 and begin + c < classes:
                    logits[row, begin + c] = total
