"""Kernel specs: frozen descriptions of every kernel that can be compiled, which are its JIT keys.

This package does not import the DSL.
"""

from cutefce.cute_kernels.spec.fused import FusedBackwardSpec, FusedForwardSpec
from cutefce.cute_kernels.spec.gemm import GradGemmSpec, ProjectExpSpec
from cutefce.cute_kernels.spec.rowwise import (
    OUT_AND_SUMS,
    AddTargetsSpec,
    ClearRowsSpec,
    GatherRowsSpec,
    KeptSumsSpec,
    ReducePartialsSpec,
    RowCoefficientsSpec,
    ScaleAddRowsSpec,
    ScaleKeptSpec,
    ScatterRowsSpec,
    SelectRowsSpec,
    SortTargetsSpec,
    TargetLogitSpec,
)
from cutefce.cute_kernels.spec.sampling import (
    ListSamplesSpec,
    PrepareSamplesSpec,
    SortSamplesSpec,
    SparseRowsSpec,
)

__all__ = [
    "OUT_AND_SUMS",
    "AddTargetsSpec",
    "ClearRowsSpec",
    "FusedBackwardSpec",
    "FusedForwardSpec",
    "GatherRowsSpec",
    "GradGemmSpec",
    "KeptSumsSpec",
    "KernelSpec",
    "ListSamplesSpec",
    "PrepareSamplesSpec",
    "ProjectExpSpec",
    "ReducePartialsSpec",
    "RowCoefficientsSpec",
    "ScaleAddRowsSpec",
    "ScaleKeptSpec",
    "ScatterRowsSpec",
    "SelectRowsSpec",
    "SortSamplesSpec",
    "SortTargetsSpec",
    "SparseRowsSpec",
    "TargetLogitSpec",
]

KernelSpec = (
    SelectRowsSpec
    | GatherRowsSpec
    | ScatterRowsSpec
    | ClearRowsSpec
    | ProjectExpSpec
    | GradGemmSpec
    | TargetLogitSpec
    | ReducePartialsSpec
    | FusedForwardSpec
    | FusedBackwardSpec
    | ScaleAddRowsSpec
    | KeptSumsSpec
    | ScaleKeptSpec
    | RowCoefficientsSpec
    | SortTargetsSpec
    | AddTargetsSpec
    | PrepareSamplesSpec
    | SortSamplesSpec
    | ListSamplesSpec
    | SparseRowsSpec
)
