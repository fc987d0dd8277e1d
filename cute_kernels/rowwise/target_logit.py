"""Target logits h_i · w_y, and products with a class row; zeroes semaphores of later kernels.

Of few tokens, `project_exp` waits for this kernel.  So several warps share a long row, as many as
D says: sums of a row do not depend on the number of tokens.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.memory import SmemAllocator

from cutefce.cute_kernels.common.dsl import DTYPES, matrix, pdl_wait, vector
from cutefce.cute_kernels.common.launch import WARPS, Signature, row_launch
from cutefce.cute_kernels.common.logit_transform import transform_argument, transform_logit
from cutefce.cute_kernels.common.row_vectors import load_fp32, mapped, row_vectors
from cutefce.cute_kernels.problem import LOWEST_LOGIT
from cutefce.cute_kernels.spec import rowwise as spec

VECTORS = 4
"""Vectors of 8 elements of a lane's share of a row, if a block has warps enough: all are loaded at
once."""


class ClassRow(NamedTuple):
    """A launch argument."""

    row: cute.Tensor
    """(D,) float32"""
    products: cute.Tensor
    """(N,) float32: receives h_i · row, 0 where the target is ignored."""


def compile_signature(kernel: spec.TargetLogitSpec) -> Signature:
    """Return the host function of `kernel` and the arguments to compile it for."""
    dtype, rows, hidden = DTYPES[kernel.dtype], cute.sym_int(), cute.sym_int(divisibility=8)
    vocab, class_row = cute.sym_int(), None
    if kernel.class_row:
        class_row = ClassRow(vector(Float32, hidden, aligned=True), vector(Float32, rows))
    return row_launch(
        target_logit_kernel,
        blocks_and_sharing,
        h=matrix(dtype, cute.sym_int(), hidden),
        w=matrix(dtype, vocab, hidden),
        target=vector(Int64, rows),
        logit=vector(Float32, rows),
        zeros=vector(Int32, cute.sym_int()),
        transform=transform_argument(kernel.transform, rows, vocab),
        order=vector(Int64, rows),
        ignored=Int64(0),
        selects=Int32(0),
        class_row=class_row,
    )


@cute.jit
def blocks_and_sharing(operands: Any) -> Any:
    """Return the thread blocks, and the warps that share a row."""
    sharing = Int32(1)
    for _ in cutlass.range_constexpr(WARPS.bit_length() - 1):
        if 32 * VECTORS * sharing < operands.h.shape[1] // 8:
            sharing *= 2
    return (operands.target.shape[0] * sharing + WARPS - 1) // WARPS, sharing


@cute.kernel
def target_logit_kernel(operands: Any, sharing: Int32) -> None:
    """Write logit (N,): +inf where target (N,) is `ignored`, and nowhere else.

    It is NaN for targets outside [0, V) and logits of +inf, `LOWEST_LOGIT` or more for others.
    Fills `zeros`, int32 of at most `TargetLogitSpec.max_zeros(N)` elements, with 0.  If `selects`,
    the hidden states of token i are row `order`_i of h.  `class_row` receives their products with a
    row, if given.  `sharing` warps compute a row, and a thread a zero.
    """
    h, w, target, logit, zeros, transform, order, ignored, selects, class_row = operands
    sums = SmemAllocator().allocate_tensor(Float32, cute.make_layout((WARPS, 2)), 16)
    pdl_wait()
    lane, warp = cute.arch.lane_idx(), cute.arch.warp_idx()
    thread = cute.arch.block_idx()[0] * 32 * WARPS + cute.arch.thread_idx()[0]
    if thread < zeros.shape[0]:
        zeros[thread] = Int32(0)
    row = (cute.arch.block_idx()[0] * WARPS + warp) // sharing
    index, source, vectors = ignored, Int64(0), h.shape[1] // 8
    if row < target.shape[0]:
        index, source = target[row], mapped(row, order, selects)
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
            scale = bias = None
            if cutlass.const_expr(transform.row_scale is not None):
                scale = transform.row_scale[row]
            if cutlass.const_expr(transform.bias is not None):
                bias = transform.bias[safe_index]
            z = transform_logit(z, transform, scale, bias)
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
