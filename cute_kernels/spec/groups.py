"""The kernels of a gradient, in groups."""

from collections.abc import Mapping
from typing import NamedTuple

from cutefce.cute_kernels.spec.gemm import GradGemmSpec
from cutefce.cute_kernels.spec.rowwise import (
    KeptSumsSpec,
    ScaleKeptSpec,
    SortTargetsSpec,
)


class KeptHiddenKernels(NamedTuple):
    """The kernels of dX's sums that are kept in some bits."""

    add: GradGemmSpec | None
    """None if cuBLAS and elementwise passes add to them."""
    scale_rows: ScaleKeptSpec
    finish: KeptSumsSpec


class GradWeightKernels(NamedTuple):
    """The kernels of dW."""

    final: GradGemmSpec
    keep: Mapping[int, GradGemmSpec]
    """By the low bits of sums."""
    finish_kept: Mapping[int, ScaleKeptSpec]
    """By the low bits of sums; those in float32 have none."""
    sort_targets: SortTargetsSpec
