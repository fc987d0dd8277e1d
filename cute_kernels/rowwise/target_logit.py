"""Target logits h_i · w_y, and products with a class row; zeroes semaphores of later kernels.

Of few tokens, `project_exp` waits for this kernel.  So several warps share a long row, as many as
D says: sums of a row do not depend on the number of tokens.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.memory import SmemAllocator

from cutefce.cute_kernels import spec
from cutefce.cute_kernels.common.dsl import (
    DTYPES,
    USE_PDL,
    current_stream,
    matrix,
    pdl_wait,
    vector,
)
from cutefce.cute_kernels.common.logit_transform import (
    AnyTransform,
    transform_any_logit,
)
from cutefce.cute_kernels.common.row_vectors import WARPS, load_fp32, row_vectors
from cutefce.cute_kernels.problem import LOWEST_LOGIT


def compile_signature(kernel: spec.TargetLogitSpec) -> tuple[Any, tuple[Any, ...]]:
    """Return the host function of `kernel` and the arguments to compile it for."""
    dtype, rows, hidden = DTYPES[kernel.dtype], cute.sym_int(), cute.sym_int(divisibility=8)
    vocab = cute.sym_int()
    h, w = matrix(dtype, cute.sym_int(), hidden), matrix(dtype, vocab, hidden)
    vectors = vector(Int64, rows), vector(Float32, rows), vector(Int32, cute.sym_int())
    transform = None
    if kernel.transforms:
        operands = vector(Float32, cute.sym_int()), vector(Float32, cute.sym_int()), Float32(0.0)
        transform = AnyTransform(*operands, Int32(0), Int32(0))
    order, class_row = vector(Int64, rows), None
    if kernel.class_row:
        class_row = ClassRow(vector(Float32, hidden, aligned=True), vector(Float32, rows))
    more = order, Int64(0), Int32(0), class_row, current_stream()
    return TargetLogit(), (h, w, *vectors, transform, *more)


VECTORS = 4
"""Vectors of 8 elements of a lane's share of a row, if a block has warps enough: all are loaded at
once."""


class ClassRow(NamedTuple):
    """A launch argument."""

    row: cute.Tensor
    """(D,) float32"""
    products: cute.Tensor
    """(N,) float32: receives h_i · row, 0 where the target is ignored."""


class TargetLogit:
    """The kernel and its launch."""

    @cute.jit
    def __call__(
        self,
        h: cute.Tensor,
        w: cute.Tensor,
        target: cute.Tensor,
        logit: cute.Tensor,
        zeros: cute.Tensor,
        transform: AnyTransform | None,
        order: cute.Tensor,
        ignored: Int64,
        selects: Int32,
        class_row: ClassRow | None,
        stream: Any,
    ) -> None:
        """Write logit (N,): +inf where target (N,) is `ignored`, and nowhere else.

        It is NaN for targets outside [0, V) and logits of +inf, `LOWEST_LOGIT` or more for others.
        Fills `zeros`, int32 of at most `TargetLogitSpec.max_zeros(N)` elements, with 0.  If
        `selects`, the hidden states of token i are row `order`_i of h.  `class_row` receives their
        products with a row, if given.  More than eight parameters: each is one argument that the
        host passes by position.
        """
        sharing = Int32(1)
        for _ in cutlass.range_constexpr(WARPS.bit_length() - 1):
            if 32 * VECTORS * sharing < h.shape[1] // 8:
                sharing *= 2
        blocks = (target.shape[0] * sharing + WARPS - 1) // WARPS
        rows, results = (order, selects, sharing), (logit, zeros)
        self.kernel(h, w, target, results, transform, rows, ignored, class_row).launch(
            grid=[blocks, 1, 1], block=[32 * WARPS, 1, 1], stream=stream, **USE_PDL
        )

    @cute.kernel
    def kernel(
        self,
        h: cute.Tensor,
        w: cute.Tensor,
        target: cute.Tensor,
        results: Any,
        transform: Any,
        rows: Any,
        ignored: Int64,
        class_row: Any,
    ) -> None:
        """Compute one row by `sharing` warps, and one zero by a thread.

        `results` are (logit, zeros), `rows` (order, selects, sharing).
        """
        (order, selects, sharing), (logit, zeros) = rows, results
        sums = SmemAllocator().allocate_tensor(Float32, cute.make_layout((WARPS, 2)), 16)
        pdl_wait()
        lane, warp = cute.arch.lane_idx(), cute.arch.warp_idx()
        thread = cute.arch.block_idx()[0] * 32 * WARPS + cute.arch.thread_idx()[0]
        if thread < zeros.shape[0]:
            zeros[thread] = Int32(0)
        row = (cute.arch.block_idx()[0] * WARPS + warp) // sharing
        index, source, vectors = ignored, Int64(0), h.shape[1] // 8
        if row < target.shape[0]:
            index, source = target[row], Int64(row)
            if selects != 0:
                source = order[row]
        if index == ignored:
            vectors = Int32(0)
        in_vocab = index >= 0 and index < w.shape[0]
        safe_index = Int64(0)
        if in_vocab:
            safe_index = index
        share = warp % sharing
        places, states = (32 * share + lane, vectors, 32 * sharing), row_vectors(h, source)
        z = dot(states, row_vectors(w, safe_index), places)
        if lane == 0:
            sums[warp, 0] = z
        if cutlass.const_expr(class_row is not None):
            product = dot(states, cute.zipped_divide(class_row.row, (8,)), places)
            if lane == 0:
                sums[warp, 1] = product
        cute.arch.sync_threads()
        if lane == 0 and share == 0 and row < target.shape[0]:
            z = total(sums[None, 0], warp, sharing)
            if cutlass.const_expr(transform is not None):
                z = transform_any_logit(z, transform, row, safe_index)
            if z < LOWEST_LOGIT:
                z = Float32(LOWEST_LOGIT)
            if not in_vocab or z == Float32.inf:
                z = Float32.nan
            if index == ignored:
                z = Float32.inf
            logit[row] = z
            if cutlass.const_expr(class_row is not None):
                class_row.products[row] = total(sums[None, 1], warp, sharing)


@cute.jit
def dot(a: cute.Tensor, b: cute.Tensor, places: Any) -> Float32:
    """Return Σ a·b over the warp's vectors, whose numbers are the range `places` (of its lanes)."""
    (first, end, step), result = places, Float32(0.0)
    for i in cutlass.range(first, end, step, unroll=VECTORS):
        x, y = load_fp32(a, i), load_fp32(b, i)
        for j in cutlass.range_constexpr(8):
            result += x[j] * y[j]
    return cute.arch.warp_reduction_sum(result)


@cute.jit
def total(sums: cute.Tensor, first: Int32, count: Int32) -> Float32:
    """Return the sum of `count` sums from `first` on."""
    result = Float32(0.0)
    for i in cutlass.range(first, first + count, unroll=1):
        result += sums[i]
    return result
