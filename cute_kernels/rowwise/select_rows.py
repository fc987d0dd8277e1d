"""The rows that count, those whose target is not ignored, listed before all others.

Every thread block counts the rows before its own, so that no block waits for another; the order is
that of the rows, so that sums over it are deterministic.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass.memory import SmemAllocator

from cutefce.cute_kernels.common.dsl import pdl_wait, vector
from cutefce.cute_kernels.common.launch import Signature, blocks_of, row_launch
from cutefce.cute_kernels.common.scan import inclusive_sum
from cutefce.cute_kernels.spec import rowwise as spec

WARPS = 32
THREADS = 32 * WARPS
"""Rows of a thread block."""


def compile_signature(_: spec.SelectRowsSpec) -> Signature:
    """Return the host function and the arguments to compile it for."""
    rows = cute.sym_int()
    return row_launch(
        select_rows_kernel,
        blocks_of("target", THREADS),
        warps=WARPS,
        target=vector(Int64, rows),
        order=vector(Int64, rows),
        selected=vector(Int64, rows),
        counts=vector(Int32, cute.sym_int()),
        chunk=Int32(1),
        ignored=Int64(0),
    )


@cute.kernel
def select_rows_kernel(operands: Any) -> None:
    """Write the rows whose target (N,) is not `ignored` to `order` (N,), then the others.

    `selected` (N,) receives the targets in that order, and `counts`_k how many of the rows
    k · chunk to (k + 1) · chunk of that order are not ignored.  A thread places a row.
    """
    target, order, selected, counts, chunk, ignored = operands
    pdl_wait()
    thread, warp, lane = cute.arch.thread_idx()[0], cute.arch.warp_idx(), cute.arch.lane_idx()
    rows, start = target.shape[0], cute.arch.block_idx()[0] * THREADS
    smem = SmemAllocator()
    sums = smem.allocate_tensor(Int32, cute.make_layout((WARPS, 3)), 16)
    row, counts_here = start + thread, Int32(0)
    if row < rows:
        counts_here = Int32(target[row] != ignored)
    before, total = Int32(0), Int32(0)
    for other in cutlass.range(thread, rows, THREADS, unroll=8):
        counted = Int32(target[other] != ignored)
        total += counted
        if other < start:
            before += counted
    own = inclusive_sum(counts_here, lane)
    before = cute.arch.warp_reduction_sum(before)
    total = cute.arch.warp_reduction_sum(total)
    if lane == 31:
        sums[warp, 0], sums[warp, 1], sums[warp, 2] = own, before, total
    cute.arch.sync_threads()
    position, all_counted = own - counts_here, Int32(0)
    for other_warp in cutlass.range(WARPS, unroll=4):
        if other_warp < warp:
            position += sums[other_warp, 0]
        position += sums[other_warp, 1]
        all_counted += sums[other_warp, 2]
    if row < rows:
        if counts_here == 0:
            position = all_counted + row - position
        order[position] = Int64(row)
        selected[position] = target[row]
    if start == 0:
        for k in cutlass.range(thread, counts.shape[0], THREADS, unroll=1):
            counts[k] = cutlass.min(cutlass.max(all_counted - k * chunk, 0), chunk)
