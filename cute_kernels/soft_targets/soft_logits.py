"""Logits h_i · w_v of the soft targets v of each token.

`project_exp` computes them in warps that would be idle, where these have registers for it, and no
launch of this kernel's is needed.
"""

from typing import Any, NamedTuple

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
    """Compute the logits of a token a block, some classes a warp."""
    pdl_wait()
    row = cute.arch.block_idx()[0]
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    source = Int64(row)
    if selects != 0:
        source = order[row]
    write_logits((h, source), (w, Int32(0)), classes, row, (warp, WARPS))


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
