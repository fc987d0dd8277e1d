"""out_i = row_scale_i x_i + gather_scale_i table_{index_i}: the last step of dX.

If the spec has a matrix of rank one, factor_i row is added.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from cutefce.cute_kernels.common.dsl import DTYPES, matrix, pdl_wait, vector
from cutefce.cute_kernels.common.launch import WARPS, Signature, blocks_of, row_launch
from cutefce.cute_kernels.common.rank_one import rank_one_signature
from cutefce.cute_kernels.common.row_vectors import (
    clamped,
    clear_vectors,
    load_fp32,
    mapped,
    row_vectors,
    store_rounded,
)
from cutefce.cute_kernels.spec import rowwise as spec


def compile_signature(kernel: spec.ScaleAddRowsSpec) -> Signature:
    """Return the host function of `kernel` and the arguments to compile it for."""
    rows, hidden = cute.sym_int(), cute.sym_int(divisibility=8)
    return row_launch(
        scale_add_rows_kernel,
        blocks_of("x"),
        out=matrix(DTYPES[kernel.out], cute.sym_int(), hidden),
        x=matrix(DTYPES[kernel.x], rows, hidden),
        table=matrix(DTYPES[kernel.table], cute.sym_int(), hidden),
        row_scale=vector(Float32, rows),
        gather_scale=vector(Float32, rows),
        index=vector(Int64, rows),
        rank_one=rank_one_signature(rows, hidden, kernel.rank_one),
        order=vector(Int64, rows),
        scatters=Int32(0),
    )


@cute.kernel
def scale_add_rows_kernel(operands: Any) -> None:
    """Write out (N, D) from x (N, D), vectors (N,), and table (V, D); a row a block.

    If `scatters`, row i of x becomes row `order`_i of `out`, which is not x then, and may have more
    rows.  A row whose scales and factor are all 0 is 0, whatever x and table hold: an ignored row.
    An index is clamped to the table.
    """
    out, x, table, row_scale, gather_scale, index, rank_one, *places = operands
    pdl_wait()
    row = cute.arch.block_idx()[0]
    scale, factor = row_scale[row], gather_scale[row]
    destination, source = row_vectors(out, mapped(row, *places)), row_vectors(x, row)
    gathered = row_vectors(table, clamped(index[row], table))
    addend, addend_factor = source, Float32(0.0)
    begin, end = cute.arch.thread_idx()[0], x.shape[1] // 8
    if cutlass.const_expr(rank_one is not None):
        addend, addend_factor = cute.zipped_divide(rank_one.row, (8,)), rank_one.factor[row]
    if scale == 0.0 and factor == 0.0 and addend_factor == 0.0:
        clear_vectors(destination, begin, end)
        end = Int32(0)
    for i in cutlass.range(begin, end, 32 * WARPS, unroll=2):
        values = load_fp32(source, i)
        for j in cutlass.range_constexpr(8):
            values[j] = values[j] * scale
        addends = load_fp32(gathered, i)
        for j in cutlass.range_constexpr(8):
            values[j] = values[j] + factor * addends[j]
        if cutlass.const_expr(rank_one is not None):
            addends = load_fp32(addend, i)
            for j in cutlass.range_constexpr(8):
                values[j] = values[j] + addend_factor * addends[j]
        store_rounded(values, destination, i)
