"""A bitonic network that sorts keys in shared memory."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32


@cute.jit
def bitonic_sort(keys: cute.Tensor, half: Int32, most: int, threads: Any) -> None:
    """Sort the first 2 · `half` of `most` keys, each a power of 2.

    `threads` are the number of the thread among those that sort, and how many these are: those of a
    warp or of a thread block.
    """
    thread, count = threads
    for level in cutlass.range_constexpr(most.bit_length() - 1):
        if 1 << level <= half:
            for step in cutlass.range_constexpr(level, -1, -1):
                distance = 1 << step
                before = 1 if step == level else 2 * distance
                # up to this distance the 32 pairs of a warp are those of the same 64 entries
                in_warp = level > 0 and max(distance, before) <= 32
                meet(32 if in_warp else count)
                for pair in cutlass.range(thread, half, count, unroll=1):
                    low = pair // distance * 2 * distance + pair % distance
                    high = low + distance
                    if cutlass.const_expr(step == level):  # the second run is read backwards
                        high = low ^ (2 * distance - 1)
                    first, second = keys[low], keys[high]
                    if first > second:
                        keys[low], keys[high] = second, first
    meet(count)


def meet(threads: int) -> None:
    """Wait for the threads of a warp, or of a thread block that has more."""
    if threads == 32:
        cute.arch.sync_warp()
    else:
        cute.arch.sync_threads()
