"""Lists the tokens of every class, for the targets' terms of dW.

A thread block counts and places the tokens of its own classes, so that no block waits for another.
Tokens of a class keep their order, so that sums over them are deterministic.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.memory import SmemAllocator

from cutefce.cute_kernels.common.dsl import pdl_wait, vector
from cutefce.cute_kernels.common.launch import Signature, blocks_of, row_launch
from cutefce.cute_kernels.common.row_vectors import mapped
from cutefce.cute_kernels.common.scan import inclusive_sum, sums_of_warps
from cutefce.cute_kernels.spec import rowwise as spec

WARPS = 32
THREADS = 32 * WARPS
"""Classes of a thread block, and the tokens that it looks at together."""
LOADS = 4
"""Targets that a thread loads at a time."""


def compile_signature(_: spec.SortTargetsSpec) -> Signature:
    """Return the host function and the arguments to compile it for."""
    tokens = cute.sym_int()
    return row_launch(
        sort_targets_kernel,
        blocks_of("offsets", THREADS),
        warps=WARPS,
        target=vector(Int64, tokens),
        coefficient=vector(Float32, tokens),
        rows=vector(Int64, tokens),
        order=vector(Int64, tokens),
        offsets=vector(Int32, cute.sym_int()),
        sorted_coefficient=vector(Float32, tokens),
        ignored=Int64(0),
        maps=Int32(0),
    )


@cute.kernel
def sort_targets_kernel(operands: Any) -> None:
    """List the tokens of each class v < V; `offsets`_v (V + 1,) is where its list begins.

    `order` (N,) receives the tokens, or if `maps` their `rows` (N,), and `sorted_coefficient` (N,)
    their coefficients.  Tokens whose target (N,) is `ignored` or no class are in no list; what is
    behind the last list is undefined.  A thread counts the tokens of a class; then those of the
    block's classes are placed.
    """
    target, coefficient, rows, order, offsets, sorted_coefficient, ignored, maps = operands
    csr = order, offsets, sorted_coefficient
    thread, warp, lane = cute.arch.thread_idx()[0], cute.arch.warp_idx(), cute.arch.lane_idx()
    first, entries = cute.arch.block_idx()[0] * THREADS, offsets.shape[0]
    smem = SmemAllocator()
    slots = smem.allocate_tensor(Int32, cute.make_layout(THREADS), 16)
    counts = smem.allocate_tensor(Int32, cute.make_layout(WARPS), 16)
    counts_before = smem.allocate_tensor(Int32, cute.make_layout(WARPS), 16)
    found_classes = smem.allocate_tensor(Int32, cute.make_layout(THREADS), 16)
    found_coefficients = smem.allocate_tensor(Float32, cute.make_layout(THREADS), 16)
    found_rows = smem.allocate_tensor(Int64, cute.make_layout(THREADS), 16)
    found = found_classes, found_coefficients, found_rows
    slots[thread] = Int32(0)
    pdl_wait()
    cute.arch.sync_threads()
    before, tokens = Int32(0), target.shape[0]
    indices = cute.make_rmem_tensor((LOADS,), Int64)
    for start in cutlass.range(thread, tokens, LOADS * THREADS, unroll=1):
        for j in cutlass.range_constexpr(LOADS):
            indices[j] = target[cutlass.min(start + j * THREADS, tokens - 1)]
        for j in cutlass.range_constexpr(LOADS):
            index, is_token = indices[j], start + j * THREADS < tokens
            if is_token and index != ignored and index >= 0 and index < entries - 1:
                own = Int32(index) - first
                if own < 0:
                    before += 1
                elif own < THREADS:
                    cute.arch.atomic_add(slots.iterator + own, Int32(1), sem="relaxed", scope="cta")
    cute.arch.sync_threads()
    counted = slots[thread]
    up_to = inclusive_sum(counted, lane)
    before = cute.arch.warp_reduction_sum(before)
    if lane == 31:
        counts[warp], counts_before[warp] = up_to, before
    cute.arch.sync_threads()
    in_warps, tokens_here = sums_of_warps(counts, warp, lane)
    _, in_blocks = sums_of_warps(counts_before, warp, lane)
    place = in_blocks + in_warps + up_to - counted
    slots[thread] = place
    if first + thread < entries:
        offsets[first + thread] = place
    if tokens_here > 0:
        values = target, coefficient, rows, maps
        for start in cutlass.range(0, tokens, THREADS, unroll=1):
            cute.arch.sync_threads()
            count = find_tokens(values, ignored, start, (first, entries), found, counts)
            cute.arch.sync_threads()
            if warp == 0:
                place_tokens(csr, found, slots, count)


@cute.jit
def find_tokens(
    values: Any, ignored: Int64, start: Int32, classes: Any, found: Any, counts: cute.Tensor
) -> Any:
    """List the tokens from `start` on that have a class of this block, in order; return how many.

    `values` are (target, coefficient, rows, maps) of the tokens, `classes` the first of the block
    and the number of offsets.  The list `found` are classes - first, coefficients and rows.
    """
    (target, coefficient, rows, maps), (first, entries) = values, classes
    thread, warp, lane = cute.arch.thread_idx()[0], cute.arch.warp_idx(), cute.arch.lane_idx()
    token, own, is_here = start + thread, Int32(0), Int32(0)
    if token < target.shape[0]:
        index = target[token]
        end = cutlass.min(first + THREADS, entries - 1)
        if index != ignored and index >= first and index < end:
            own, is_here = Int32(index) - first, Int32(1)
    up_to = inclusive_sum(is_here, lane)
    if lane == 31:
        counts[warp] = up_to
    cute.arch.sync_threads()
    place, count = sums_of_warps(counts, warp, lane)
    if is_here != 0:
        place += up_to - 1
        row = mapped(token, rows, maps)
        found_classes, found_coefficients, found_rows = found
        found_classes[place], found_rows[place] = own, row
        found_coefficients[place] = coefficient[token]
    return count


@cute.jit
def place_tokens(csr: Any, found: Any, slots: cute.Tensor, count: Int32) -> None:
    """Write `count` tokens of a list to the next places of their classes; one warp does.

    `slots` (THREADS,) are the next places.
    """
    (order, _, sorted_coefficient), (classes, coefficients, rows) = csr, found
    lane = cute.arch.lane_idx()
    for begin in cutlass.range(0, count, 32, unroll=1):
        own, at = -1 - lane, begin + lane  # lanes without a token equal no other
        if at < count:
            own = classes[at]
        earlier, same = Int32(0), Int32(0)
        for other in cutlass.range_constexpr(32):
            if cute.arch.shuffle_sync(own, other) == own:
                same += 1
                if other < lane:
                    earlier += 1
        if at < count:
            place = slots[own] + earlier
            order[place], sorted_coefficient[place] = rows[at], coefficients[at]
        cute.arch.sync_warp()
        if at < count and earlier == 0:
            slots[own] = slots[own] + same
        cute.arch.sync_warp()
