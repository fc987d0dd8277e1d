"""Kernel specs: frozen descriptions of every kernel that can be compiled, which are its JIT keys.

This package does not import the DSL.
"""

from cutefce.cute_kernels.spec.divergence import DivergenceRowsSpec as DivergenceRowsSpec
from cutefce.cute_kernels.spec.gemm import GradGemmSpec as GradGemmSpec
from cutefce.cute_kernels.spec.gemm import ProjectExpSpec as ProjectExpSpec
from cutefce.cute_kernels.spec.kernel import KernelSpec as KernelSpec
from cutefce.cute_kernels.spec.rowwise import (
    OUT_AND_SUMS as OUT_AND_SUMS,
)
from cutefce.cute_kernels.spec.rowwise import (
    KeptSumsSpec as KeptSumsSpec,
)
from cutefce.cute_kernels.spec.rowwise import (
    MoveRowsSpec as MoveRowsSpec,
)
from cutefce.cute_kernels.spec.rowwise import (
    PutSoftSpec as PutSoftSpec,
)
from cutefce.cute_kernels.spec.rowwise import (
    ReducePartialsSpec as ReducePartialsSpec,
)
from cutefce.cute_kernels.spec.rowwise import (
    RowCoefficientsSpec as RowCoefficientsSpec,
)
from cutefce.cute_kernels.spec.rowwise import (
    ScaleAddRowsSpec as ScaleAddRowsSpec,
)
from cutefce.cute_kernels.spec.rowwise import (
    SelectRowsSpec as SelectRowsSpec,
)
from cutefce.cute_kernels.spec.rowwise import (
    SoftLogitsSpec as SoftLogitsSpec,
)
from cutefce.cute_kernels.spec.rowwise import (
    SortTargetsSpec as SortTargetsSpec,
)
from cutefce.cute_kernels.spec.rowwise import (
    TargetLogitSpec as TargetLogitSpec,
)
from cutefce.cute_kernels.spec.sampling import (
    ListSamplesSpec as ListSamplesSpec,
)
from cutefce.cute_kernels.spec.sampling import (
    PrepareSamplesSpec as PrepareSamplesSpec,
)
from cutefce.cute_kernels.spec.sampling import (
    SortSamplesSpec as SortSamplesSpec,
)
from cutefce.cute_kernels.spec.sampling import (
    SparseRowsSpec as SparseRowsSpec,
)
