"""dX's sums Σ_v e_iv w_v - S_i w_y: kept as 16 bits in dX's memory and a byte, then made dX.

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
    places, pitch = cute.sym_int(), cute.sym_int64(divisibility=8)
    low = make_fake_tensor(Uint8, (places, hidden), (pitch, 1), assumed_align=8)
    kept, table = matrix(dtype, places, hidden), matrix(dtype, cute.sym_int(), hidden)
    target, factor = vector(Int64, rows), vector(Float32, rows)
    more = vector(Int64, rows), Int32(0), current_stream()
    if kernel.finishes:
        term = rank_one_signature(rows, hidden, kernel.rank_one)
        factors = factor, vector(Float32, rows)
        return finish_kept, (kept, low, table, target, *factors, term, *more)
    sums = matrix(Float32, rows, hidden)
    return keep_sums, (kept, low, sums, table, target, factor, Int64(0), *more)


@cute.jit
def keep_sums(
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

    target (M,) is y, `others` (M,) is S.  If `scatters`, row i becomes row order_i.  More than
    eight parameters: each is one argument that the host passes by position.
    """
    rows, places = (target, others, ignored), (order, scatters)
    keep_sums_kernel(kept, low, sums, table, rows, places).launch(
        grid=[sums.shape[0], 1, 1], block=[32 * WARPS, 1, 1], stream=stream, **USE_PDL
    )


@cute.kernel
def keep_sums_kernel(
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
    upper_half, byte = row_vectors(kept, place), row_vectors(low, place)
    for i in cutlass.range(cute.arch.thread_idx()[0], sums.shape[1] // 8, 32 * WARPS, unroll=2):
        values = cute.make_rmem_tensor((8,), Float32)
        values.fill(0.0)
        if index != ignored:
            cute.autovec_copy(source[None, i], values)
            addend = load_fp32(addends, i)
            for j in cutlass.range_constexpr(8):
                values[j] = values[j] + rounded_product(factor, addend[j])
        halves, bytes_ = split_eight(values, 8)
        cute.autovec_copy(cute.recast_tensor(halves, kept.element_type), upper_half[None, i])
        cute.autovec_copy(bytes_, byte[None, i])


@cute.jit
def finish_kept(
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
    """Write dX (N, D) = scale_i x_i + target_scale_i table_{y_i} to `kept`, rounded once.

    x are the sums in kept and low (N, D), y is target (N,).  A row whose factors are all 0 is 0,
    whatever x and table hold.  If `scatters`, row i of x and dX is row order_i in memory.  More
    than eight parameters: each is one argument that the host passes by position.
    """
    rows, places = (target, scale, target_scale), (order, scatters)
    finish_kept_kernel(kept, low, table, rows, rank_one, places).launch(
        grid=[target.shape[0], 1, 1], block=[32 * WARPS, 1, 1], stream=stream, **USE_PDL
    )


@cute.kernel
def finish_kept_kernel(
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
    place = place_of(row, places)
    scale, factor, every = scales[row], target_scales[row], Float32(0.0)
    upper_half, byte = row_vectors(kept, place), row_vectors(low, place)
    gathered = row_vectors(table, clamped(target[row], table))
    term = gathered
    if cutlass.const_expr(rank_one is not None):
        term, every = cute.zipped_divide(rank_one.row, (8,)), rank_one.factor[row]
    counts = scale != 0.0 or factor != 0.0 or every != 0.0
    for i in cutlass.range(cute.arch.thread_idx()[0], kept.shape[1] // 8, 32 * WARPS, unroll=2):
        values = cute.make_rmem_tensor((8,), Float32)
        values.fill(0.0)
        if counts:
            halves, bytes_ = cute.make_rmem_tensor((4,), Int32), cute.make_rmem_tensor((8,), Uint8)
            cute.autovec_copy(upper_half[None, i], cute.recast_tensor(halves, kept.element_type))
            cute.autovec_copy(byte[None, i], bytes_)
            values.store(join_eight(halves, bytes_, 8).load())
            addends = load_fp32(gathered, i)
            for j in cutlass.range_constexpr(8):
                addend = rounded_product(factor, addends[j])
                values[j] = cute.math.fma(scale, values[j], addend)
            if cutlass.const_expr(rank_one is not None):
                addends = load_fp32(term, i)
                for j in cutlass.range_constexpr(8):
                    values[j] = cute.math.fma(every, addends[j], values[j])
        rounded = cute.make_rmem_tensor((8,), kept.element_type)
        rounded.store(values.load().to(kept.element_type))
        cute.autovec_copy(rounded, upper_half[None, i])


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
