"""Vectorized row access for the O(N·D) kernels.

A row of D elements is read and written as D / 8 vectors of 8 elements, which are 16 bytes of a
16-bit dtype, so D must be a multiple of 8, but for `scale_row_part`.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64

from cutefce.cute_kernels.common.launch import WARPS


@cute.jit
def row_vectors(x: cute.Tensor, row: Any, size: int = 8) -> cute.Tensor:
    """Return row `row` of x (N, D) as vectors (size, D / size)."""
    return cute.zipped_divide(x[row, None], (size,))


@cute.jit
def load_fp32(vectors: cute.Tensor, index: Int32) -> cute.Tensor:
    """Load vector `index` of (8, n) into float32 registers."""
    raw = cute.make_rmem_tensor((8,), vectors.element_type)
    cute.autovec_copy(vectors[None, index], raw)
    wide = cute.make_rmem_tensor((8,), Float32)
    wide.store(raw.load().to(Float32))
    return wide


@cute.jit
def store_rounded(values: cute.Tensor, vectors: cute.Tensor, index: Int32) -> None:
    """Store float32 `values` (8,) as vector `index` of (8, n), rounded to its dtype."""
    rounded = cute.make_rmem_tensor((8,), vectors.element_type)
    rounded.store(values.load().to(vectors.element_type))
    cute.autovec_copy(rounded, vectors[None, index])


@cute.jit
def clear_vectors(vectors: cute.Tensor, begin: Int32, end: Int32) -> None:
    """Write zeros to the vectors of a row, of which `begin` is the thread's first one."""
    zeros = cute.make_rmem_tensor((8,), vectors.element_type)
    zeros.fill(0.0)
    for i in cutlass.range(begin, end, 32 * WARPS, unroll=1):
        cute.autovec_copy(zeros, vectors[None, i])


@cute.jit
def mapped(row: Int32, order: cute.Tensor, maps: Int32) -> Int64:
    """Return `order`_row if `maps`, else the row itself."""
    place = Int64(row)
    if maps != 0:
        place = order[row]
    return place


@cute.jit
def clamped(index: Int64, table: cute.Tensor) -> Int64:
    """Return `index` clamped to the rows of `table` (V, D)."""
    last = Int64(table.shape[0]) - 1
    if index > last:
        index = last
    if index < 0:
        index = Int64(0)
    return index


@cute.jit
def widened(vector: cute.Tensor) -> Any:
    """Return a vector of 8 elements in float32: one instruction an element of bfloat16."""
    if cutlass.const_expr(vector.element_type is not BFloat16):
        return vector.load().to(Float32)
    values, words = cute.make_rmem_tensor((8,), Float32), cute.recast_tensor(vector, Int32)
    for i in cutlass.range_constexpr(4):
        values[2 * i] = (words[i] << 16).bitcast(Float32)
        values[2 * i + 1] = (words[i] & -65536).bitcast(Float32)
    return values


@cute.jit
def scale_row_part(x: cute.Tensor, row: Any, factor: Float32, begin: Int32, share: Any) -> None:
    """Multiply a part of row `row` of x (N, D), of a 16-bit dtype, by `factor`; D is any number.

    The part begins with vector `begin`; `share` are the number of the thread among those that share
    the part, how many these are, and how many vectors each has.
    """
    thread, threads, count = share
    vectors, whole = row_vectors(x, row), x.shape[1] // 8
    raw = cute.make_rmem_tensor((8, count), x.element_type)
    for v in cutlass.range_constexpr(count):
        place = begin + v * threads + thread
        if place < whole:
            cute.autovec_copy(vectors[None, place], raw[None, v])
    for v in cutlass.range_constexpr(count):
        place = begin + v * threads + thread
        if place < whole:
            scaled, wide = cute.make_rmem_tensor((8,), x.element_type), widened(raw[None, v])
            for i in cutlass.range_constexpr(8):
                scaled[i] = (wide[i] * factor).to(x.element_type)
            cute.autovec_copy(scaled, vectors[None, place])
    rest = 8 * whole + thread
    if 8 * (begin + count * threads) >= x.shape[1] and rest < x.shape[1]:
        x[row, rest] = (x[row, rest].to(Float32) * factor).to(x.element_type)
