"""Classes of each token whose logits are computed: those of soft targets."""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from cutefce.cute_kernels.common.dsl import matrix
from cutefce.cute_kernels.common.row_vectors import clamped, load_fp32, row_vectors, widened

CLASSES = 4
"""Classes of a warp at a time: they share the loads of the hidden states."""


class SoftClasses(NamedTuple):
    """A launch argument: K classes of each token."""

    index: cute.Tensor
    """(N, K) int64 rows of w."""
    coefficient: cute.Tensor
    """(N, K) float32, 0 for what is no class."""
    logits: cute.Tensor
    """(N, K) float32: receives the raw logits of the classes; others are undefined."""


def classes_argument(rows: Any) -> SoftClasses:
    """Return what the classes of `rows` tokens are compiled for."""
    classes = cute.sym_int()
    given = (matrix(dtype, rows, classes, aligned=False) for dtype in (Int64, Float32, Float32))
    return SoftClasses(*given)


@cute.jit
def write_logits(hidden: Any, weight: Any, classes: SoftClasses, row: Int32, share: Any) -> None:
    """Write logits of the classes of token `row` that are rows of a window of the weight.

    `hidden` are (h, row of h); `weight` are (rows of the window, class of the first one).  The warp
    is number i of n that share a token's classes, `share`.
    """
    (h, source), (w, first), (warp, warps) = hidden, weight, share
    index, lane = classes.index, cute.arch.lane_idx()
    count, vectors, states = index.shape[1], h.shape[1] // 8, row_vectors(h, source)
    for begin in cutlass.range(warp * CLASSES, count, warps * CLASSES, unroll=1):
        counts, rows_w = Int32(0), []
        for c in cutlass.range_constexpr(CLASSES):
            place = cutlass.min(begin + c, count - 1)
            counts |= Int32(is_inside(classes, row, place, weight))
            rows_w.append(row_vectors(w, clamped(index[row, place] - first, w)))
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
                    write_logit(classes, row, begin + c, weight, total)


@cute.jit
def write_logit(
    classes: SoftClasses, row: Int32, place: Int32, weight: Any, logit: Float32
) -> None:
    """Write the logit of a class, if that is a row of the window `weight`."""
    if is_inside(classes, row, place, weight):
        classes.logits[row, place] = logit


@cute.jit
def is_inside(classes: SoftClasses, row: Int32, place: Int32, weight: Any) -> Any:
    """Return whether there is a class, and it is a row of the window `weight`."""
    w, first = weight
    column = classes.index[row, place] - first
    inside = column >= 0 and column < w.shape[0]
    return inside and classes.coefficient[row, place] != 0.0
