"""Logits h_i · w_v of the soft targets v of each token.

Where `project_exp` can, it writes those that it has in registers: see `sm90.soft_logits`.
"""

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
from cutefce.cute_kernels.common.row_vectors import (
    WARPS,
    clamped,
    load_fp32,
    row_vectors,
    widened,
)
from cutefce.cute_kernels.common.soft_classes import SoftClasses, classes_argument

CLASSES = 4
"""Classes of a warp at a time: they share the loads of the hidden states."""


def compile_signature(kernel: spec.SoftLogitsSpec) -> tuple[Any, tuple[Any, ...]]:
    """Return the host function of `kernel` and the arguments to compile it for."""
    dtype, hidden = DTYPES[kernel.dtype], cute.sym_int(divisibility=8)
    h, w = (matrix(dtype, cute.sym_int(), hidden) for _ in range(2))
    rows = cute.sym_int()
    order = vector(Int64, rows), Int32(0)
    return soft_logits, (h, w, classes_argument(rows), *order, current_stream())


@cute.jit
def soft_logits(
    h: cute.Tensor,
    w: cute.Tensor,
    classes: SoftClasses,
    order: cute.Tensor,
    selects: Int32,
    stream: Any,
) -> None:
    """Write the logits of `classes`.

    If `selects`, the hidden states of token i are row `order`_i of h.
    """
    soft_logits_kernel(h, w, classes, order, selects).launch(
        grid=[classes.logits.shape[0], 1, 1], block=[32 * WARPS, 1, 1], stream=stream, **USE_PDL
    )


@cute.kernel
def soft_logits_kernel(
    h: cute.Tensor, w: cute.Tensor, classes: SoftClasses, order: cute.Tensor, selects: Int32
) -> None:
    """Compute the logits of a token a block, `CLASSES` at a time a warp."""
    pdl_wait()
    row, lane = cute.arch.block_idx()[0], cute.arch.lane_idx()
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    source = Int64(row)
    if selects != 0:
        source = order[row]
    index, coefficient = classes.index, classes.coefficient
    count, vectors, states = index.shape[1], h.shape[1] // 8, row_vectors(h, source)
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
                    write_logit(classes, row, begin + c, total)


@cute.jit
def write_logit(classes: SoftClasses, row: Int32, place: Int32, logit: Float32) -> None:
    """Write the logit of a class, if there is one."""
    if classes.coefficient[row, place] != 0.0:
        classes.logits[row, place] = logit
