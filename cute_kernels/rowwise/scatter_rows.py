"""out_{order_i} = x_i: rows of dX in the order of the call, 0 for those that do not count."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from cutefce.cute_kernels import spec
from cutefce.cute_kernels.common.dsl import (
    DTYPES,
    USE_PDL,
    current_stream,
    matrix,
    pdl_wait,
    vector,
)
from cutefce.cute_kernels.common.row_vectors import WARPS, row_vectors


def compile_signature(kernel: spec.ScatterRowsSpec) -> tuple[Any, tuple[Any, ...]]:
    """Return the host function of `kernel` and the arguments to compile it for."""
    dtype, rows, hidden = DTYPES[kernel.dtype], cute.sym_int(), cute.sym_int(divisibility=8)
    out, x = matrix(dtype, cute.sym_int(), hidden), matrix(dtype, rows, hidden)
    operands = out, x, vector(Int64, rows), vector(Int32, cute.sym_int())
    return scatter_rows, (*operands, Int32(0), Int32(0), current_stream())


@cute.jit
def scatter_rows(
    out: cute.Tensor,
    x: cute.Tensor,
    order: cute.Tensor,
    count: cute.Tensor,
    first: Int32,
    kinds: Int32,
    stream: Any,
) -> None:
    """Write x (M, D), rows from `first` on of all, to rows `order` (M,) of out (N, D).

    The first `count`_0 rows of all count.  They are written if `kinds` has `COUNTED`; if it has
    `OTHERS`, 0 is written for the others.
    """
    scatter_rows_kernel(out, x, order, count, first, kinds).launch(
        grid=[x.shape[0], 1, 1], block=[32 * WARPS, 1, 1], stream=stream, **USE_PDL
    )


@cute.kernel
def scatter_rows_kernel(
    out: cute.Tensor,
    x: cute.Tensor,
    order: cute.Tensor,
    count: cute.Tensor,
    first: Int32,
    kinds: Int32,
) -> None:
    """Copy one row a block."""
    pdl_wait()
    row = cute.arch.block_idx()[0]
    source, destination = row_vectors(x, row), row_vectors(out, order[row])
    counts, kind = first + row < count[0], Int32(spec.OTHERS)
    if counts:
        kind = Int32(spec.COUNTED)
    vectors = x.shape[1] // 8
    if (kinds & kind) == 0:
        vectors = 0
    for i in cutlass.range(cute.arch.thread_idx()[0], vectors, 32 * WARPS, unroll=2):
        values = cute.make_rmem_tensor((8,), out.element_type)
        values.fill(0.0)
        if counts:
            cute.autovec_copy(source[None, i], values)
        cute.autovec_copy(values, destination[None, i])
