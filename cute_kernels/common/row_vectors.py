"""Vectorized row access for the O(N·D) kernels.

A row of D elements is read and written as D / 8 vectors of 8 elements, which are 16 bytes of a
16-bit dtype, so D must be a multiple of 8.
"""

from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from cutefce.cute_kernels import spec

WARPS = spec.TargetLogitSpec.WARPS
"""Warps of a thread block."""


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
def clamped(index: Int64, table: cute.Tensor) -> Int64:
    """Return `index` clamped to the rows of `table` (V, D)."""
    last = Int64(table.shape[0]) - 1
    if index > last:
        index = last
    if index < 0:
        index = Int64(0)
    return index
