"""Exponentials times the factors of their tokens, with entries of soft targets in their places."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int64

from cutefce.cute_kernels import spec
from cutefce.cute_kernels.common.dsl import (
    DTYPES,
    USE_PDL,
    current_stream,
    matrix,
    pdl_wait,
    vector,
)
from cutefce.cute_kernels.common.row_vectors import WARPS, row_vectors, widened

THREADS, VECTORS = 32 * WARPS, 4
"""Threads of a row, and vectors of 8 elements that each has in flight."""


def compile_signature(kernel: spec.ScaleSoftSpec) -> tuple[Any, tuple[Any, ...]]:
    """Return the host function of `kernel` and the arguments to compile it for."""
    rows, classes = cute.sym_int(), cute.sym_int()
    exps = matrix(DTYPES[kernel.dtype], rows, cute.sym_int())
    index = matrix(Int64, rows, classes, aligned=False)
    given = (matrix(Float32, rows, classes, aligned=False) for _ in range(2))
    leads = vector(Int64, rows), vector(Float32, rows)
    numbers = Int64(0), current_stream()
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
    stream: Any,
) -> None:
    """Multiply exps (N, W) and `entries` (N, K) by `scale` (N,), and put these as `put_soft` does.

    Also put `of_lead` (N,) in the places of the leads (N,).  Each is rounded once.  More
    than eight parameters: each is one argument that the host passes by position.
    """
    soft = index, coefficient, entries
    scale_soft_kernel(exps, soft, (lead, of_lead), scale, first).launch(
        grid=[exps.shape[0], 1, 1], block=[THREADS, 1, 1], stream=stream, **USE_PDL
    )


@cute.kernel
def scale_soft_kernel(
    exps: cute.Tensor, soft: Any, leads: Any, scale: cute.Tensor, first: Int64
) -> None:
    """Scale one row a thread block."""
    (index, coefficient, entries), (lead, of_lead) = soft, leads
    pdl_wait()
    row, thread = cute.arch.block_idx()[0], cute.arch.thread_idx()[0]
    factor, columns = scale[row], exps.shape[1]
    vectors, whole = row_vectors(exps, row), columns // 8
    for begin in cutlass.range(thread, whole, VECTORS * THREADS, unroll=1):
        raw = cute.make_rmem_tensor((8, VECTORS), exps.element_type)
        for v in cutlass.range_constexpr(VECTORS):
            if begin + v * THREADS < whole:
                cute.autovec_copy(vectors[None, begin + v * THREADS], raw[None, v])
        for v in cutlass.range_constexpr(VECTORS):
            if begin + v * THREADS < whole:
                scaled, wide = cute.make_rmem_tensor((8,), exps.element_type), widened(raw[None, v])
                for i in cutlass.range_constexpr(8):
                    scaled[i] = (wide[i] * factor).to(exps.element_type)
                cute.autovec_copy(scaled, vectors[None, begin + v * THREADS])
    rest = 8 * whole + thread
    if rest < columns:
        exps[row, rest] = (exps[row, rest].to(Float32) * factor).to(exps.element_type)
    cute.arch.sync_threads()
    for k in cutlass.range(thread, index.shape[1], THREADS, unroll=1):
        column = index[row, k] - first
        if column >= 0 and column < columns:
            counts = coefficient[row, k] != 0.0  # read of this window's classes alone
            if counts:
                exps[row, column] = (entries[row, k] * factor).to(exps.element_type)
    place = lead[row] - first
    if thread == 0 and place >= 0 and place < columns:
        exps[row, place] = of_lead[row].to(exps.element_type)
