"""out_i = row_scale_i x_i + gather_scale_i table_{index_i}: s ⊙ h, and the last step of dX.

If the spec has a matrix of rank one, factor_i row is added.
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
from cutefce.cute_kernels.common.rank_one import RankOne, rank_one_signature
from cutefce.cute_kernels.common.row_vectors import WARPS, clamped, load_fp32, row_vectors


def compile_signature(kernel: spec.ScaleAddRowsSpec) -> tuple[Any, tuple[Any, ...]]:
    """Return the host function of `kernel` and the arguments to compile it for."""
    assert kernel.table is not None or not kernel.rank_one
    rows, hidden = cute.sym_int(), cute.sym_int(divisibility=8)
    x, out_rows = matrix(DTYPES[kernel.x], rows, hidden), rows
    table = gather_scale = index = order = None
    if kernel.table is not None:
        table = matrix(DTYPES[kernel.table], cute.sym_int(), hidden)
        gather_scale, index = vector(Float32, rows), vector(Int64, rows)
        order, out_rows = vector(Int64, rows), cute.sym_int()
    scales = vector(Float32, rows), gather_scale, index
    rank_one = rank_one_signature(rows, hidden, kernel.rank_one)
    places = order, Int32(0), current_stream()
    out = matrix(DTYPES[kernel.out], out_rows, hidden)
    return scale_add_rows, (out, x, table, *scales, rank_one, *places)


@cute.jit
def scale_add_rows(
    out: cute.Tensor,
    x: cute.Tensor,
    table: cute.Tensor | None,
    row_scale: cute.Tensor,
    gather_scale: cute.Tensor | None,
    index: cute.Tensor | None,
    rank_one: RankOne | None,
    order: cute.Tensor | None,
    scatters: Int32,
    stream: Any,
) -> None:
    """Write out (N, D) from x (N, D), vectors (N,), and table (V, D) or None.

    With a table and if `scatters`, row i of x becomes row `order`_i of `out`, which is not x then,
    and may have more rows.

    With a table, a row whose scales and factor are all 0 is 0, whatever x and table hold: an
    ignored row.  An index is clamped to the table.  More than eight parameters: each is one
    argument that the host passes by position.
    """
    scales, places = (row_scale, gather_scale, index), (order, scatters)
    scale_add_rows_kernel(out, x, table, scales, rank_one, places).launch(
        grid=[x.shape[0], 1, 1], block=[32 * WARPS, 1, 1], stream=stream, **USE_PDL
    )


@cute.kernel
def scale_add_rows_kernel(
    out: cute.Tensor,
    x: cute.Tensor,
    table: cute.Tensor | None,
    scales: Any,
    rank_one: Any,
    places: Any,
) -> None:
    """Compute one row a block."""
    (row_scale, gather_scale, index), (order, scatters) = scales, places
    pdl_wait()
    row = cute.arch.block_idx()[0]
    scale, factor, place = row_scale[row], Float32(0.0), Int64(row)
    if cutlass.const_expr(table is not None):
        factor = gather_scale[row]
        if scatters != 0:
            place = order[row]
    destination, source = row_vectors(out, place), row_vectors(x, row)
    gathered = source
    addend, addend_factor = source, Float32(0.0)
    begin, end = cute.arch.thread_idx()[0], x.shape[1] // 8
    if cutlass.const_expr(rank_one is not None):
        addend, addend_factor = cute.zipped_divide(rank_one.row, (8,)), rank_one.factor[row]
    if cutlass.const_expr(table is not None):
        gathered = row_vectors(table, clamped(index[row], table))
        if scale == 0.0 and factor == 0.0 and addend_factor == 0.0:
            zeros = cute.make_rmem_tensor((8,), out.element_type)
            zeros.fill(0.0)
            for i in cutlass.range(begin, end, 32 * WARPS, unroll=1):
                cute.autovec_copy(zeros, destination[None, i])
            end = Int32(0)
    for i in cutlass.range(begin, end, 32 * WARPS, unroll=2):
        values = load_fp32(source, i)
        for j in cutlass.range_constexpr(8):
            values[j] = values[j] * scale
        if cutlass.const_expr(table is not None):
            addends = load_fp32(gathered, i)
            for j in cutlass.range_constexpr(8):
                values[j] = values[j] + factor * addends[j]
        if cutlass.const_expr(rank_one is not None):
            addends = load_fp32(addend, i)
            for j in cutlass.range_constexpr(8):
                values[j] = values[j] + addend_factor * addends[j]
        rounded = cute.make_rmem_tensor((8,), out.element_type)
        rounded.store(values.load().to(out.element_type))
        cute.autovec_copy(rounded, destination[None, i])
