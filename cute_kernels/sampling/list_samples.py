"""The sampled entries of every class, and its targets, in the order of tokens: the lists of dW.

Five kernels: zeros, the number of entries of each class, where its list begins, the entries in any
order, and their order.  Counters and places are integers that atomic operations change, so the
result depends on no order of events.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.memory import SmemAllocator

from cutefce.cute_kernels.common.dsl import USE_PDL, matrix, pdl_wait, vector
from cutefce.cute_kernels.common.launch import HostFunction, Signature
from cutefce.cute_kernels.common.packed_bits import QUIET_NAN
from cutefce.cute_kernels.common.sampling import column_of, number_of, pack
from cutefce.cute_kernels.common.scan import inclusive_sum, sums_of_warps
from cutefce.cute_kernels.spec import sampling as spec

WARPS = 8
"""Warps of a block, except for the scan's."""
SCAN_WARPS, SCAN_COLUMNS = 32, 4
"""Of a block, and classes of a thread."""
LISTS_PER_WARP = 8
"""Lists that a warp orders one after the other."""
INFINITE = 0x7F800000
"""The exponent of what is not finite, and the bits of infinity."""


class Rows(NamedTuple):
    """The entries and coefficients of rows."""

    entries: cute.Tensor
    """(N, K) int64, see `sampling.sort_samples`."""
    counts: cute.Tensor
    """(N,) int32, -1 for none."""
    target: cute.Tensor
    """y (N,) int64"""
    scale: cute.Tensor
    """s (N,)"""
    target_scale: cute.Tensor
    """c (N,)"""
    order: cute.Tensor
    """(N,) int64"""
    maps: Int32
    """Whether row i is token `order`_i."""
    reference: cute.Tensor
    """ρ (N,), not finite where a row's gradient is not defined, as s is."""
    ignored: Int64
    """The target of rows that do not count."""


class Lists(NamedTuple):
    """Results, and what is between the kernels; M is at least N (K + 1), which is below 2³¹."""

    entries: cute.Tensor
    """(M,) int64: token and factor, those of one class after the other."""
    ends: cute.Tensor
    """(1 + V,) int32: 0, and where the list of each class ends."""
    slots: cute.Tensor
    """(M,) int32: row · (K + 1) + entry of the row, K for its target."""
    class_counts: cute.Tensor
    """(V,) int32"""
    start: cute.Tensor
    """(1,) float32: 0, or NaN where the gradient of a row that counts is not defined."""


def compile_signature(kernel: spec.ListSamplesSpec) -> Signature:
    """Return the host function of `kernel` and the arguments to compile it for."""
    rows, total = cute.sym_int(), cute.sym_int()
    entries = matrix(Int64, rows, cute.sym_int(), aligned=False)
    scales = vector(Float32, rows), vector(Float32, rows)
    places = vector(Int64, rows), Int32(0)
    of_targets = vector(Float32, rows), Int64(0)
    target = vector(Int64, rows)
    of_rows = Rows(entries, vector(Int32, rows), target, *scales, *places, *of_targets)
    offsets = vector(Int32, cute.sym_int()), vector(Int32, total), vector(Int32, cute.sym_int())
    lists = Lists(vector(Int64, total), *offsets, vector(Float32, 1))
    return ListSamples(kernel).signature(rows=of_rows, lists=lists)


class ListSamples(HostFunction):
    """The kernels and their launches."""

    def __init__(self, kernel: spec.ListSamplesSpec) -> None:
        self.short, self.table_rows = kernel.short, kernel.table_rows

    @cute.jit
    def launch(self, operands: Any, stream: Any) -> None:
        """List s_i · value of entry (i, v), and c_i if v = y_i, of each class v in the order of i.

        Leaves out what a coefficient of 0 multiplies, and targets that are no class.
        """
        rows, lists = operands
        launch = {"stream": stream, **USE_PDL}
        block, classes = [32 * WARPS, 1, 1], lists.class_counts.shape[0]
        scan_classes = 32 * SCAN_WARPS * SCAN_COLUMNS
        class_blocks = (classes + 32 * WARPS - 1) // (32 * WARPS)
        row_blocks = (rows.counts.shape[0] + WARPS - 1) // WARPS
        scan_blocks = (classes + scan_classes - 1) // scan_classes
        lists_per_block = WARPS * LISTS_PER_WARP
        order_blocks = (classes + lists_per_block - 1) // lists_per_block
        clear_kernel(lists.class_counts, lists.start).launch(
            grid=[class_blocks, 1, 1], block=block, **launch
        )
        visit_kernel(rows, lists, False).launch(grid=[row_blocks, 1, 1], block=block, **launch)
        scan_kernel(lists.class_counts, lists.ends).launch(
            grid=[scan_blocks, 1, 1], block=[32 * SCAN_WARPS, 1, 1], **launch
        )
        visit_kernel(rows, lists, True).launch(grid=[row_blocks, 1, 1], block=block, **launch)
        self.order_kernel(rows, lists).launch(grid=[order_blocks, 1, 1], block=block, **launch)

    @cute.kernel
    def order_kernel(self, rows: Rows, lists: Lists) -> None:
        """Order several lists a warp, then the block's long ones."""
        smem = SmemAllocator()
        short = smem.allocate_tensor(Int32, cute.make_layout((self.short, WARPS)), 16)
        table = smem.allocate_tensor(Int32, cute.make_layout(self.table_rows), 16)
        long_lists = smem.allocate_tensor(Int32, cute.make_layout(WARPS * LISTS_PER_WARP), 16)
        parts = smem.allocate_tensor(Int32, cute.make_layout(WARPS), 16)
        long_count = smem.allocate_tensor(Int32, cute.make_layout(1), 4)
        warp, lane = cute.arch.make_warp_uniform(cute.arch.warp_idx()), cute.arch.lane_idx()
        if cute.arch.thread_idx()[0] == 0:
            long_count[0] = Int32(0)
        pdl_wait()
        cute.arch.sync_threads()
        # neighbors, of which many may be long, are in different blocks
        blocks, classes = cute.arch.grid_dim()[0], lists.class_counts.shape[0]
        first, stride = cute.arch.block_idx()[0] + warp * blocks, blocks * WARPS
        own_begin, own_end = Int32(0), Int32(0)
        if lane < LISTS_PER_WARP and first + lane * stride < classes:
            own = first + lane * stride
            own_begin, own_end = lists.ends[own], lists.ends[own + 1]
        for i in cutlass.range(LISTS_PER_WARP, unroll=1):
            begin = cute.arch.shuffle_sync(own_begin, i)
            length = cute.arch.shuffle_sync(own_end, i) - begin
            if length > self.short:
                if lane == 0:
                    place = cute.arch.atomic_add(
                        long_count.iterator, Int32(1), sem="relaxed", scope="cta"
                    )
                    long_lists[place] = first + i * stride
            else:
                self.order_short(rows, lists, short[None, warp], (begin, length))
        cute.arch.sync_threads()
        for i in cutlass.range(long_count[0], unroll=1):
            index = long_lists[i]
            self.order_long(rows, lists, table, parts, (lists.ends[index], lists.ends[index + 1]))

    @cute.jit
    def order_short(self, rows: Rows, lists: Lists, slots: cute.Tensor, span: Any) -> None:
        """Order the list of `span`, (begin, length), by one warp with memory for its `slots`."""
        (begin, length), lane = span, cute.arch.lane_idx()
        for i in cutlass.range(lane, length, 32, unroll=1):
            slots[i] = lists.slots[begin + i]
        cute.arch.sync_warp()
        for i in cutlass.range(lane, length, 32, unroll=1):
            own, rank = slots[i], Int32(0)
            for j in cutlass.range(length, unroll=8):
                rank += Int32(slots[j] < own)
            write(rows, lists, begin + rank, own)
        cute.arch.sync_warp()

    @cute.jit
    def order_long(
        self, rows: Rows, lists: Lists, table: cute.Tensor, parts: cute.Tensor, span: Any
    ) -> None:
        """Order the list from `span`_0 to `span`_1 by a block; no row has two in it."""
        (begin, end), width = span, rows.entries.shape[1] + 1
        thread, warp, lane = cute.arch.thread_idx()[0], cute.arch.warp_idx(), cute.arch.lane_idx()
        place, own_rows = begin, self.table_rows // (32 * WARPS)
        for start in cutlass.range(0, rows.counts.shape[0], self.table_rows, unroll=1):
            for i in cutlass.range(thread, self.table_rows, 32 * WARPS, unroll=8):
                table[i] = Int32(-1)
            cute.arch.sync_threads()
            for i in cutlass.range(begin + thread, end, 32 * WARPS, unroll=4):
                slot = lists.slots[i]
                row = slot // width - start
                if row >= 0 and row < self.table_rows:
                    table[row] = slot
            cute.arch.sync_threads()
            found = Int32(0)
            for i in cutlass.range(own_rows, unroll=8):
                found += Int32(table[thread * own_rows + i] >= 0)
            up_to = inclusive_sum(found, lane)
            if lane == 31:
                parts[warp] = up_to
            cute.arch.sync_threads()
            own_place, next_place = place + up_to - found, place
            for i in cutlass.range_constexpr(WARPS):
                next_place += parts[i]
                if i < warp:
                    own_place += parts[i]
            # all threads write entries, which takes many loads, whoever found them
            for i in cutlass.range(own_rows, unroll=8):
                slot = table[thread * own_rows + i]
                if slot >= 0:
                    lists.entries[own_place] = Int64(slot)
                    own_place += 1
            cute.arch.sync_threads()
            for i in cutlass.range(place + thread, next_place, 32 * WARPS, unroll=4):
                write(rows, lists, i, Int32(lists.entries[i]))
            place = next_place
            cute.arch.sync_threads()


@cute.kernel
def clear_kernel(class_counts: cute.Tensor, start: cute.Tensor) -> None:
    """Write a zero a thread."""
    pdl_wait()
    index = cute.arch.block_idx()[0] * 32 * WARPS + cute.arch.thread_idx()[0]
    if index < class_counts.shape[0]:
        class_counts[index] = Int32(0)
    if index == 0:
        start[0] = Float32(0.0)


@cute.kernel
def visit_kernel(rows: Rows, lists: Lists, places: cutlass.Constexpr[bool]) -> None:
    """Count the entries of a row a warp, or place them behind those of their classes."""
    pdl_wait()
    row = cute.arch.block_idx()[0] * WARPS + cute.arch.warp_idx()
    if row < rows.counts.shape[0]:
        lane, width = cute.arch.lane_idx(), rows.entries.shape[1] + 1
        slots, first = rows.entries[row, None], row * width
        if rows.scale[row] != 0.0:
            for i in cutlass.range(lane, rows.counts[row], 32, unroll=4):
                visit(lists, column_of(slots[i]), first + i, places)
        index = rows.target[row]
        is_class = index >= 0 and index < lists.class_counts.shape[0]
        if lane == 0 and is_class and rows.target_scale[row] != 0.0:
            visit(lists, Int32(index), first + width - 1, places)
        if cutlass.const_expr(not places):
            counts = index != rows.ignored
            if lane == 0 and counts and not_finite(rows.scale[row], rows.reference[row]):
                lists.start[0] = Int32(QUIET_NAN).bitcast(Float32)


@cute.jit
def not_finite(a: Float32, b: Float32) -> Any:
    """Return whether a or b is infinite or NaN."""
    exponents = Int32(INFINITE)
    is_a = a.bitcast(Int32) & exponents == exponents
    return is_a or b.bitcast(Int32) & exponents == exponents


@cute.jit
def visit(lists: Lists, column: Int32, slot: Int32, places: bool) -> None:
    """Count an entry, or place it."""
    add = {"sem": "relaxed", "scope": "gpu"}
    if cutlass.const_expr(places):
        end = lists.ends.iterator + 1 + column
        lists.slots[cute.arch.atomic_add(end, Int32(1), **add)] = slot
    else:
        counter = lists.class_counts.iterator + column
        cute.arch.red(counter, Int32(1), op="add", dtype="s32", **add)


@cute.kernel
def scan_kernel(class_counts: cute.Tensor, ends: cute.Tensor) -> None:
    """Write where the list of each class begins; every block adds what is before its classes."""
    thread, warp, lane = cute.arch.thread_idx()[0], cute.arch.warp_idx(), cute.arch.lane_idx()
    smem = SmemAllocator()
    parts = smem.allocate_tensor(Int32, cute.make_layout(SCAN_WARPS), 16)
    parts_before = smem.allocate_tensor(Int32, cute.make_layout(SCAN_WARPS), 16)
    pdl_wait()
    threads, classes = 32 * SCAN_WARPS, class_counts.shape[0]
    start = cute.arch.block_idx()[0] * threads * SCAN_COLUMNS
    before, own = Int32(0), cute.make_rmem_tensor((SCAN_COLUMNS,), Int32)
    for i in cutlass.range(thread, start, threads, unroll=8):
        before += class_counts[i]
    first, total = start + thread * SCAN_COLUMNS, Int32(0)
    for j in cutlass.range_constexpr(SCAN_COLUMNS):
        own[j] = Int32(0)
        if first + j < classes:
            own[j] = class_counts[first + j]
        total += own[j]
    up_to, before = inclusive_sum(total, lane), cute.arch.warp_reduction_sum(before)
    if lane == 31:
        parts[warp], parts_before[warp] = up_to, before
    cute.arch.sync_threads()
    in_warps, _ = sums_of_warps(parts, warp, lane)
    _, in_blocks = sums_of_warps(parts_before, warp, lane)
    begin = in_blocks + in_warps + up_to - total
    if first == 0:
        ends[0] = Int32(0)
    for j in cutlass.range_constexpr(SCAN_COLUMNS):
        if first + j < classes:
            ends[1 + first + j] = begin
        begin += own[j]


@cute.jit
def write(rows: Rows, lists: Lists, place: Int32, slot: Int32) -> None:
    """Write the entry of a slot to its place."""
    width = rows.entries.shape[1] + 1
    row = slot // width
    index, token = slot - row * width, row
    factor = rows.target_scale[row]
    if index < width - 1:
        factor = rows.scale[row] * number_of(rows.entries[row, index])
    if rows.maps != 0:
        token = Int32(rows.order[row])
    lists.entries[place] = pack(token, factor)
