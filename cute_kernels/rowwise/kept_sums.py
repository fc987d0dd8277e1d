"""dX's sums Σ_v e_iv w_v - S_i w_y: kept as 16 bits and 8 or 4 beside them, then made dX.

See `common.kept_bits` for what these bits are.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint8
from cutlass.cute.runtime import make_fake_tensor

from cutefce.cute_kernels import spec
from cutefce.cute_kernels.common.dsl import (
    DTYPES,
    USE_PDL,
    current_stream,
    matrix,
    pdl_wait,
    vector,
)
from cutefce.cute_kernels.common.kept_bits import join_eight, split_eight
from cutefce.cute_kernels.common.rank_one import RankOne, rank_one_signature
from cutefce.cute_kernels.common.row_vectors import WARPS, clamped, load_fp32, row_vectors


def compile_signature(kernel: spec.KeptSumsSpec) -> tuple[Any, tuple[Any, ...]]:
    """Return the host function of `kernel` and the arguments to compile it for."""
    assert kernel.finishes or not kernel.rank_one
    dtype, rows, hidden = DTYPES[kernel.dtype], cute.sym_int(), cute.sym_int(divisibility=8)
    places, low_bits = cute.sym_int(), kernel.low_bits
    kept, low = matrix(dtype, places, hidden), low_signature(places, hidden, low_bits)
    table, target = matrix(dtype, cute.sym_int(), hidden), vector(Int64, rows)
    factor = vector(Float32, rows)
    more = vector(Int64, rows), Int32(0), current_stream()
    if kernel.finishes:
        term = rank_one_signature(rows, hidden, kernel.rank_one)
        out, factors = matrix(dtype, cute.sym_int(), hidden), (factor, vector(Float32, rows))
        return FinishKept(low_bits), (out, kept, low, table, target, *factors, term, *more)
    sums = matrix(Float32, rows, hidden)
    return KeepSums(low_bits), (kept, low, sums, table, target, factor, Int64(0), *more)


def low_signature(rows: Any, hidden: Any, low_bits: int) -> Any:
    """Return a fake tensor of the low bits of (rows, hidden) sums, see `common.kept_bits`."""
    bytes_ = hidden if low_bits == 8 else cute.sym_int(divisibility=4)
    pitch = cute.sym_int64(divisibility=low_bits)
    return make_fake_tensor(Uint8, (rows, bytes_), (pitch, 1), assumed_align=low_bits)


class KeepSums:
    """The kernel that keeps a chunk's sums, and its launch."""

    def __init__(self, low_bits: int) -> None:
        self.low_bits = low_bits

    @cute.jit
    def __call__(
        self,
        kept: cute.Tensor,
        low: cute.Tensor,
        sums: cute.Tensor,
        table: cute.Tensor,
        target: cute.Tensor,
        others: cute.Tensor,
        ignored: Int64,
        order: cute.Tensor,
        scatters: Int32,
        stream: Any,
    ) -> None:
        """Write sums (M, D) - S_i table_{y_i} to kept and low (N, D); 0 where target is `ignored`.

        Of four low bits, low is (N, D / 2).  target (M,) is y, `others` (M,) is S.  If `scatters`,
        row i becomes row order_i.  More than eight parameters: each is one argument that the host
        passes by position.
        """
        rows, places = (target, others, ignored), (order, scatters)
        self.kernel(kept, low, sums, table, rows, places).launch(
            grid=[sums.shape[0], 1, 1], block=[32 * WARPS, 1, 1], stream=stream, **USE_PDL
        )

    @cute.kernel
    def kernel(
        self,
        kept: cute.Tensor,
        low: cute.Tensor,
        sums: cute.Tensor,
        table: cute.Tensor,
        rows: Any,
        places: Any,
    ) -> None:
        """Keep one row a block."""
        target, others, ignored = rows
        pdl_wait()
        row = cute.arch.block_idx()[0]
        place = place_of(row, places)
        index, factor = target[row], -others[row]
        source, addends = row_vectors(sums, row), row_vectors(table, clamped(index, table))
        upper_half, lower = row_vectors(kept, place), row_vectors(low, place, self.low_bits)
        for i in cutlass.range(cute.arch.thread_idx()[0], sums.shape[1] // 8, 32 * WARPS, unroll=2):
            values = cute.make_rmem_tensor((8,), Float32)
            values.fill(0.0)
            if index != ignored:
                cute.autovec_copy(source[None, i], values)
                addend = load_fp32(addends, i)
                for j in cutlass.range_constexpr(8):
                    values[j] = values[j] + rounded_product(factor, addend[j])
            store_kept(values, upper_half, lower, i)


class FinishKept:
    """The kernel that makes dX of kept sums, and its launch."""

    def __init__(self, low_bits: int) -> None:
        self.low_bits = low_bits

    @cute.jit
    def __call__(
        self,
        out: cute.Tensor,
        kept: cute.Tensor,
        low: cute.Tensor,
        table: cute.Tensor,
        target: cute.Tensor,
        scale: cute.Tensor,
        target_scale: cute.Tensor,
        rank_one: RankOne | None,
        order: cute.Tensor,
        scatters: Int32,
        stream: Any,
    ) -> None:
        """Write dX (N, D) = scale_i x_i + target_scale_i table_{y_i} to `out`, rounded once.

        x are the sums in kept and low (N, D), y is target (N,).  A row whose factors are all 0 is
        0, whatever x and table hold.  `out` may be `kept`.  With `scatters`, row i of dX is row
        order_i of `out`; if that is `OUT_AND_SUMS`, so is row i of x in memory.  More than eight
        parameters: each is one argument that the host passes by position.
        """
        rows, places = (target, scale, target_scale), (order, scatters)
        self.kernel(out, kept, low, table, rows, rank_one, places).launch(
            grid=[target.shape[0], 1, 1], block=[32 * WARPS, 1, 1], stream=stream, **USE_PDL
        )

    @cute.kernel
    def kernel(
        self,
        out: cute.Tensor,
        kept: cute.Tensor,
        low: cute.Tensor,
        table: cute.Tensor,
        rows: Any,
        rank_one: Any,
        places: Any,
    ) -> None:
        """Compute one row a block."""
        target, scales, target_scales = rows
        pdl_wait()
        row = cute.arch.block_idx()[0]
        place, source = place_of(row, places), Int64(row)
        if places[1] == spec.OUT_AND_SUMS:
            source = place
        scale, factor, every = scales[row], target_scales[row], Float32(0.0)
        upper_half, lower = row_vectors(kept, source), row_vectors(low, source, self.low_bits)
        gathered, to = row_vectors(table, clamped(target[row], table)), row_vectors(out, place)
        term = gathered
        if cutlass.const_expr(rank_one is not None):
            term, every = cute.zipped_divide(rank_one.row, (8,)), rank_one.factor[row]
        counts = scale != 0.0 or factor != 0.0 or every != 0.0
        for i in cutlass.range(cute.arch.thread_idx()[0], out.shape[1] // 8, 32 * WARPS, unroll=2):
            values = cute.make_rmem_tensor((8,), Float32)
            values.fill(0.0)
            if counts:
                values.store(load_kept(upper_half, lower, i).load())
                addends = load_fp32(gathered, i)
                for j in cutlass.range_constexpr(8):
                    addend = rounded_product(factor, addends[j])
                    values[j] = cute.math.fma(scale, values[j], addend)
                if cutlass.const_expr(rank_one is not None):
                    addends = load_fp32(term, i)
                    for j in cutlass.range_constexpr(8):
                        values[j] = cute.math.fma(every, addends[j], values[j])
            rounded = cute.make_rmem_tensor((8,), out.element_type)
            rounded.store(values.load().to(out.element_type))
            cute.autovec_copy(rounded, to[None, i])


@cute.jit
def load_kept(upper: cute.Tensor, low: cute.Tensor, index: Int32) -> cute.Tensor:
    """Load the float32 sums (8,) of vector `index` of a row's upper halves and low bits."""
    bytes_ = cute.make_rmem_tensor((cute.size(low, mode=[0]),), Uint8)
    halves = cute.make_rmem_tensor((4,), Int32)
    cute.autovec_copy(upper[None, index], cute.recast_tensor(halves, upper.element_type))
    cute.autovec_copy(low[None, index], bytes_)
    return join_eight(halves, bytes_, cute.size(bytes_))


@cute.jit
def store_kept(values: cute.Tensor, upper: cute.Tensor, low: cute.Tensor, index: Int32) -> None:
    """Keep float32 `values` (8,) as vector `index` of a row's upper halves and low bits."""
    halves, bytes_ = split_eight(values, cute.size(low, mode=[0]))
    cute.autovec_copy(cute.recast_tensor(halves, upper.element_type), upper[None, index])
    cute.autovec_copy(bytes_, low[None, index])


@cute.jit
def place_of(row: Int32, places: Any) -> Int64:
    """Return where a row is kept; `places` are (order, scatters)."""
    (order, scatters), place = places, Int64(row)
    if scatters != 0:
        place = order[row]
    return place


def rounded_product(x: Any, y: Any) -> Any:
    """Return x y, which no addition contracts: all paths round the target's term alone."""
    return cute.math.mul(x, y, rounding=cute.math.RoundingMode.NEAREST_EVEN)
