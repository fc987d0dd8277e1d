"""Entries of soft targets in the place of stored exponentials, and factors of tokens.

With factors, exponentials and entries are multiplied by them.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from cutefce.cute_kernels.common.dsl import DTYPES, matrix, pdl_wait, vector
from cutefce.cute_kernels.common.launch import WARPS, Signature, blocks_of, row_launch
from cutefce.cute_kernels.common.row_vectors import scale_row_part
from cutefce.cute_kernels.spec import rowwise as spec

THREADS, VECTORS = 32 * WARPS, 4
"""Threads of a block, and vectors of 8 elements that each scales: neighboring blocks have
neighboring parts of a row, so that few pages of memory are in use at a time."""


def compile_signature(kernel: spec.PutSoftSpec) -> Signature:
    """Return the host function of `kernel` and the arguments to compile it for."""
    rows, classes = cute.sym_int(), cute.sym_int()
    soft = {
        "exps": matrix(DTYPES[kernel.dtype], rows, cute.sym_int(), aligned=kernel.scales),
        "index": matrix(Int64, rows, classes, aligned=False),
        "coefficient": matrix(Float32, rows, classes, aligned=False),
        "entries": matrix(Float32, rows, classes, aligned=False),
    }
    if not kernel.scales:
        numbers = {"first": Int64(0), "clears": Int32(0)}
        return row_launch(put_soft_kernel, blocks_of("exps", WARPS), **soft, **numbers)
    return row_launch(
        scale_soft_kernel,
        blocks_and_parts,
        **soft,
        lead=vector(Int64, rows),
        of_lead=vector(Float32, rows),
        scale=vector(Float32, rows),
        first=Int64(0),
    )


@cute.kernel
def put_soft_kernel(operands: Any) -> None:
    """Write `entries` (N, K), or 0 if `clears`, to exps (N, W), of the columns from `first` on.

    They are those of the classes `index` (N, K), each once, where the `coefficient` (N, K) is not
    0.  Classes of other columns are left out.  A warp has a row.
    """
    exps, index, coefficient, entries, first, clears = operands
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


@cute.jit
def blocks_and_parts(operands: Any) -> Any:
    """Return the thread blocks, and the parts of a row."""
    rows, columns = operands.exps.shape
    parts = (columns + 8 * VECTORS * THREADS - 1) // (8 * VECTORS * THREADS)
    return parts * rows, parts


@cute.kernel
def scale_soft_kernel(operands: Any, parts: Int32) -> None:
    """Multiply exps (N, W) and `entries` (N, K) by `scale` (N,), and put these as above.

    Also put `of_lead` (N,) in the places of the leads (N,).  Each is rounded once.  A thread block
    has one of the `parts` of a row.
    """
    exps, index, coefficient, entries, lead, of_lead, scale, first = operands
    pdl_wait()
    block, thread = cute.arch.block_idx()[0], cute.arch.thread_idx()[0]
    row, part = block // parts, block % parts
    factor, columns = scale[row], exps.shape[1]
    begin = part * VECTORS * THREADS
    end = cutlass.min(8 * (begin + VECTORS * THREADS), columns)
    scale_row_part(exps, row, factor, begin, (thread, THREADS, VECTORS))
    cute.arch.sync_threads()
    for k in cutlass.range(thread, index.shape[1], THREADS, unroll=1):
        column = index[row, k] - first
        if column >= 8 * begin and column < end:
            counts = coefficient[row, k] != 0.0  # read of this part's classes alone
            if counts:
                exps[row, column] = (entries[row, k] * factor).to(exps.element_type)
    own = lead[row] - first
    if thread == 0 and own >= 8 * begin and own < end:
        exps[row, own] = of_lead[row].to(exps.element_type)
