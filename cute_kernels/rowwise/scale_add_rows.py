"""TODO."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32

from cutefce.cute_kernels.common.dsl import (
    EARLY,
    await_previous,
)
from cutefce.cute_kernels.common.row_vectors import WARPS, chunks, load


@cute.jit
def combine(
    out: cute.Tensor,
    x: cute.Tensor,
    table: cute.Tensor | None,
    a: cute.Tensor | None,
    b: cute.Tensor | None,
    index: cute.Tensor | None,
    stream: Any,
) -> None:
    """Write a_i (x_i + b_i table_{index_i}) to out (N, D), of x (N, D), a, b, index (N,)."""
    combine_kernel(out, x, table, a, b, index).launch(
        grid=[x.shape[0], 1, 1], block=[32 * WARPS, 1, 1], stream=stream, **EARLY
    )


@cute.kernel
def combine_kernel(
    out: cute.Tensor,
    x: cute.Tensor,
    table: cute.Tensor | None,
    a: Any,
    b: Any,
    index: Any,
) -> None:
    """Combine one row a block."""
    await_previous()
    row = cute.arch.block_idx()[0]
    scale, factor = Float32(1.0), Float32(1.0)
    if cutlass.const_expr(a is not None):
        scale = a[row]
    if cutlass.const_expr(b is not None):
        factor = b[row]
    to, source = chunks(out, row), chunks(x, row)
    extra = source
    if cutlass.const_expr(table is not None):
        extra = chunks(table, index[row])
    for chunk in cutlass.range(cute.arch.thread_idx()[0], x.shape[1] // 8, 32 * WARPS, unroll=2):
        values = load(source, chunk)
        if cutlass.const_expr(table is not None):
            others = load(extra, chunk)
            for i in cutlass.range_constexpr(8):
                values[i] = values[i] + factor * others[i]
        for i in cutlass.range_constexpr(8):
            values[i] = values[i] * scale
        rounded = cute.make_rmem_tensor((8,), out.element_type)
        rounded.store(values.load().to(out.element_type))
        cute.autovec_copy(rounded, to[None, chunk])
