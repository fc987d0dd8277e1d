"""Kernel specs: frozen descriptions of every kernel that can be compiled, which are its JIT keys.

This package does not import the DSL.
"""

from cutefce.cute_kernels.spec.divergence import DivergenceRowsSpec
from cutefce.cute_kernels.spec.gemm import GradGemmSpec, ProjectExpSpec
from cutefce.cute_kernels.spec.rowwise import (
    OUT_AND_SUMS,
    ClearRowsSpec,
    GatherRowsSpec,
    KeptSumsSpec,
    PrepareSoftSpec,
    PutSoftSpec,
    ReducePartialsSpec,
    RowCoefficientsSpec,
    ScaleAddRowsSpec,
    ScaleKeptSpec,
    ScaleSoftSpec,
    ScatterRowsSpec,
    SelectRowsSpec,
    SoftLeadsSpec,
    SoftLogitsSpec,
    SortTargetsSpec,
    TargetLogitSpec,
)
from cutefce.cute_kernels.spec.sampling import (
    ChooseClassesSpec,
    ListSamplesSpec,
    PrepareSamplesSpec,
    SortSamplesSpec,
    SparseRowsSpec,
)

__all__ = [
    "OUT_AND_SUMS",
    "ChooseClassesSpec",
    "ClearRowsSpec",
    "DivergenceRowsSpec",
    "GatherRowsSpec",
    "GradGemmSpec",
    "KeptSumsSpec",
    "KernelSpec",
    "ListSamplesSpec",
    "PrepareSamplesSpec",
    "PrepareSoftSpec",
    "ProjectExpSpec",
    "PutSoftSpec",
    "ReducePartialsSpec",
    "RowCoefficientsSpec",
    "ScaleAddRowsSpec",
    "ScaleKeptSpec",
    "ScaleSoftSpec",
    "ScatterRowsSpec",
    "SelectRowsSpec",
    "SoftLeadsSpec",
    "SoftLogitsSpec",
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
    | SoftLeadsSpec
    | PrepareSoftSpec
    | SoftLogitsSpec
    | PutSoftSpec
    | ScaleSoftSpec
    | ReducePartialsSpec
    | ScaleAddRowsSpec
    | KeptSumsSpec
    | ScaleKeptSpec
    | RowCoefficientsSpec
    | SortTargetsSpec
    | ChooseClassesSpec
    | PrepareSamplesSpec
    | SortSamplesSpec
    | ListSamplesSpec
    | SparseRowsSpec
    | DivergenceRowsSpec
)
