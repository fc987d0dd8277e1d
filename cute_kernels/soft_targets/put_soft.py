"""Entries of soft targets in the place of stored exponentials."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from cutefce.cute_kernels import spec
from cutefce.cute_kernels.common.dsl import DTYPES, USE_PDL, current_stream, matrix, pdl_wait
from cutefce.cute_kernels.common.row_vectors import WARPS


def compile_signature(kernel: spec.PutSoftSpec) -> tuple[Any, tuple[Any, ...]]:
    """Return the host function of `kernel` and the arguments to compile it for."""
    rows, classes = cute.sym_int(), cute.sym_int()
    exps = matrix(DTYPES[kernel.dtype], rows, cute.sym_int(), aligned=False)
    index = matrix(Int64, rows, classes, aligned=False)
    given = (matrix(Float32, rows, classes, aligned=False) for _ in range(2))
    return put_soft, (exps, index, *given, Int64(0), Int32(0), current_stream())


@cute.jit
def put_soft(
    exps: cute.Tensor,
    index: cute.Tensor,
    coefficient: cute.Tensor,
    entries: cute.Tensor,
    first: Int64,
    clears: Int32,
    stream: Any,
) -> None:
    """Write `entries` (N, K), or 0 if `clears`, to exps (N, W), of the columns from `first` on.

    They are those of the classes `index` (N, K), each once, where the `coefficient` (N, K) is not
    0.  Classes of other columns are left out.
    """
    put_soft_kernel(exps, index, coefficient, entries, first, clears).launch(
        grid=[(exps.shape[0] + WARPS - 1) // WARPS, 1, 1],
        block=[32 * WARPS, 1, 1],
        stream=stream,
        **USE_PDL,
    )


@cute.kernel
def put_soft_kernel(
    exps: cute.Tensor,
    index: cute.Tensor,
    coefficient: cute.Tensor,
    entries: cute.Tensor,
    first: Int64,
    clears: Int32,
) -> None:
    """Write to one row a warp."""
    pdl_wait()
    row = cute.arch.block_idx()[0] * WARPS + cute.arch.warp_idx()
    if row < exps.shape[0]:
        for k in cutlass.range(cute.arch.lane_idx(), index.shape[1], 32, unroll=1):
            column = index[row, k] - first
            if column >= 0 and column < exps.shape[1]:
                counts = coefficient[row, k] != 0.0  # read of this window's classes alone
                if counts:
                    value = Float32(0.0)
                    if clears == 0:
                        value = entries[row, k]
                    exps[row, column] = value.to(exps.element_type)
