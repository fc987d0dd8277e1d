"""A matrix factor ⊗ row that epilogues add to their results in float32."""

from typing import Any, NamedTuple

import cutlass.cute as cute
from cutlass import Float32

from cutefce.cute_kernels.common.dsl import vector


class RankOne(NamedTuple):
    """factor_i row, what is added to row i of a result (M, D)."""

    factor: cute.Tensor
    """(M,) float32"""
    row: cute.Tensor
    """(D,) float32"""


def rank_one_signature(rows: Any, columns: Any, present: bool) -> RankOne | None:
    """Return the argument to compile for; None if not `present`, for code without it."""
    if not present:
        return None
    return RankOne(vector(Float32, rows), vector(Float32, columns, aligned=True))
