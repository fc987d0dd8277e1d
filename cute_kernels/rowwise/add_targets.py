"""TODO."""

from typing import Any

import cutlass
import cutlass.cute as cute

from cutefce.cute_kernels.common.dsl import (
    EARLY,
    await_previous,
)
from cutefce.cute_kernels.common.row_vectors import WARPS, chunks, load


@cute.jit
def add_targets(
    sums: cute.Tensor,
    order: cute.Tensor,
    starts: cute.Tensor,
    coefficient: cute.Tensor,
    h: cute.Tensor,
    stream: Any,
) -> None:
    """Add Σ c_i h_i over the tokens i of v to sums_v (V, D).

    Those are `order` (N,) from `starts`_v to `starts`_{v+1} (V + 1,); c is `coefficient` (N,), in
    that order.
    """
    add_targets_kernel(sums, order, starts, coefficient, h).launch(
        grid=[sums.shape[0], 1, 1], block=[32 * WARPS, 1, 1], stream=stream, **EARLY
    )


@cute.kernel
def add_targets_kernel(
    sums: cute.Tensor,
    order: cute.Tensor,
    starts: cute.Tensor,
    coefficient: cute.Tensor,
    h: cute.Tensor,
) -> None:
    """Add to one row a block."""
    await_previous()
    row = cute.arch.block_idx()[0]
    to, begin, end = chunks(sums, row), starts[row], starts[row + 1]
    if begin < end:
        for chunk in cutlass.range(cute.arch.thread_idx()[0], sums.shape[1] // 8, 32 * WARPS):
            values = load(to, chunk)
            for place in cutlass.range(begin, end, unroll=4):
                factor, others = coefficient[place], load(chunks(h, order[place]), chunk)
                for i in cutlass.range_constexpr(8):
                    values[i] = values[i] + factor * others[i]
            cute.autovec_copy(values, to[None, chunk])
