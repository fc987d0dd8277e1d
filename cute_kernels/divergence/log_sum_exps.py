"""Log-sum-exps of rows, of logits or of partial sums: a number near the largest logit and a rest.

Both are kept apart, as their sum is rounded to the precision of the larger one.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.runtime import make_fake_compact_tensor

from cutefce.cute_kernels.common.dsl import LN_2, LOG2_E, exp2

LOWEST = -3.0e38
"""Below all logits but -inf, in units of ln 2."""


def sums_argument(rows: Any) -> Any:
    """Return what partial sums (2, R, P) of `rows` are compiled for, see `given_exps`."""
    return make_fake_compact_tensor(Float32, (2, rows, cute.sym_int()), stride_order=(2, 1, 0))


@cute.jit
def add_exps(top: Float32, total: Float32, logits: cute.Tensor) -> Any:
    """Return `top`, of logits times log2 e, and Σ 2^(logit log2 e - top), with more logits."""
    largest = logits[0]
    for i in cutlass.range_constexpr(1, cute.size(logits)):
        largest = cute.arch.fmax(largest, logits[i])
    largest = cute.arch.fmax(top, largest * LOG2_E)
    total = total * exp2(top - largest)
    for i in cutlass.range_constexpr(cute.size(logits)):
        total += exp2(logits[i] * LOG2_E - largest)
    return largest, total


@cute.jit
def given_exps(sums: cute.Tensor, thread: Int32, threads: int) -> Any:
    """Return those of `add_exps` of a thread's share of a row's `sums` (2, P) of its parts.

    These are a number t near the largest logit in units of ln 2, -inf if there is none, and
    Σ 2^(logit log2 e - t).
    """
    top, total = Float32(LOWEST), Float32(0.0)
    for i in cutlass.range(thread, sums.shape[1], threads, unroll=1):
        own = cute.arch.fmax(sums[0, i], Float32(LOWEST))
        largest = cute.arch.fmax(top, own)
        total = total * exp2(top - largest) + sums[1, i] * exp2(own - largest)
        top = largest
    return top, total


@cute.jit
def merged(a: Any, b: Any) -> Any:
    """Return the warp's top and sum of a, and those of b, from those of its threads."""
    results = []
    for top, total in (a, b):
        largest = cute.arch.warp_reduction_max(top)
        results += [largest, cute.arch.warp_reduction_sum(total * exp2(top - largest))]
    return tuple(results)


@cute.jit
def natural(top: Float32, total: Float32) -> Any:
    """Return (top, rest) in units of 1, which add up to the log-sum-exp of `add_exps`."""
    rounded = top * LN_2
    rest = cute.math.log2(total) + (top - rounded * LOG2_E)
    return rounded, rest * LN_2
