"""Row reductions beside Σ exp, of the logits u of one partial.

Those of all columns, whatever the target is, have the same bits for equal rows:

    largest       m = max u, -inf if none is finite
    others        Σ 2^x but for one largest logit's, whose 2^x is 1       with x = (u - m) log2 e
    entropy       Σ 2^x x
    sum_squares   Σ 2^2x but for the same one

A sum of 1 + `others` would lose the digits of the others where one probability is almost 1.  The
first two are there with either of the rest.  Those of all columns but the target's:

    largest       the largest u, -inf if none is finite
    entry         its vocabulary entry, as a number
    above         how many u are above the target's logit

Each line is one plane of the output (K, N, P); planes that are not asked for are left out.  A row's
accumulators are K registers in the same order.  Sums are relative to the running maximum, so that
they are exact for any logits.  Σ exp of all columns but the target's follows from `others`, see
`log_sum`: beside sums of all columns it has no accumulator of its own.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from cutefce.cute_kernels.common.dsl import LOG2_E, clamp, exp2
from cutefce.cute_kernels.variant import RowReductions

LOWEST_EXPONENT = -200.0
"""Replaces lower exponents where they are factors of 2^x = 0, above all -inf of masked logits."""


class RowSums(NamedTuple):
    """The accumulators of a row."""

    planes: cute.Tensor
    """(K,) float32"""
    marks: cute.Tensor
    """(1,) int32 of all rows of a thread: bits `SEEN` and `LEFT_OUT` of each."""
    row: int


LANE_OFFSETS = 1, 2
"""Distances of the lanes whose accumulators are combined: a row has 4, next to each other."""
SEEN, LEFT_OUT = 0, 16
"""First bits of marks, of up to 16 rows: columns with a row's target were added; that is the one
that sums leave out."""


class RowReducer:
    """The reductions of one kernel; without any, accumulators are None and methods do nothing."""

    def __init__(self, options: RowReductions) -> None:
        self.options = options
        # the first plane of each
        self.largest, self.others = 0, 1
        self.entropy = 2 * options.of_all
        self.squares = self.entropy + options.entropy
        self.of_others = self.squares + options.sum_squares

    @cute.jit
    def registers(self, rows: int) -> Any:
        """Return the accumulators of a thread's rows: planes (K, rows) and marks (1,)."""
        if cutlass.const_expr(not self.options.planes):
            return None
        planes = cute.make_rmem_tensor((self.options.planes, rows), Float32)
        return planes, cute.make_rmem_tensor((1,), Int32)

    @cute.jit
    def reset(self, registers: Any) -> None:
        """Initialize the accumulators of a thread's rows."""
        if cutlass.const_expr(self.options.planes):
            planes, marks = registers
            planes.fill(0.0)
            marks.fill(0)
            if cutlass.const_expr(self.options.of_all):
                planes[self.largest, None].fill(-Float32.inf)
            if cutlass.const_expr(self.options.of_others):
                planes[self.of_others, None].fill(-Float32.inf)

    @cute.jit
    def row(self, registers: Any, row: int) -> Any:
        """Return the accumulators of one row."""
        if cutlass.const_expr(not self.options.planes):
            return None
        planes, marks = registers
        return RowSums(planes[None, row], marks, row)

    @cute.jit
    def add(self, sums: RowSums, u: cute.Tensor, columns: Any) -> None:
        """Add logits u of some of all columns to the sums of their row.

        `columns` are (that of the target, which may be another one; those of u, which increase).
        """
        acc, marks, row = sums
        target, of_u = columns
        u_max = u[0]
        for i in cutlass.range_constexpr(cute.size(u)):
            u_max = cute.arch.fmax(u_max, u[i])
        if target >= of_u[0] and target <= of_u[-1]:
            marks[0] = marks[0] | (1 << SEEN + row)
        place = Int32(-1)  # of the first largest logit of all until now, if it is one of these
        if u_max > acc[self.largest]:
            column = Int32(0)
            for i in cutlass.range_constexpr(cute.size(u) - 1, -1, -1):
                if u[i] == u_max:
                    place = Int32(i)
                    column = Int32(of_u[i])
            mark = marks[0] & ~(1 << LEFT_OUT + row)
            if column == target:
                mark = mark | (1 << LEFT_OUT + row)
            marks[0] = mark
            self.rescale(acc, (acc[self.largest] - u_max) * LOG2_E, Float32(1.0))
            acc[self.largest] = u_max
        base = finite(acc[self.largest])
        totals = [acc[self.others], Float32(0.0)]
        for i in cutlass.range_constexpr(cute.size(u)):
            x = (u[i] - base) * LOG2_E
            exp = exp2(x)
            if place == i:
                exp = Float32(0.0)
            totals[i % 2] += exp
            self.add_products(acc, x, exp)
        acc[self.others] = totals[0] + totals[1]

    @cute.jit
    def add_products(self, acc: Any, x: Float32, exp: Float32) -> None:
        """Add one column, whose 2^x is `exp`, to the sums of products."""
        if cutlass.const_expr(self.options.entropy):
            exponent = cute.arch.fmax(x, LOWEST_EXPONENT)
            acc[self.entropy] = cute.math.fma(exp, exponent, acc[self.entropy])
        if cutlass.const_expr(self.options.sum_squares):
            acc[self.squares] = cute.math.fma(exp, exp, acc[self.squares])

    @cute.jit
    def rescale(self, acc: Any, exponent: Float32, joins: Float32) -> None:
        """Multiply exponentials by 2^exponent, as the largest logit is another one.

        The one that was left out is one of the others then, if `joins` is 1 and not 0.
        """
        scale = exp2(exponent)
        if cutlass.const_expr(self.options.entropy):
            total = acc[self.others] + 1.0
            finite_exponent = cute.arch.fmax(exponent, LOWEST_EXPONENT)
            acc[self.entropy] = cute.math.fma(total, finite_exponent, acc[self.entropy]) * scale
        if cutlass.const_expr(self.options.sum_squares):
            acc[self.squares] = (acc[self.squares] + joins) * (scale * scale)
        acc[self.others] = (acc[self.others] + joins) * scale

    @cute.jit
    def add_others(self, sums: Any, u: cute.Tensor, columns: Any, reference: Float32) -> None:
        """Take logits u into account; the target's, which is `reference`, is -inf there.

        `columns` are (vocabulary entry, offsets of its elements from it, which increase).
        """
        if cutlass.const_expr(self.options.of_others):
            acc, u_max = sums.planes, u[0]
            for i in cutlass.range_constexpr(cute.size(u)):
                u_max = cute.arch.fmax(u_max, u[i])
            previous_max = acc[self.of_others]
            if u_max > previous_max:
                first, offsets = columns
                offset = Int32(0)
                for i in cutlass.range_constexpr(cute.size(u) - 1, -1, -1):
                    if u[i] == u_max:
                        offset = Int32(offsets[i])
                acc[self.of_others] = u_max
                acc[self.of_others + 1] = Float32(first + offset)
            if u_max > reference:
                above = Int32(0)
                for i in cutlass.range_constexpr(cute.size(u)):
                    above += Int32(u[i] > reference)
                acc[self.of_others + 2] += Float32(above)

    @cute.jit
    def combine_lanes(self, sums: Any) -> None:
        """Combine the accumulators of the lanes of a row."""
        if cutlass.const_expr(self.options.of_all):
            self.align_lanes(sums)
        if cutlass.const_expr(self.options.planes):
            acc = sums.planes
            for offset in LANE_OFFSETS:
                if cutlass.const_expr(self.options.of_all):
                    for plane in cutlass.range_constexpr(self.others, self.of_others):
                        acc[plane] += cute.arch.shuffle_sync_bfly(acc[plane], offset=offset)
                if cutlass.const_expr(self.options.of_others):
                    above = acc[self.of_others + 2]
                    above += cute.arch.shuffle_sync_bfly(above, offset=offset)
                    acc[self.of_others + 2] = above
                    u_max, entry = acc[self.of_others], acc[self.of_others + 1]
                    other_max = cute.arch.shuffle_sync_bfly(u_max, offset=offset)
                    other = cute.arch.shuffle_sync_bfly(entry, offset=offset)
                    if other_max > u_max or (other_max == u_max and other < entry):
                        acc[self.of_others] = other_max
                        acc[self.of_others + 1] = other

    @cute.jit
    def align_lanes(self, sums: RowSums) -> None:
        """Make the sums of a row's lanes relative to one largest logit, left out in one lane."""
        acc, marks, row = sums
        largest, lane = acc[self.largest], cute.arch.lane_idx()
        for offset in LANE_OFFSETS:
            of_lane = cute.arch.shuffle_sync_bfly(largest, offset=offset)
            largest = cute.arch.fmax(largest, of_lane)
        owner = Int32(32)  # the first lane that has it
        if acc[self.largest] == largest:
            owner = lane
        for offset in LANE_OFFSETS:
            owner = cutlass.min(owner, cute.arch.shuffle_sync_bfly(owner, offset=offset))
        joins, mark = Float32(1.0), marks[0] & (1 << SEEN + row)
        if owner == lane:
            joins = Float32(0.0)
            mark = marks[0] & ((1 << SEEN + row) | (1 << LEFT_OUT + row))
        for offset in LANE_OFFSETS:
            mark = mark | cute.arch.shuffle_sync_bfly(mark, offset=offset)
        marks[0] = marks[0] | mark
        if mark & (1 << LEFT_OUT + row) == 0:
            marks[0] = marks[0] & ~(1 << LEFT_OUT + row)
        self.rescale(acc, (acc[self.largest] - finite(largest)) * LOG2_E, joins)
        acc[self.largest] = largest

    @cute.jit
    def log_sum(self, sums: RowSums, reference: Float32) -> Float32:
        """Return log2 of Σ exp(u - `reference`) of all columns but the target's.

        `reference` is the target's logit.  Its exponential cancels no digits of the sum: where it
        is most of that of all columns, it is the one that is left out.
        """
        acc, marks, row = sums
        total = acc[self.others] + 1.0
        if marks[0] & (1 << LEFT_OUT + row) != 0:
            total = acc[self.others]
        elif marks[0] & (1 << SEEN + row) != 0:
            exp = exp2((reference - acc[self.largest]) * LOG2_E)
            total = (1.0 - cute.arch.fmin(exp, Float32(1.0))) + acc[self.others]
        log_total = cute.math.log2(total, fastmath=True)
        return (acc[self.largest] - reference) * LOG2_E + log_total

    @cute.jit
    def write(self, sums: Any, out: Any, row: Int32, partial: Int32) -> None:
        """Write a row's planes to `out` (K, N, P)."""
        for plane in cutlass.range_constexpr(self.options.planes):
            out[plane, row, partial] = sums.planes[plane]


@cute.jit
def bounded_sum(row_sum: Float32) -> Float32:
    """Return a sum of up to 2³¹ exponentials, the most columns: each is at most 1, one is 1.

    Beyond about 2²⁴, the rounding of z·log2 e alone may have made it 0 or inf.  NaN stays NaN.
    """
    return clamp(row_sum, 0.5, 2.0**31)


@cute.jit
def finite(x: Float32) -> Float32:
    """Return x, or 0 for -inf: the maximum of an empty row, where x - x would be NaN."""
    y = x
    if x == -Float32.inf:
        y = Float32(0.0)
    return y
