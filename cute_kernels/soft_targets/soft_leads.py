"""The class of the largest probability of each token's soft targets."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from cutefce.cute_kernels.common.dsl import matrix, pdl_wait, vector
from cutefce.cute_kernels.common.launch import WARPS, Signature, blocks_of, row_launch
from cutefce.cute_kernels.spec import rowwise as spec
from cutefce.cute_kernels.workspace import NO_CLASS

LARGEST = 3.4028234663852886e38
"""The largest float32 number."""


def compile_signature(_: spec.SoftLeadsSpec) -> Signature:
    """Return the host function and the arguments to compile it for."""
    rows, classes = cute.sym_int(), cute.sym_int()
    return row_launch(
        soft_leads_kernel,
        blocks_of("lead", WARPS),
        index=matrix(Int64, rows, classes, aligned=False),
        probs=matrix(Float32, rows, classes, aligned=False),
        lead=vector(Int64, rows),
        vocab=Int64(0),
        ignored=Int64(0),
    )


@cute.kernel
def soft_leads_kernel(operands: Any) -> None:
    """Write lead (N,): the first class (N, K) of the largest of `probs` (N, K).

    It is `ignored` if all of them are 0, and `NO_CLASS` if one is negative or not finite, or is of
    a class outside [0, vocab).  A warp has a row.
    """
    index, probs, lead, vocab, ignored = operands
    pdl_wait()
    row, lane = cute.arch.block_idx()[0] * WARPS + cute.arch.warp_idx(), cute.arch.lane_idx()
    if row < lead.shape[0]:
        largest, place, wrong = Float32(-1.0), Int32(0), Int32(0)
        for k in cutlass.range(lane, index.shape[1], 32, unroll=1):
            q, column, is_number = probs[row, k], index[row, k], Int32(0)
            if q >= 0.0 and q <= LARGEST:
                is_number = Int32(1)
            if is_number == 0:
                wrong = Int32(1)
            if q > 0.0 and (column < 0 or column >= vocab):
                wrong = Int32(1)
            if q > largest:
                largest, place = q, Int32(k)
        for step in cutlass.range_constexpr(5):
            other = cute.arch.shuffle_sync_bfly(largest, offset=1 << step)
            other_place = cute.arch.shuffle_sync_bfly(place, offset=1 << step)
            if other > largest or (other == largest and other_place < place):
                largest, place = other, other_place
        wrong = cute.arch.warp_reduction_sum(wrong)
        if lane == 0:
            result = Int64(NO_CLASS)
            if wrong == 0:
                result = index[row, place]
                if largest == 0.0:
                    result = ignored
            lead[row] = result
