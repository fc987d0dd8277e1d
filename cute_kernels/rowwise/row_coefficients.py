"""Coefficients of each token in a backward, from the statistics of its forward."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.memory import SmemAllocator

from cutefce.cute_kernels.common.dsl import LN_2, matrix, pdl_wait, scalar, vector
from cutefce.cute_kernels.common.launch import Signature, blocks_of, row_launch
from cutefce.cute_kernels.problem import FLOAT16_TOTAL
from cutefce.cute_kernels.spec import rowwise as spec
from cutefce.cute_kernels.workspace import Coefficient, Stat

THREADS = spec.RowCoefficientsSpec.THREADS
WARPS = THREADS // 32


def compile_signature(kernel: spec.RowCoefficientsSpec) -> Signature:
    """Return the host function of `kernel` and the arguments to compile it for."""
    tokens = cute.sym_int()
    return row_launch(
        RowCoefficients(kernel).kernel,
        blocks_of("target", THREADS),
        warps=WARPS,
        stats=matrix(Float32, cute.sym_int(), tokens, aligned=False),
        target=vector(Int64, tokens),
        upstream=vector(Float32, cute.sym_int()),
        coefficients=matrix(Float32, kernel.planes, tokens, aligned=False),
        grad_scale=scalar(Float32),
        zeros=vector(Int32, cute.sym_int()),
        count=vector(Int32, cute.sym_int()),
        selects=Int32(0),
        ignored=Int64(0),
        mean=Int32(0),
    )


class RowCoefficients:
    """The kernel."""

    def __init__(self, kernel: spec.RowCoefficientsSpec) -> None:
        self.in_reference, self.narrow = kernel.in_reference, kernel.narrow
        self.total = FLOAT16_TOTAL if kernel.narrow else 1.0

    @cute.kernel
    def kernel(self, operands: Any) -> None:
        """Write coefficients (P, N) and dW's factor `grad_scale` () from stats (S, N).

        With g_i of `upstream`, (1,) or (N,), the gradient by the logit of class v is g_i e_iv / T_i
        for all but the target, and -g_i S_i / T_i for that; 0 where target (N,) is `ignored`.  If
        `mean`, g_i is over the number of tokens that are not: `count`_0 if `selects`.  Fills
        `zeros`, int32, with 0.

        Factors in the reference make exponentials probabilities times a total, and dW's factor
        g over the total.  Otherwise it is 1, for float16 the largest factor.  A thread has a token.
        """
        stats, target, upstream, coefficients, grad_scale, zeros, *more = operands
        count, selects, ignored, mean = more
        smem = SmemAllocator()
        parts = smem.allocate_tensor(Float32, cute.make_layout((WARPS, 2)), 16)
        pdl_wait()
        tokens, threads = target.shape[0], cute.arch.grid_dim()[0] * THREADS
        token = cute.arch.block_idx()[0] * THREADS + cute.arch.thread_idx()[0]
        for i in cutlass.range(token, zeros.shape[0], threads, unroll=1):
            zeros[i] = Int32(0)
        factor = Float32(1.0)
        if mean != 0:
            number = Float32(0.0)
            if selects != 0:
                number = Float32(count[0])
            if selects == 0:
                number = count_active(target, ignored, parts)
            factor = 1.0 / cute.arch.fmax(number, Float32(1.0))
        dw_scale = Float32(1.0)
        if cutlass.const_expr(self.in_reference):
            dw_scale = upstream[0] * factor / self.total
        elif cutlass.const_expr(self.narrow):
            dw_scale = largest_scale(stats, target, upstream, factor, (ignored, parts))
        if token == 0:
            grad_scale[()] = dw_scale
        if token < tokens:
            scale, own = Float32(0.0), self.total
            if cutlass.const_expr(not self.in_reference):
                own = upstream_of(upstream, token) * factor
            if target[token] != ignored:
                scale = own / stats[Stat.SUM_EXP, token]
            at_target = -scale * stats[Stat.SUM_EXP_OTHERS, token]
            dx, dw = (scale, at_target), (scale, at_target)
            if cutlass.const_expr(self.in_reference):
                relative = stats[Stat.REFERENCE, token] - cute.math.log2(scale) * LN_2
                coefficients[Coefficient.REFERENCE, token] = relative
                dx_scale = Float32(0.0)
                if target[token] != ignored:
                    dx_scale = dw_scale
                dx = dx_scale, at_target * dx_scale
            elif cutlass.const_expr(self.narrow):
                dw = scale / dw_scale, at_target / dw_scale
            for i in cutlass.range_constexpr(2):
                coefficients[Coefficient.DX_SCALE + i, token] = dx[i]
                if cutlass.const_expr(self.in_reference or self.narrow):
                    coefficients[Coefficient.DW_SCALE + i, token] = dw[i]


@cute.jit
def upstream_of(upstream: cute.Tensor, token: Int32) -> Float32:
    """Return the upstream gradient of a token, which may be that of all."""
    place = token
    if upstream.shape[0] == 1:
        place = Int32(0)
    return upstream[place]


@cute.jit
def count_active(target: cute.Tensor, ignored: Int64, parts: cute.Tensor) -> Float32:
    """Return how many targets are not `ignored`; all threads of a block call this."""
    count = Int32(0)
    for other in cutlass.range(cute.arch.thread_idx()[0], target.shape[0], THREADS, unroll=8):
        count += Int32(target[other] != ignored)
    count, warp_here = cute.arch.warp_reduction_sum(count), cute.arch.warp_idx()
    if cute.arch.lane_idx() == 0:
        parts[warp_here, 0] = Float32(count)
    cute.arch.sync_threads()
    total = Float32(0.0)
    for warp in cutlass.range_constexpr(WARPS):
        total += parts[warp, 0]
    return total


@cute.jit
def largest_scale(
    stats: cute.Tensor,
    target: cute.Tensor,
    upstream: cute.Tensor,
    factor: Float32,
    block: Any,
) -> Float32:
    """Return the largest factor of all tokens, 1 if all are 0; all threads of a block call this.

    `block` are the ignored target and shared memory (WARPS, 2).
    """
    ignored, parts = block
    largest = Float32(0.0)
    for other in cutlass.range(cute.arch.thread_idx()[0], target.shape[0], THREADS, unroll=4):
        if target[other] != ignored:
            scale = upstream_of(upstream, other) * factor / stats[Stat.SUM_EXP, other]
            largest = cute.arch.fmax(largest, cute.arch.fmax(scale, -scale))
    largest, warp_here = cute.arch.warp_reduction_max(largest), cute.arch.warp_idx()
    if cute.arch.lane_idx() == 0:
        parts[warp_here, 1] = largest
    cute.arch.sync_threads()
    for warp in cutlass.range_constexpr(WARPS):
        largest = cute.arch.fmax(largest, parts[warp, 1])
    if largest == 0.0:
        largest = Float32(1.0)
    return largest
