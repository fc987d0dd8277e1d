"""Classes of each token whose logits are computed: those of soft targets."""

from typing import Any, NamedTuple

import cutlass.cute as cute
from cutlass import Float32, Int64

from cutefce.cute_kernels.common.dsl import matrix


class SoftClasses(NamedTuple):
    """A launch argument: K classes of each token."""

    index: cute.Tensor
    """(N, K) int64 rows of w, which ascend but for what is no class."""
    coefficient: cute.Tensor
    """(N, K) float32, 0 for what is no class."""
    logits: cute.Tensor
    """(N, K) float32: receives the raw logits of the classes; others are undefined."""


def classes_argument(rows: Any) -> SoftClasses:
    """Return what the classes of `rows` tokens are compiled for."""
    classes = cute.sym_int()
    given = (matrix(dtype, rows, classes, aligned=False) for dtype in (Int64, Float32, Float32))
    return SoftClasses(*given)
