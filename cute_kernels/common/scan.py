"""Prefix sums over a warp and over the warps of a thread block."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32


@cute.jit
def inclusive_sum(value: Int32, lane: Int32) -> Any:
    """Return the sum of `value` of this lane and those below; all lanes call this together."""
    total = value
    for step in cutlass.range_constexpr(5):
        below = cute.arch.shuffle_sync_up(total, offset=1 << step, mask_and_clamp=0)
        if lane >= 1 << step:
            total += below
    return total


@cute.jit
def sums_of_warps(parts: cute.Tensor, warp: Int32, lane: Int32) -> Any:
    """Return the sum of the parts (32,) of the warps before this one, and of all.

    They are in shared memory; a thread block has 32 warps, and all of them call this.
    """
    own = parts[lane]
    up_to = inclusive_sum(own, lane)
    before = cute.arch.shuffle_sync(up_to - own, warp)
    return before, cute.arch.shuffle_sync(up_to, 31)
