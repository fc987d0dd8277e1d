"""Rows that count, next to each other or back in their places, and zeros for the others.

gather     out_i = x_{order_i}, or scale_i x_{order_i}
scatter    out_{order_i} = x_i: rows of dX in the order of the call
scale      out_i = scale_i x_i of all rows
clear      zeros alone, for a GEMM that runs over all rows
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64

from cutefce.cute_kernels import spec
from cutefce.cute_kernels.common.dsl import DTYPES, matrix, pdl_wait, vector
from cutefce.cute_kernels.common.launch import WARPS, Signature, blocks_of, row_launch
from cutefce.cute_kernels.common.row_vectors import (
    clear_vectors,
    load_fp32,
    row_vectors,
    store_rounded,
)


def compile_signature(kernel: spec.MoveRowsSpec) -> Signature:
    """Return the host function of `kernel` and the arguments to compile it for."""
    dtype, move = BFloat16 if kernel.dtype is None else DTYPES[kernel.dtype], kernel.move
    rows, hidden, all_rows = cute.sym_int(), cute.sym_int(divisibility=8), cute.sym_int()
    return row_launch(
        MoveRows(kernel).kernel,
        blocks_of("x" if move == "scatter" else "out"),
        out=matrix(dtype, all_rows if move == "scatter" else rows, hidden),
        x=None
        if move == "clear"
        else matrix(dtype, all_rows if move == "gather" else rows, hidden),
        order=vector(Int64, rows) if move in ("gather", "scatter") else None,
        scale=vector(Float32, rows) if kernel.dtype else None,
        count=None if move == "scale" else vector(Int32, cute.sym_int()),
    )


class MoveRows:
    """The kernel."""

    def __init__(self, kernel: spec.MoveRowsSpec) -> None:
        self.scatters = kernel.move == "scatter"

    @cute.kernel
    def kernel(self, operands: Any) -> None:
        """Write rows of x (N or M, D) to rows of out (M or N, D), one a block.

        `order` (N,) are rows of the one of M rows, `scale` is (N,).  Rows from `count`_0 on become
        0: GEMMs read some of them.
        """
        out, x, order, scale, count = operands
        pdl_wait()
        row = cute.arch.block_idx()[0]
        counts, place = True, Int64(row)
        if cutlass.const_expr(count is not None):
            counts = row < count[0]
        if cutlass.const_expr(self.scatters):
            place = order[row]
        destination, begin = row_vectors(out, place), cute.arch.thread_idx()[0]
        end = out.shape[1] // 8
        if counts:
            if cutlass.const_expr(x is not None):
                source = Int64(row)
                if cutlass.const_expr(order is not None and not self.scatters):
                    source = order[row]
                vectors, factor = row_vectors(x, source), Float32(1.0)
                if cutlass.const_expr(scale is not None):
                    factor = scale[row]
                for i in cutlass.range(begin, end, 32 * WARPS, unroll=2):
                    if cutlass.const_expr(scale is None):
                        values = cute.make_rmem_tensor((8,), out.element_type)
                        cute.autovec_copy(vectors[None, i], values)
                        cute.autovec_copy(values, destination[None, i])
                    else:
                        values = load_fp32(vectors, i)
                        for j in cutlass.range_constexpr(8):
                            values[j] = values[j] * factor
                        store_rounded(values, destination, i)
        else:
            clear_vectors(destination, begin, end)
