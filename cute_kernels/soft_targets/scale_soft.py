"""Exponentials times the factors of their tokens, with entries of soft targets in their places."""

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
from cutefce.cute_kernels.common.row_vectors import WARPS, scale_row_part

THREADS, VECTORS = 32 * WARPS, 4
"""Threads of a block, and vectors of 8 elements that each scales: neighboring blocks have
neighboring parts of a row, so that few pages of memory are in use at a time."""


def compile_signature(kernel: spec.ScaleSoftSpec) -> tuple[Any, tuple[Any, ...]]:
    """Return the host function of `kernel` and the arguments to compile it for."""
    rows, classes = cute.sym_int(), cute.sym_int()
    exps = matrix(DTYPES[kernel.dtype], rows, cute.sym_int())
    index = matrix(Int64, rows, classes, aligned=False)
    given = (matrix(Float32, rows, classes, aligned=False) for _ in range(2))
    leads = vector(Int64, rows), vector(Float32, rows)
    numbers = Int64(0), Int32(0), current_stream()
    return scale_soft, (exps, index, *given, *leads, vector(Float32, rows), *numbers)


@cute.jit
def scale_soft(
    exps: cute.Tensor,
    index: cute.Tensor,
    coefficient: cute.Tensor,
    entries: cute.Tensor,
    lead: cute.Tensor,
    of_lead: cute.Tensor,
    scale: cute.Tensor,
    first: Int64,
    is_scaled: Int32,
    stream: Any,
) -> None:
    """Multiply exps (N, W) and `entries` (N, K) by `scale` (N,), and put these as `put_soft` does.

    Also put `of_lead` (N,) in the places of the leads (N,).  Each is rounded once.  If `is_scaled`,
    exps were multiplied before.  More than eight parameters: each is one argument that the host
    passes by position.
    """
    soft = index, coefficient, entries
    parts = (exps.shape[1] + 8 * VECTORS * THREADS - 1) // (8 * VECTORS * THREADS)
    if is_scaled != 0:
        parts = Int32(1)
    scale_soft_kernel(exps, soft, (lead, of_lead), scale, first, parts, is_scaled).launch(
        grid=[parts * exps.shape[0], 1, 1], block=[THREADS, 1, 1], stream=stream, **USE_PDL
    )


@cute.kernel
def scale_soft_kernel(
    exps: cute.Tensor,
    soft: Any,
    leads: Any,
    scale: cute.Tensor,
    first: Int64,
    parts: Int32,
    is_scaled: Int32,
) -> None:
    """Scale one of the `parts` of a row a thread block."""
    (index, coefficient, entries), (lead, of_lead) = soft, leads
    pdl_wait()
    block, thread = cute.arch.block_idx()[0], cute.arch.thread_idx()[0]
    row, part = block // parts, block % parts
    factor, columns = scale[row], exps.shape[1]
    begin = part * VECTORS * THREADS
    end = cutlass.min(8 * (begin + VECTORS * THREADS), columns)
    if is_scaled != 0:
        end = columns
    else:
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
