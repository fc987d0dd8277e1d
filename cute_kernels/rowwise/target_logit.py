"""TODO."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from cutefce.cute_kernels.common.dsl import (
    EARLY,
    await_previous,
)
from cutefce.cute_kernels.common.row_vectors import WARPS, chunks, load


@cute.jit
def target_logit(
    h: cute.Tensor,
    w: cute.Tensor,
    target: cute.Tensor,
    logit: cute.Tensor,
    zeros: cute.Tensor,
    ignored: Int64,
    stream: Any,
) -> None:
    """Write r (N,): +inf where the target (N,) is `ignored`, NaN where it lies outside [0, V).

    Set `zeros`, which are at most `kernels.TargetLogit.zeros(N)`, to 0.
    """
    blocks = (h.shape[0] + WARPS - 1) // WARPS
    target_logit_kernel(h, w, target, logit, zeros, ignored).launch(
        grid=[blocks, 1, 1], block=[32 * WARPS, 1, 1], stream=stream, **EARLY
    )


@cute.kernel
def target_logit_kernel(
    h: cute.Tensor,
    w: cute.Tensor,
    target: cute.Tensor,
    logit: cute.Tensor,
    zeros: cute.Tensor,
    ignored: Int64,
) -> None:
    """Compute one row a warp; a thread has one of the zeros."""
    await_previous()
    lane = cute.arch.lane_idx()
    place = cute.arch.block_idx()[0] * 32 * WARPS + cute.arch.thread_idx()[0]
    if place < zeros.shape[0]:
        zeros[place] = Int32(0)
    row = cute.arch.block_idx()[0] * WARPS + cute.arch.warp_idx()
    if row < h.shape[0]:
        index = target[row]
        inside = index >= 0 and index < w.shape[0]
        address = Int64(0)
        if inside:
            address = index
        total = dot(chunks(h, row), chunks(w, address), lane, h.shape[1] // 8)
        total = cute.arch.warp_reduction_sum(total)
        if not inside:
            total = Float32.nan
        if index == ignored:
            total = Float32.inf
        if lane == 0:
            logit[row] = total


@cute.jit
def dot(a: cute.Tensor, b: cute.Tensor, lane: Int32, count: Int32) -> Float32:
    """Return the part of Σ a·b of every 32nd chunk from `lane` on, of `count` chunks."""
    total = Float32(0.0)
    for chunk in cutlass.range(lane, count, 32, unroll=4):
        x, y = load(a, chunk), load(b, chunk)
        for i in cutlass.range_constexpr(8):
            total += x[i] * y[i]
    return total
