"""The entries that `project_exp` has sampled, in the order of columns, with their values."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.memory import SmemAllocator

from cutefce.cute_kernels import spec
from cutefce.cute_kernels.common.dsl import (
    LOG2_E,
    USE_PDL,
    current_stream,
    exp2,
    matrix,
    pdl_wait,
    vector,
)
from cutefce.cute_kernels.common.logit_transform import softcap_derivative
from cutefce.cute_kernels.common.sampling import HASH_BITS, column_of, number_of, pack


def compile_signature(kernel: spec.SortSamplesSpec) -> tuple[Any, tuple[Any, ...]]:
    """Return the host function of `kernel` and the arguments to compile it for."""
    rows = cute.sym_int()
    entries = matrix(Int64, rows, cute.sym_int(), aligned=False)
    vectors = vector(Int32, rows), vector(Float32, rows), vector(Float32, rows)
    row_scale = vector(Float32, rows) if kernel.softcap else None
    return SortSamples(kernel), (entries, *vectors, row_scale, current_stream())


class SortSamples:
    """The kernel and its launch."""

    def __init__(self, kernel: spec.SortSamplesSpec) -> None:
        self.size = kernel.size
        self.threads = min(max(kernel.size // 2, 32), 512)

    @cute.jit
    def __call__(
        self,
        entries: cute.Tensor,
        counts: cute.Tensor,
        threshold: cute.Tensor,
        reference: cute.Tensor,
        row_scale: cute.Tensor | None,
        stream: Any,
    ) -> None:
        """Sort entries (N, K) by column, and put e/q in the place of u.

        e = exp(u - ρ) with `reference` ρ (N,), with softcap times 1 - (u/κ)², with `row_scale`
        κ (N,); q is 1 or e over what `threshold` (N,) says.  Of a row with more than K entries,
        `counts` (N,) becomes -1; K is at most the spec's size.
        """
        self.kernel(entries, counts, threshold, reference, row_scale).launch(
            grid=[counts.shape[0], 1, 1], block=[self.threads, 1, 1], stream=stream, **USE_PDL
        )

    @cute.kernel
    def kernel(
        self,
        entries: cute.Tensor,
        counts: cute.Tensor,
        threshold: cute.Tensor,
        reference: cute.Tensor,
        row_scale: Any,
    ) -> None:
        """Sort one row a block."""
        smem = SmemAllocator()
        sorted_entries = smem.allocate_tensor(Int64, cute.make_layout(self.size), 16)
        thread = cute.arch.thread_idx()[0]
        pdl_wait()
        row = cute.arch.block_idx()[0]
        slots, count = entries[row, None], counts[row]
        if count > entries.shape[1]:
            cute.arch.sync_threads()  # all have read the count
            if thread == 0:
                counts[row] = Int32(-1)
        elif count > 0:
            least, base = threshold[row] + HASH_BITS, reference[row] * LOG2_E
            inverse_scale = Float32(0.0)
            if cutlass.const_expr(row_scale is not None):
                inverse_scale = cute.arch.rcp_approx(row_scale[row])
            for i in cutlass.range(thread, self.size, self.threads, unroll=1):
                entry = Int64((1 << 63) - 1)
                if i < count:
                    entry = slots[i]
                    u = number_of(entry)
                    value = exp2(u * LOG2_E - base)
                    if cutlass.const_expr(row_scale is not None):
                        value *= softcap_derivative(u, inverse_scale)
                    value = cute.arch.fmax(value, exp2(least - base))
                    entry = pack(column_of(entry), value)
                sorted_entries[i] = entry
            self.sort(sorted_entries, thread, count)
            for i in cutlass.range(thread, count, self.threads, unroll=1):
                slots[i] = sorted_entries[i]

    @cute.jit
    def sort(self, entries: cute.Tensor, thread: Int32, count: Int32) -> None:
        """Sort by a bitonic network over the smallest power of 2 that holds `count`."""
        for level in cutlass.range_constexpr(self.size.bit_length() - 1):
            if 1 << level < count:
                self.merge(entries, thread, level)
        cute.arch.sync_threads()

    @cute.jit
    def merge(self, entries: cute.Tensor, thread: Int32, level: int) -> None:
        """Merge pairs of sorted runs of 2^level entries."""
        for step in cutlass.range_constexpr(level, -1, -1):
            distance = 1 << step
            cute.arch.sync_threads()
            for pair in cutlass.range(thread, self.size // 2, self.threads, unroll=1):
                low = pair // distance * 2 * distance + pair % distance
                high = low + distance
                if cutlass.const_expr(step == level):  # the second run is read backwards
                    high = low ^ (2 * distance - 1)
                first, second = entries[low], entries[high]
                if first > second:
                    entries[low], entries[high] = second, first
