"""out_{order_i} = x_i: rows of dX in the order of the call, 0 for those that do not count."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Int32, Int64

from cutefce.cute_kernels import spec
from cutefce.cute_kernels.common.dsl import (
    USE_PDL,
    current_stream,
    matrix,
    pdl_wait,
    vector,
)
from cutefce.cute_kernels.common.row_vectors import WARPS, row_vectors


def compile_signature(_: spec.ScatterRowsSpec) -> tuple[Any, tuple[Any, ...]]:
    """Return the host function of the kernel and the arguments to compile it for."""
    rows, hidden = cute.sym_int(), cute.sym_int(divisibility=8)
    out, x = matrix(BFloat16, cute.sym_int(), hidden), matrix(BFloat16, rows, hidden)
    operands = out, x, vector(Int64, rows), vector(Int32, cute.sym_int())
    return scatter_rows, (*operands, current_stream())


@cute.jit
def scatter_rows(
    out: cute.Tensor,
    x: cute.Tensor,
    order: cute.Tensor,
    count: cute.Tensor,
    stream: Any,
) -> None:
    """Write x (N, D) to rows `order` (N,) of out (N, D): the first `count`_0, and 0 for others."""
    scatter_rows_kernel(out, x, order, count).launch(
        grid=[x.shape[0], 1, 1], block=[32 * WARPS, 1, 1], stream=stream, **USE_PDL
    )


@cute.kernel
def scatter_rows_kernel(
    out: cute.Tensor,
    x: cute.Tensor,
    order: cute.Tensor,
    count: cute.Tensor,
) -> None:
    """Copy one row a block."""
    pdl_wait()
    row = cute.arch.block_idx()[0]
    source, destination = row_vectors(x, row), row_vectors(out, order[row])
    counts = row < count[0]
    for i in cutlass.range(cute.arch.thread_idx()[0], x.shape[1] // 8, 32 * WARPS, unroll=2):
        values = cute.make_rmem_tensor((8,), out.element_type)
        values.fill(0.0)
        if counts:
            cute.autovec_copy(source[None, i], values)
        cute.autovec_copy(values, destination[None, i])
