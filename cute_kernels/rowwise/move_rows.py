"""Rows that count, next to each other or back in their places, and zeros for the others.

    GATHER     out_i = x_{order_i}, or scale_i x_{order_i}
    SCATTER    out_{order_i} = x_i: rows of dX in the order of the call
    CLEAR      zeros alone, for a GEMM that runs over all rows

Without an order, out_i = scale_i x_i of all rows.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64

from cutefce.cute_kernels.common.dsl import DTYPES, matrix, pdl_wait, vector
from cutefce.cute_kernels.common.launch import WARPS, Signature, blocks_of, row_launch
from cutefce.cute_kernels.common.row_vectors import (
    clear_vectors,
    load_fp32,
    mapped,
    row_vectors,
    store_rounded,
)
from cutefce.cute_kernels.spec import rowwise as spec
from cutefce.cute_kernels.workspace import Move


def compile_signature(kernel: spec.MoveRowsSpec) -> Signature:
    """Return the host function of `kernel` and the arguments to compile it for."""
    dtype = BFloat16 if kernel.dtype is None else DTYPES[kernel.dtype]
    hidden = cute.sym_int(divisibility=8)
    return row_launch(
        move_rows_kernel,
        blocks_of("out"),
        out=matrix(dtype, cute.sym_int(), hidden),
        x=matrix(dtype, cute.sym_int(), hidden),
        order=vector(Int64, cute.sym_int()) if kernel.orders else None,
        scale=vector(Float32, cute.sym_int()) if kernel.dtype else None,
        count=vector(Int32, cute.sym_int()) if kernel.orders else None,
        move=Int32(0),
    )


@cute.kernel
def move_rows_kernel(operands: Any) -> None:
    """Write rows of x (M, D) to rows of out (N, D), a row a block.

    `order` (N,) are rows of x, or of `out` to scatter; `scale` is (N,).  Rows from `count`_0 on
    become 0: GEMMs read some of them.
    """
    out, x, order, scale, count, move = operands
    pdl_wait()
    row = cute.arch.block_idx()[0]
    counts, moves, place, source = True, True, Int64(row), Int64(row)
    if cutlass.const_expr(order is not None):
        counts, moves = row < count[0], move != Move.CLEAR
        place = mapped(row, order, Int32(move == Move.SCATTER))
        source = mapped(row, order, Int32(move == Move.GATHER))
    destination, begin = row_vectors(out, place), cute.arch.thread_idx()[0]
    end = out.shape[1] // 8
    if counts:
        if moves:
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
