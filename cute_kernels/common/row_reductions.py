"""Row reductions beside Σ exp, of the logits u of one partial, without the target's.

    entropy       Σ 2^x x / Σ 2^x - ρ·log2 e     with x = u·log2 e; 0 if no logit is finite
    sum_squares   log2 Σ 2^(2x) - 2 ρ·log2 e     -inf if no logit is finite
    argmax        the largest u, -inf if none is finite; its vocabulary entry, as a number

Each line is one plane of the output (K, N, P), argmax two; planes that are not asked for are left
out.  A row's accumulators are K registers in the same order.  Those of sums are relative to the
running maximum, as Σ exp is, so that they are exact for any logits.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from cutefce.cute_kernels.common.dsl import clamp, exp2
from cutefce.cute_kernels.variant import RowReductions

LOWEST_EXPONENT = -200.0
"""Replaces lower exponents where they are factors of 2^x = 0, above all -inf of masked logits."""


class RowReducer:
    """The reductions of one kernel; without any, accumulators are None and methods do nothing."""

    def __init__(self, options: RowReductions) -> None:
        self.options = options
        # the first plane of each
        self.entropy, self.squares = 0, int(options.entropy)
        self.argmax = self.squares + options.sum_squares

    @cute.jit
    def registers(self, rows: int) -> Any:
        """Return the accumulators (K, rows) of a thread's rows."""
        if cutlass.const_expr(not self.options.planes):
            return None
        return cute.make_rmem_tensor((self.options.planes, rows), Float32)

    @cute.jit
    def reset(self, registers: Any) -> None:
        """Initialize accumulators (K, rows)."""
        if cutlass.const_expr(self.options.planes):
            registers.fill(0.0)
        if cutlass.const_expr(self.options.argmax):
            registers[self.argmax, None].fill(-Float32.inf)

    @cute.jit
    def row(self, registers: Any, row: int) -> Any:
        """Return the accumulators (K,) of one row."""
        if cutlass.const_expr(not self.options.planes):
            return None
        return registers[None, row]

    @cute.jit
    def rescale(self, acc: Any, row_sum: Float32, exponent: Float32) -> None:
        """Change accumulators as `row_sum` becomes row_sum · 2^exponent."""
        scale = exp2(exponent)
        if cutlass.const_expr(self.options.entropy):
            exponent = cute.arch.fmax(exponent, LOWEST_EXPONENT)
            acc[self.entropy] = (acc[self.entropy] + row_sum * exponent) * scale
        if cutlass.const_expr(self.options.sum_squares):
            acc[self.squares] *= scale * scale

    @cute.jit
    def add(self, acc: Any, x: Float32, exp: Float32) -> None:
        """Add one column, whose 2^x is `exp`."""
        if cutlass.const_expr(self.options.entropy):
            acc[self.entropy] += exp * cute.arch.fmax(x, LOWEST_EXPONENT)
        if cutlass.const_expr(self.options.sum_squares):
            acc[self.squares] += exp * exp

    @cute.jit
    def update_argmax(self, acc: Any, u: cute.Tensor, u_max: Float32, columns: Any) -> None:
        """Take logits u, whose maximum is `u_max`, into account.

        `columns` are (vocabulary entry, offsets of its elements from it, which increase).
        """
        if cutlass.const_expr(self.options.argmax):
            previous_max = acc[self.argmax]
            if u_max > previous_max:
                first, offsets = columns
                offset = Int32(0)
                for i in cutlass.range_constexpr(cute.size(u) - 1, -1, -1):
                    if u[i] == u_max:
                        offset = Int32(offsets[i])
                acc[self.argmax] = u_max
                acc[self.argmax + 1] = Float32(first + offset)

    @cute.jit
    def combine_lanes(self, acc: Any, lanes: int) -> None:
        """Combine the accumulators of groups of lanes, a power of 2, relative to one maximum."""
        for step in cutlass.range_constexpr(lanes.bit_length() - 1):
            for plane in cutlass.range_constexpr(self.argmax):
                acc[plane] += cute.arch.shuffle_sync_bfly(acc[plane], offset=1 << step)
            if cutlass.const_expr(self.options.argmax):
                u_max, entry = acc[self.argmax], acc[self.argmax + 1]
                other_max = cute.arch.shuffle_sync_bfly(u_max, offset=1 << step)
                other = cute.arch.shuffle_sync_bfly(entry, offset=1 << step)
                if other_max > u_max or (other_max == u_max and other < entry):
                    acc[self.argmax] = other_max
                    acc[self.argmax + 1] = other

    @cute.jit
    def write(
        self, acc: Any, row_sum: Float32, distance: Float32, out: Any, row: Int32, partial: Int32
    ) -> None:
        """Write a row's planes to `out` (K, N, P).

        `row_sum` is bounded; `distance` is the maximum above the reference, in log2 units.
        """
        if cutlass.const_expr(self.options.entropy):
            mean = acc[self.entropy] * cute.arch.rcp_approx(row_sum)
            out[self.entropy, row, partial] = mean + finite(distance)
        if cutlass.const_expr(self.options.sum_squares):
            squares = cute.math.log2(bounded_sum(acc[self.squares]), fastmath=True)
            out[self.squares, row, partial] = 2.0 * distance + squares
        if cutlass.const_expr(self.options.argmax):
            out[self.argmax, row, partial] = acc[self.argmax]
            out[self.argmax + 1, row, partial] = acc[self.argmax + 1]


@cute.jit
def bounded_sum(row_sum: Float32, most: float = 1.0) -> Float32:
    """Return a sum of up to 2³¹ exponentials, the most columns: each to `most`, one at least 1.

    Beyond about 2²⁴, the rounding of z·log2 e alone may have made it 0 or inf.  NaN stays NaN.
    """
    return clamp(row_sum, 0.5, most * 2.0**31)


@cute.jit
def finite(x: Float32) -> Float32:
    """Return x, or 0 for -inf: the maximum of an empty row, where x - x would be NaN."""
    y = x
    if x == -Float32.inf:
        y = Float32(0.0)
    return y
