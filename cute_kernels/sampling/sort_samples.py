"""The entries that `project_exp` has sampled, in the order of columns, with their values.

Those of rows whose estimate of lse was too low are decided on again, with lse.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32
from cutlass.memory import SmemAllocator

from cutefce.cute_kernels.common.dsl import LOG2_E, exp2, matrix, pdl_wait, vector
from cutefce.cute_kernels.common.launch import Signature, blocks_of, row_launch
from cutefce.cute_kernels.common.logit_transform import softcap_derivative
from cutefce.cute_kernels.common.sampling import (
    column_of,
    final_threshold,
    is_kept,
    mix,
    number_of,
    pack,
)
from cutefce.cute_kernels.common.sort import bitonic_sort
from cutefce.cute_kernels.spec import sampling as spec
from cutefce.cute_kernels.spec.sampling import COLUMN_FACTOR, HASH_BITS

LAST = (1 << 63) - 1
"""What is no entry is sorted to the end."""


def compile_signature(kernel: spec.SortSamplesSpec) -> Signature:
    """Return the host function of `kernel` and the arguments to compile it for."""
    rows, sorter = cute.sym_int(), SortSamples(kernel)
    return row_launch(
        sorter.kernel,
        blocks_of("counts"),
        warps=sorter.threads // 32,
        entries=matrix(Int64, rows, cute.sym_int(), aligned=False),
        counts=vector(Int32, rows),
        threshold=vector(Float32, rows),
        row_hash=vector(Int32, rows),
        reference=vector(Float32, rows),
        sum_exp=vector(Float32, rows),
        row_scale=vector(Float32, rows) if kernel.softcap else None,
        log2_samples=Float32(0.0),
        shard_start=Int32(0),
    )


class SortSamples:
    """The kernel."""

    def __init__(self, kernel: spec.SortSamplesSpec) -> None:
        self.size = kernel.size
        self.threads = min(max(kernel.size // 4, 32), 256)

    @cute.kernel
    def kernel(self, operands: Any) -> None:
        """Sort entries (N, K) by column, and put e/q in the place of u; a row a block.

        e = exp(u - ρ) with `reference` ρ (N,), with softcap times 1 - (u/κ)², with `row_scale`
        κ (N,); q is 1 or e over what the final threshold says, see `common.sampling`, for the
        estimates `threshold` (N,) and lse = ρ + log `sum_exp`.  Of a row with more than K entries,
        `counts` (N,) becomes -1; K is at most the spec's size.
        """
        entries, counts, threshold, row_hash, reference, sum_exp, row_scale, *numbers = operands
        log2_samples, shard_start = numbers
        smem = SmemAllocator()
        sorted_entries = smem.allocate_tensor(Int64, cute.make_layout(self.size), 16)
        kept_count = smem.allocate_tensor(Int32, cute.make_layout(1), 4)
        thread = cute.arch.thread_idx()[0]
        if thread == 0:
            kept_count[0] = Int32(0)
        pdl_wait()
        row = cute.arch.block_idx()[0]
        slots, count = entries[row, None], counts[row]
        cute.arch.sync_threads()  # all have read the count
        if count > entries.shape[1]:
            if thread == 0:
                counts[row] = Int32(-1)
        elif count > 0:
            base = reference[row] * LOG2_E
            lse = base + cute.math.log2(sum_exp[row], fastmath=True)
            final = final_threshold(threshold[row], lse, log2_samples)
            least, inverse_scale = exp2(final + HASH_BITS - base), None
            if cutlass.const_expr(row_scale is not None):
                inverse_scale = cute.arch.rcp_approx(row_scale[row])
            own_kept, half = Int32(0), Int32(1)
            for level in cutlass.range_constexpr(1, self.size.bit_length() - 1):
                if 1 << level < count:
                    half = Int32(1 << level)
            for i in cutlass.range(thread, 2 * half, self.threads, unroll=1):
                entry = Int64(LAST)
                if i < count:
                    column, u = column_of(slots[i]), number_of(slots[i])
                    key = Uint32(column + shard_start) * Uint32(COLUMN_FACTOR)
                    if is_kept(mix(key ^ Uint32(row_hash[row])), u, final, inverse_scale):
                        value = exp2(u * LOG2_E - base)
                        if cutlass.const_expr(row_scale is not None):
                            value *= softcap_derivative(u, inverse_scale)
                        entry = pack(column, cute.arch.fmax(value, least))
                        own_kept += 1
                sorted_entries[i] = entry
            if own_kept > 0:
                cute.arch.atomic_add(kept_count.iterator, own_kept, sem="relaxed", scope="cta")
            bitonic_sort(sorted_entries, half, self.size, (thread, self.threads))
            kept = kept_count[0]
            for i in cutlass.range(thread, kept, self.threads, unroll=1):
                slots[i] = sorted_entries[i]
            if thread == 0:
                counts[row] = kept
