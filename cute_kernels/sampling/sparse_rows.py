"""Products of sampled entries and a matrix: dX and dW without the entries that were left out.

    dX_i = s_i Σ_k value_ik w_(column_ik) + c_i w_(y_i)          over the entries of row i
    dW_v = Σ_k value_vk h_(token_vk)                             over the list of class v
           NaN if any row's value is, as with exact gradients
    dbias_v = Σ_k value_vk

A warp computes a sum, in the order of its entries, for some features at a time; blocks compute
these features of all rows before the next ones, so that they stay in the L2 cache.  The warps of a
block share long sums: each adds a part, and the parts are added in order.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.memory import SmemAllocator

from cutefce.cute_kernels.common.dsl import DTYPES, matrix, pdl_wait, vector
from cutefce.cute_kernels.common.launch import Signature, row_launch
from cutefce.cute_kernels.common.row_vectors import (
    clamped,
    load_fp32,
    mapped,
    row_vectors,
    store_rounded,
    widened,
)
from cutefce.cute_kernels.common.sampling import column_of, number_of
from cutefce.cute_kernels.integers import ceil_div
from cutefce.cute_kernels.spec import sampling as spec


class RowLists(NamedTuple):
    """The launch argument of dX: entries of rows, and what makes dX of their sums."""

    entries: cute.Tensor
    """(N, K) int64, see `sampling.sort_samples`."""
    counts: cute.Tensor
    """(N,) int32, -1 for none."""
    scale: cute.Tensor
    """s (N,)"""
    target_scale: cute.Tensor
    """c (N,)"""
    target: cute.Tensor
    """y (N,) int64, clamped to the classes."""
    order: cute.Tensor
    """(N,) int64"""
    scatters: Int32
    """Whether row i of the entries is row `order`_i of dX."""


class ClassLists(NamedTuple):
    """The launch argument of dW, see `sampling.list_samples`."""

    entries: cute.Tensor
    """(M,) int64: tokens and values."""
    ends: cute.Tensor
    """(1 + V,) int32: 0, and where the list of each class ends."""
    start: cute.Tensor
    """(1,) float32 that sums begin with: 0, or NaN where a row's gradient is not defined."""
    bias: cute.Tensor | None
    """dbias (V,), None without it."""


def compile_signature(kernel: spec.SparseRowsSpec) -> Signature:
    """Return the host function of `kernel` and the arguments to compile it for."""
    dtype, rows, hidden = DTYPES[kernel.dtype], cute.sym_int(), cute.sym_int(divisibility=8)
    bias = vector(Float32, rows) if kernel.bias else None
    of_classes = vector(Int64, cute.sym_int()), vector(Int32, cute.sym_int()), vector(Float32, 1)
    lists: Any = ClassLists(*of_classes, bias)
    if kernel.wrt == "hidden":
        scales = vector(Float32, rows), vector(Float32, rows)
        entries = matrix(Int64, rows, cute.sym_int(), aligned=False)
        places = vector(Int64, rows), vector(Int64, rows), Int32(0)
        lists = RowLists(entries, vector(Int32, rows), *scales, *places)
    assert kernel.wrt == "weight" or not (kernel.adds or kernel.bias)
    sums = SparseRows(kernel)
    return row_launch(
        sums.kernel,
        sums.blocks,
        warps=kernel.WARPS,
        launch_options=sums.occupancy,
        out=matrix(DTYPES[kernel.out or kernel.dtype], rows, hidden),
        table=matrix(dtype, cute.sym_int(), hidden),
        lists=lists,
    )


class SparseRows:
    """The kernel and its launch."""

    def __init__(self, kernel: spec.SparseRowsSpec) -> None:
        self.is_hidden, self.bias = kernel.wrt == "hidden", kernel.bias
        self.least = 1 if kernel.adds else 0  # entries of a row that is written
        self.vectors, self.warps, self.long = kernel.vectors, kernel.WARPS, kernel.long
        self.lists_per_warp = kernel.lists_per_warp
        self.lists_per_block = self.warps * self.lists_per_warp
        self.batch = kernel.loads // kernel.vectors
        self.width = 32 * kernel.vectors  # in vectors of 8 features
        self.occupancy: dict[str, int] = {}
        if kernel.blocks > 1:
            # of 228 KiB, for the sums of blocks' warps, in percent
            used = kernel.blocks * (kernel.WARPS * self.width * 32 + 1024) * 100
            carveout = min(100, ceil_div(used, 228 << 10))
            self.occupancy = {
                "min_blocks_per_mp": kernel.blocks,
                "preferred_smem_carveout": carveout,
            }

    def blocks(self, operands: Any) -> Any:
        """Return the thread blocks, and those of a slab."""
        out, _, _ = operands
        slabs = (out.shape[1] // 8 + self.width - 1) // self.width
        blocks = (out.shape[0] + self.lists_per_block - 1) // self.lists_per_block
        return slabs * blocks, blocks

    @cute.kernel
    def kernel(self, operands: Any, blocks: Int32) -> None:
        """Write or add to out, dX (N, D) or dW (V, D); `table` is w (V, D) or h (M, D).

        A thread block computes the features of a slab of its rows, then those of its long lists.
        """
        out, table, lists = operands
        smem = SmemAllocator()
        layout = cute.make_layout((8, self.width, self.warps))
        partials = smem.allocate_tensor(Float32, layout, 16)
        totals = smem.allocate_tensor(Float32, cute.make_layout(self.warps), 16)
        long_rows = smem.allocate_tensor(Int32, cute.make_layout(self.lists_per_block), 16)
        long_count = smem.allocate_tensor(Int32, cute.make_layout(1), 4)
        warp, lane = cute.arch.make_warp_uniform(cute.arch.warp_idx()), cute.arch.lane_idx()
        if cute.arch.thread_idx()[0] == 0:
            long_count[0] = Int32(0)
        pdl_wait()
        cute.arch.sync_threads()
        initial = Float32(0.0)
        if cutlass.const_expr(not self.is_hidden):
            initial = lists.start[0]
        block = cute.arch.block_idx()[0]
        slab, rows = block // blocks * self.width, out.shape[0]
        first, stride = block % blocks * self.warps + warp, blocks * self.warps
        if cutlass.const_expr(not self.is_hidden):
            # neighbors, of which many may be long, are in different blocks
            first = block % blocks + warp * blocks
        own_begin, own_count = Int32(0), Int32(0)
        if lane < self.lists_per_warp and first + lane * stride < rows:
            own_begin, own_count = self.bounds(lists, first + lane * stride)
        for i in cutlass.range(self.lists_per_warp, unroll=1):
            row = first + i * stride
            begin = cute.arch.shuffle_sync(own_begin, i)
            count = cute.arch.shuffle_sync(own_count, i)
            if row < rows:
                if count > self.long:
                    if lane == 0:
                        place = cute.arch.atomic_add(
                            long_count.iterator, Int32(1), sem="relaxed", scope="cta"
                        )
                        long_rows[place] = row
                elif count >= self.least or initial != 0.0:
                    acc, total = self.sum(table, lists, row, begin, Int32(0), count, slab)
                    self.add_initial(acc, total, initial)
                    self.write_total(total, lists, row, slab)
                    self.write(acc, out, table, lists, row, slab)
        cute.arch.sync_threads()
        for i in cutlass.range(long_count[0], unroll=1):
            row = long_rows[i]
            begin, count = self.bounds(lists, row)
            share = (count + self.warps - 1) // self.warps
            start = cutlass.min(warp * share, count)
            end = cutlass.min(start + share, count)
            acc, total = self.sum(table, lists, row, begin, start, end, slab)
            self.add_warps((acc, total), (partials, totals), warp, lane)
            if warp == 0:
                self.add_initial(acc, total, initial)
                self.write_total(total, lists, row, slab)
                self.write(acc, out, table, lists, row, slab)
            cute.arch.sync_threads()

    @cute.jit
    def bounds(self, lists: Any, row: Int32) -> Any:
        """Return where the entries of a row begin, relative to its first slot, and their number."""
        if cutlass.const_expr(self.is_hidden):
            return Int32(0), cutlass.max(lists.counts[row], 0)
        begin = lists.ends[row]
        return begin, lists.ends[row + 1] - begin

    @cute.jit
    def entry(self, lists: Any, row: Int32, index: Int32) -> Int64:
        """Return an entry."""
        if cutlass.const_expr(self.is_hidden):
            return lists.entries[row, index]
        return lists.entries[index]

    @cute.jit
    def sum(
        self,
        table: cute.Tensor,
        lists: Any,
        row: Int32,
        begin: Int32,
        start: Int32,
        end: Int32,
        slab: Int32,
    ) -> Any:
        """Return the sum of the entries from `start` to `end` of a row, and that of their values.

        The first is (8, vectors) float32.  While one batch of entries is added, the next is loaded:
        the compiler would not keep many loads in flight by itself.
        """
        lane = cute.arch.lane_idx()
        acc = cute.make_rmem_tensor((8, self.vectors), Float32)
        acc.fill(0.0)
        total = cute.make_rmem_tensor((1,), Float32)
        total.fill(0.0)
        if start < end:
            count, first = end - start, begin + start
            buffers = self.buffer(table), self.buffer(table)
            ahead = self.entry(lists, row, first + cutlass.min(lane, count - 1))
            self.load(buffers[0], ahead, table, count, slab)
            ahead = self.entry(lists, row, first + cutlass.min(self.batch + lane, count - 1))
            for pair in cutlass.range(0, count, 2 * self.batch, unroll=1):
                for turn in cutlass.range_constexpr(2):
                    place = pair + (turn + 1) * self.batch
                    if place < count:
                        self.load(buffers[1 - turn], ahead, table, count - place, slab)
                        following = cutlass.min(place + self.batch + lane, count - 1)
                        ahead = self.entry(lists, row, first + following)
                    if place - self.batch < count:
                        self.add(acc, total, buffers[turn])
        return acc, total

    def buffer(self, table: cute.Tensor) -> Any:
        """Return registers for the vectors of a batch of entries and their factors."""
        vectors = cute.make_rmem_tensor((8, self.vectors, self.batch), table.element_type)
        return vectors, cute.make_rmem_tensor((self.batch,), Float32)

    @cute.jit
    def load(
        self, buffer: Any, entry: Int64, table: cute.Tensor, count: Int32, slab: Int32
    ) -> None:
        """Load the first of `count` entries into a buffer; `entry` is that of the lane's number."""
        (vectors, factors), lane = buffer, cute.arch.lane_idx()
        last_vector = table.shape[1] // 8 - 1
        for u in cutlass.range_constexpr(self.batch):
            source = cutlass.min(Int32(u), count - 1)
            index = cute.arch.shuffle_sync(column_of(entry), source)
            factor = cute.arch.shuffle_sync(number_of(entry), source)
            if count <= u:
                factor = Float32(0.0)
            factors[u] = factor
            of_table = row_vectors(table, index)
            for v in cutlass.range_constexpr(self.vectors):
                place = slab + v * 32 + lane
                from_table = of_table[None, cutlass.min(place, last_vector)]
                cute.autovec_copy(from_table, vectors[None, v, u])

    @cute.jit
    def add(self, acc: cute.Tensor, total: cute.Tensor, buffer: Any) -> None:
        """Add the entries of a buffer."""
        vectors, factors = buffer
        for u in cutlass.range_constexpr(self.batch):
            total[0] = total[0] + factors[u]
            for v in cutlass.range_constexpr(self.vectors):
                values = widened(vectors[None, v, u])
                for j in cutlass.range_constexpr(8):
                    acc[j, v] = acc[j, v] + factors[u] * values[j]

    @cute.jit
    def add_initial(self, acc: cute.Tensor, total: cute.Tensor, initial: Float32) -> None:
        """Add what sums begin with."""
        if cutlass.const_expr(not self.is_hidden):
            total[0] = total[0] + initial
            for v in cutlass.range_constexpr(self.vectors):
                for j in cutlass.range_constexpr(8):
                    acc[j, v] = acc[j, v] + initial

    @cute.jit
    def add_warps(self, sums: Any, memory: Any, warp: Int32, lane: Int32) -> None:
        """Add the sums of all warps, in order, to those of the first."""
        (acc, total), (partials, totals) = sums, memory
        totals[warp] = total[0]
        for v in cutlass.range_constexpr(self.vectors):
            cute.autovec_copy(acc[None, v], partials[None, v * 32 + lane, warp])
        cute.arch.sync_threads()
        if warp == 0:
            for other in cutlass.range(1, self.warps, unroll=1):
                total[0] = total[0] + totals[other]
                for v in cutlass.range_constexpr(self.vectors):
                    for j in cutlass.range_constexpr(8):
                        acc[j, v] = acc[j, v] + partials[j, v * 32 + lane, other]

    @cute.jit
    def write_total(self, total: cute.Tensor, lists: Any, row: Int32, slab: Int32) -> None:
        """Write the sum of a row's values."""
        if cutlass.const_expr(self.bias):
            before = Float32(0.0)
            if cutlass.const_expr(self.least):
                before = lists.bias[row]
            if slab == 0 and cute.arch.lane_idx() == 0:
                lists.bias[row] = before + total[0]

    @cute.jit
    def write(
        self, acc: Any, out: cute.Tensor, table: cute.Tensor, lists: Any, row: Int32, slab: Int32
    ) -> None:
        """Write a slab of a row of dX or dW."""
        lane, place = cute.arch.lane_idx(), Int64(row)
        scale, target_scale, of_target = Float32(1.0), Float32(0.0), None
        if cutlass.const_expr(self.is_hidden):
            scale, target_scale = lists.scale[row], lists.target_scale[row]
            of_target = row_vectors(table, clamped(lists.target[row], table))
            place = mapped(row, lists.order, lists.scatters)
        destination = row_vectors(out, place)
        for v in cutlass.range_constexpr(self.vectors):
            index = slab + v * 32 + lane
            if index < out.shape[1] // 8:
                values = cute.make_rmem_tensor((8,), Float32)
                for j in cutlass.range_constexpr(8):
                    values[j] = acc[j, v] * scale
                if target_scale != 0.0:
                    self.add_target(values, of_target, index, target_scale)
                if cutlass.const_expr(self.least):
                    before = load_fp32(destination, index)
                    for j in cutlass.range_constexpr(8):
                        values[j] = values[j] + before[j]
                store_rounded(values, destination, index)

    @cute.jit
    def add_target(
        self, values: cute.Tensor, of_target: Any, index: Int32, target_scale: Float32
    ) -> None:
        """Add a vector of the target's row to one of a row of dX."""
        if cutlass.const_expr(self.is_hidden):
            addends = load_fp32(of_target, index)
            for j in cutlass.range_constexpr(8):
                values[j] = values[j] + target_scale * addends[j]
