"""Kernel specs: frozen descriptions of every kernel that can be compiled, which are its JIT keys.

This package does not import the DSL.
"""

from cutefce.cute_kernels.spec.divergence import DivergenceRowsSpec
from cutefce.cute_kernels.spec.gemm import GradGemmSpec, ProjectExpSpec
from cutefce.cute_kernels.spec.kernel import KernelSpec
from cutefce.cute_kernels.spec.rowwise import (
    OUT_AND_SUMS,
    KeptSumsSpec,
    MoveRowsSpec,
    PrepareSoftSpec,
    PutSoftSpec,
    ReducePartialsSpec,
    RowCoefficientsSpec,
    ScaleAddRowsSpec,
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
    "DivergenceRowsSpec",
    "GradGemmSpec",
    "KeptSumsSpec",
    "KernelSpec",
    "ListSamplesSpec",
    "MoveRowsSpec",
    "PrepareSamplesSpec",
    "PrepareSoftSpec",
    "ProjectExpSpec",
    "PutSoftSpec",
    "ReducePartialsSpec",
    "RowCoefficientsSpec",
    "ScaleAddRowsSpec",
    "SelectRowsSpec",
    "SoftLeadsSpec",
    "SoftLogitsSpec",
    "SortSamplesSpec",
    "SortTargetsSpec",
    "SparseRowsSpec",
    "TargetLogitSpec",
]
