"""sums_v += Σ_{i: y_i = v} c_i h_i: the targets' terms of dW, in float32."""

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
from cutefce.cute_kernels.common.row_vectors import WARPS, load_fp32, row_vectors


def compile_signature(kernel: spec.AddTargetsSpec) -> tuple[Any, tuple[Any, ...]]:
    """Return the host function of `kernel` and the arguments to compile it for."""
    dtype, vocab = DTYPES[kernel.dtype], cute.sym_int()
    tokens, hidden = cute.sym_int(), cute.sym_int(divisibility=8)
    csr = vector(Int64, tokens), vector(Int32, cute.sym_int()), vector(Float32, tokens)
    sums, h = matrix(Float32, vocab, hidden), matrix(dtype, cute.sym_int(), hidden)
    return add_targets, (sums, *csr, h, current_stream())


@cute.jit
def add_targets(
    sums: cute.Tensor,
    order: cute.Tensor,
    offsets: cute.Tensor,
    coef: cute.Tensor,
    h: cute.Tensor,
    stream: Any,
) -> None:
    """Add Σ c_i h_i over the tokens i with target v to row v of sums (V, D).

    These are the tokens `order` (N,) from `offsets`_v to `offsets`_{v+1} (V + 1,); `coef` (N,)
    holds c in that order, h (M, D) may have more rows.
    """
    add_targets_kernel(sums, order, offsets, coef, h).launch(
        grid=[sums.shape[0], 1, 1], block=[32 * WARPS, 1, 1], stream=stream, **USE_PDL
    )


@cute.kernel
def add_targets_kernel(
    sums: cute.Tensor,
    order: cute.Tensor,
    offsets: cute.Tensor,
    coef: cute.Tensor,
    h: cute.Tensor,
) -> None:
    """Add to one row a block."""
    pdl_wait()
    row = cute.arch.block_idx()[0]
    row_sums, begin, end = row_vectors(sums, row), offsets[row], offsets[row + 1]
    if begin < end:
        for i in cutlass.range(cute.arch.thread_idx()[0], sums.shape[1] // 8, 32 * WARPS):
            values = load_fp32(row_sums, i)
            for slot in cutlass.range(begin, end, unroll=4):
                factor, addends = coef[slot], load_fp32(row_vectors(h, order[slot]), i)
                for j in cutlass.range_constexpr(8):
                    values[j] = values[j] + factor * addends[j]
            cute.autovec_copy(values, row_sums[None, i])
