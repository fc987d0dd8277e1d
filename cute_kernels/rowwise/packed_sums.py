"""Packed sums: 16 bits, and 8 or 4 beside them, see `common.packed_bits`.

pack      dX's sums Σ_v e_iv w_v - S_i w_y of a chunk
finish    dX, made of such sums
scale     sums of dX over windows times factors of rows, which remain packed: where exponentials
that were stored end, and probabilities begin, each row is divided by its T_i
round     dW, sums times a factor, in their memory: the last step of gradients in forward
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint8

from cutefce.cute_kernels.common.dsl import DTYPES, matrix, pdl_wait, vector
from cutefce.cute_kernels.common.launch import WARPS, Signature, blocks_of, row_launch
from cutefce.cute_kernels.common.packed_bits import join_eight, low_signature, split_eight
from cutefce.cute_kernels.common.rank_one import rank_one_signature
from cutefce.cute_kernels.common.row_vectors import (
    clamped,
    load_fp32,
    mapped,
    row_vectors,
    store_rounded,
)
from cutefce.cute_kernels.spec import rowwise as spec


def compile_signature(kernel: spec.PackedSumsSpec) -> Signature:
    """Return the host function of `kernel` and the arguments to compile it for."""
    assert kernel.step == "finish" or not kernel.rank_one
    dtype, rows, hidden = DTYPES[kernel.dtype], cute.sym_int(), cute.sym_int(divisibility=8)
    scales, kernels = kernel.step in ("scale", "round"), PackedSums(kernel)
    places = rows if scales else cute.sym_int()
    sums = {
        "packed": matrix(dtype, places, hidden),
        "low": low_signature(places, hidden, kernel.low_bits, kernel.low_bits),
    }
    if scales:
        factor = vector(Float32, rows if kernel.step == "scale" else 1)
        return row_launch(kernels.scale, blocks_of("packed"), **sums, factor=factor)
    table, target = matrix(dtype, cute.sym_int(), hidden), vector(Int64, rows)
    order = {"order": vector(Int64, rows), "scatters": Int32(0)}
    if kernel.step == "pack":
        return row_launch(
            kernels.pack,
            blocks_of("sums"),
            **sums,
            sums=matrix(Float32, rows, hidden),
            table=table,
            target=target,
            others=vector(Float32, rows),
            ignored=Int64(0),
            **order,
        )
    return row_launch(
        kernels.finish,
        blocks_of("target"),
        out=matrix(dtype, cute.sym_int(), hidden),
        **sums,
        table=table,
        target=target,
        scale=vector(Float32, rows),
        target_scale=vector(Float32, rows),
        rank_one=rank_one_signature(rows, hidden, kernel.rank_one),
        **order,
    )


class PackedSums:
    """The kernels; each has a row a block."""

    def __init__(self, kernel: spec.PackedSumsSpec) -> None:
        self.low_bits, self.by_rows = kernel.low_bits, kernel.step == "scale"

    @cute.kernel
    def pack(self, operands: Any) -> None:
        """Write sums (M, D) - S_i table_{y_i} to packed and low (N, D); 0 where target is ignored.

        Of four low bits, low is (N, D / 2).  target (M,) is y, `others` (M,) is S, `ignored` is
        what target is then.  If `scatters`, row i becomes row order_i.
        """
        packed, low, sums, table, target, others, ignored, *places = operands
        pdl_wait()
        row = cute.arch.block_idx()[0]
        place = mapped(row, *places)
        index, factor = target[row], -others[row]
        source, addends = row_vectors(sums, row), row_vectors(table, clamped(index, table))
        upper_half, lower = row_vectors(packed, place), row_vectors(low, place, self.low_bits)
        for i in cutlass.range(cute.arch.thread_idx()[0], sums.shape[1] // 8, 32 * WARPS, unroll=2):
            values = cute.make_rmem_tensor((8,), Float32)
            values.fill(0.0)
            if index != ignored:
                cute.autovec_copy(source[None, i], values)
                addend = load_fp32(addends, i)
                for j in cutlass.range_constexpr(8):
                    values[j] = values[j] + rounded_product(factor, addend[j])
            store_packed(values, upper_half, lower, i)

    @cute.kernel
    def finish(self, operands: Any) -> None:
        """Write dX (N, D) = scale_i x_i + target_scale_i table_{y_i} to `out`, rounded once.

        x are the sums in packed and low (N, D), y is target (N,).  A row whose factors are all 0 is
        0, whatever x and table hold.  `out` may be `packed`.  With `scatters`, row i of dX is row
        order_i of `out`; if that is `OUT_AND_SUMS`, so is row i of x in memory.
        """
        out, packed, low, table, target, scales, target_scales, rank_one, order, scatters = operands
        pdl_wait()
        row = cute.arch.block_idx()[0]
        place, source = mapped(row, order, scatters), Int64(row)
        if scatters == spec.OUT_AND_SUMS:
            source = place
        scale, factor, every = scales[row], target_scales[row], Float32(0.0)
        upper_half, lower = row_vectors(packed, source), row_vectors(low, source, self.low_bits)
        gathered, to = row_vectors(table, clamped(target[row], table)), row_vectors(out, place)
        term = gathered
        if cutlass.const_expr(rank_one is not None):
            term, every = cute.zipped_divide(rank_one.row, (8,)), rank_one.factor[row]
        counts = scale != 0.0 or factor != 0.0 or every != 0.0
        for i in cutlass.range(cute.arch.thread_idx()[0], out.shape[1] // 8, 32 * WARPS, unroll=2):
            values = cute.make_rmem_tensor((8,), Float32)
            values.fill(0.0)
            if counts:
                values.store(load_packed(upper_half, lower, i).load())
                addends = load_fp32(gathered, i)
                for j in cutlass.range_constexpr(8):
                    addend = rounded_product(factor, addends[j])
                    values[j] = cute.math.fma(scale, values[j], addend)
                if cutlass.const_expr(rank_one is not None):
                    addends = load_fp32(term, i)
                    for j in cutlass.range_constexpr(8):
                        values[j] = cute.math.fma(every, addends[j], values[j])
            store_rounded(values, to, i)

    @cute.kernel
    def scale(self, operands: Any) -> None:
        """Multiply the sums in packed and low (M, D) by `factor`, (1,) or one for each row, (M,).

        Without factors of rows the product is written to `packed`, rounded once.  Of four low bits,
        low is (M, D / 2).
        """
        packed, low, factor = operands
        pdl_wait()
        row = cute.arch.block_idx()[0]
        upper_half, scale = row_vectors(packed, row), factor[row if self.by_rows else 0]
        lower = row_vectors(low, row, self.low_bits)
        for i in cutlass.range(
            cute.arch.thread_idx()[0], packed.shape[1] // 8, 32 * WARPS, unroll=2
        ):
            sums = load_packed(upper_half, lower, i)
            sums.store(sums.load() * scale)
            if cutlass.const_expr(self.by_rows):
                store_packed(sums, upper_half, lower, i)
            else:
                store_rounded(sums, upper_half, i)


@cute.jit
def load_packed(upper: cute.Tensor, low: cute.Tensor, index: Int32) -> cute.Tensor:
    """Load the float32 sums (8,) of vector `index` of a row's upper halves and low bits."""
    bytes_ = cute.make_rmem_tensor((cute.size(low, mode=[0]),), Uint8)
    halves = cute.make_rmem_tensor((4,), Int32)
    cute.autovec_copy(upper[None, index], cute.recast_tensor(halves, upper.element_type))
    cute.autovec_copy(low[None, index], bytes_)
    return join_eight(halves, bytes_, cute.size(bytes_))


@cute.jit
def store_packed(values: cute.Tensor, upper: cute.Tensor, low: cute.Tensor, index: Int32) -> None:
    """Pack float32 `values` (8,) as vector `index` of a row's upper halves and low bits."""
    halves, bytes_ = split_eight(values, cute.size(low, mode=[0]))
    cute.autovec_copy(cute.recast_tensor(halves, upper.element_type), upper[None, index])
    cute.autovec_copy(bytes_, low[None, index])


def rounded_product(x: Any, y: Any) -> Any:
    """Return x y, which no addition contracts: all paths round the target's term alone."""
    return cute.math.mul(x, y, rounding=cute.math.RoundingMode.NEAREST_EVEN)
