"""out_i = x_{order_i}, or scale_i x_{order_i}: the rows that count, next to each other."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64

from cutefce.cute_kernels import spec
from cutefce.cute_kernels.common.dsl import (
    DTYPES,
    USE_PDL,
    current_stream,
    matrix,
    pdl_wait,
    vector,
)
from cutefce.cute_kernels.common.row_vectors import WARPS, load_fp32, row_vectors


def compile_signature(kernel: spec.GatherRowsSpec) -> tuple[Any, tuple[Any, ...]]:
    """Return the host function of `kernel` and the arguments to compile it for."""
    dtype = BFloat16 if kernel.dtype is None else DTYPES[kernel.dtype]
    rows, hidden = cute.sym_int(), cute.sym_int(divisibility=8)
    out, x = matrix(dtype, rows, hidden), matrix(dtype, cute.sym_int(), hidden)
    scale = vector(Float32, rows) if kernel.dtype else None
    count = vector(Int32, cute.sym_int())
    return gather_rows, (out, x, vector(Int64, rows), scale, count, current_stream())


@cute.jit
def gather_rows(
    out: cute.Tensor,
    x: cute.Tensor,
    order: cute.Tensor,
    scale: cute.Tensor | None,
    count: cute.Tensor,
    stream: Any,
) -> None:
    """Write rows `order` (N,) of x (M, D), times `scale` (N,) or None, to out (N, D).

    Rows from `count`_0 on become 0: GEMMs read some of them.
    """
    gather_rows_kernel(out, x, order, scale, count).launch(
        grid=[out.shape[0], 1, 1], block=[32 * WARPS, 1, 1], stream=stream, **USE_PDL
    )


@cute.kernel
def gather_rows_kernel(
    out: cute.Tensor,
    x: cute.Tensor,
    order: cute.Tensor,
    scale: Any,
    count: cute.Tensor,
) -> None:
    """Copy one row a block."""
    pdl_wait()
    row, rows = cute.arch.block_idx()[0], count[0]
    begin, end = cute.arch.thread_idx()[0], x.shape[1] // 8
    destination = row_vectors(out, row)
    if row < rows:
        source, factor = row_vectors(x, order[row]), Float32(1.0)
        if cutlass.const_expr(scale is not None):
            factor = scale[row]
        for i in cutlass.range(begin, end, 32 * WARPS, unroll=2):
            rounded = cute.make_rmem_tensor((8,), out.element_type)
            if cutlass.const_expr(scale is None):
                cute.autovec_copy(source[None, i], rounded)
            else:
                values = load_fp32(source, i)
                for j in cutlass.range_constexpr(8):
                    values[j] = values[j] * factor
                rounded.store(values.load().to(out.element_type))
            cute.autovec_copy(rounded, destination[None, i])
    else:
        zeros = cute.make_rmem_tensor((8,), out.element_type)
        zeros.fill(0.0)
        for i in cutlass.range(begin, end, 32 * WARPS, unroll=1):
            cute.autovec_copy(zeros, destination[None, i])
