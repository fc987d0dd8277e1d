"""Zeros in the rows that do not count, for a GEMM that runs over all of them."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Int32

from cutefce.cute_kernels import spec
from cutefce.cute_kernels.common.dsl import (
    USE_PDL,
    current_stream,
    matrix,
    pdl_wait,
    vector,
)
from cutefce.cute_kernels.common.row_vectors import WARPS, row_vectors


def compile_signature(_: spec.ClearRowsSpec) -> tuple[Any, tuple[Any, ...]]:
    """Return the host function of the kernel and the arguments to compile it for."""
    x = matrix(BFloat16, cute.sym_int(), cute.sym_int(divisibility=8))
    return clear_rows, (x, vector(Int32, cute.sym_int()), current_stream())


@cute.jit
def clear_rows(x: cute.Tensor, count: cute.Tensor, stream: Any) -> None:
    """Write zeros to the rows of x (N, K) from `count`_0 on."""
    clear_rows_kernel(x, count).launch(
        grid=[x.shape[0], 1, 1], block=[32 * WARPS, 1, 1], stream=stream, **USE_PDL
    )


@cute.kernel
def clear_rows_kernel(x: cute.Tensor, count: cute.Tensor) -> None:
    """Clear one row a block."""
    pdl_wait()
    row = cute.arch.block_idx()[0]
    if row >= count[0]:
        destination = row_vectors(x, row)
        zeros = cute.make_rmem_tensor((8,), x.element_type)
        zeros.fill(0.0)
        for i in cutlass.range(cute.arch.thread_idx()[0], x.shape[1] // 8, 32 * WARPS, unroll=1):
            cute.autovec_copy(zeros, destination[None, i])
