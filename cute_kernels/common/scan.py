"""Sums over the lanes of a warp up to each lane."""

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
