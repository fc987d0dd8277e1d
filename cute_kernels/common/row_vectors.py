"""TODO."""

from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int32

from cutefce.cute_kernels import spec

WARPS = spec.TargetLogitSpec.WARPS
"""Warps of a block."""


@cute.jit
def chunks(x: cute.Tensor, row: Any) -> cute.Tensor:
    """Return row `row` of x (N, D) as (8, D / 8)."""
    return cute.zipped_divide(x[row, None], (8,))


@cute.jit
def load(x: cute.Tensor, chunk: Int32) -> cute.Tensor:
    """Return chunk number `chunk` of x (8, n) as float32 registers."""
    raw = cute.make_rmem_tensor((8,), x.element_type)
    cute.autovec_copy(x[None, chunk], raw)
    wide = cute.make_rmem_tensor((8,), Float32)
    wide.store(raw.load().to(Float32))
    return wide
