"""The kernels of a call: those that one architecture, dtype and configuration need.

This module does not import the DSL.
"""

import dataclasses
import functools
from dataclasses import dataclass

from cutefce.cute_kernels.arch.base import Arch
from cutefce.cute_kernels.config import KernelConfigs
from cutefce.cute_kernels.problem import FLOAT32_LOW_BITS, LOW_BITS, can_keep
from cutefce.cute_kernels.spec.gemm import GradGemmSpec, ProjectExpSpec
from cutefce.cute_kernels.spec.rowwise import ReducePartialsSpec, TargetLogitSpec
from cutefce.cute_kernels.variant import PLAIN, KernelVariant


@dataclass(frozen=True)
class KernelSet:
    """Kernels that depend on the configuration and options of a call, with the names of others."""

    arch: str
    dtype: str
    target_logit: TargetLogitSpec
    row_sums: ProjectExpSpec
    """Row sums; if `can_keep`, it stores the exponentials of the first columns, too."""
    exps: ProjectExpSpec
    """Recomputes exponentials in the backward."""
    repair_exps: ProjectExpSpec
    """Stores exponentials of flagged row blocks again."""
    reduce_partials: ReducePartialsSpec
    grad_hidden: GradGemmSpec | None
    """Adds to the sums of dX; None if cuBLAS computes those of all columns."""
    grad_hidden_short: GradGemmSpec | None
    """The same for few columns."""
    grad_hidden_again: GradGemmSpec | None
    """The same without cuBLAS: of windows, or where the device says whether there are any rows."""
    grad_hidden_packed: GradGemmSpec | None
    """Adds to packed sums of dX, of low bits that are replaced; None if cuBLAS and elementwise
    passes do."""
    grad_weight: GradGemmSpec | None
    """dW in one pass; None if cuBLAS and elementwise passes compute it."""
    grad_weight_packed: GradGemmSpec | None
    """Adds to sums of dW, of low bits that are replaced."""

    @property
    def sampled_sums(self) -> ProjectExpSpec:
        """`row_sums` that also samples entries."""
        return dataclasses.replace(
            self.row_sums, config=self.exps.config, store=False, samples=True
        )


def kernel_set(
    arch: Arch,
    dtype: str,
    configs: KernelConfigs,
    variant: KernelVariant = PLAIN,
) -> KernelSet:
    """Return the kernels that `dtype` needs on `arch` with `configs`."""
    transform, reductions = variant.transform, variant.reductions
    exps = configs.exps or configs.project_exp
    repair = arch.listed["exps"][0] if configs.exps else exps  # it seldom has anything to do
    project = functools.partial(ProjectExpSpec, arch.name, dtype, transform=transform)
    hidden, short = (
        None if config is None else GradGemmSpec(arch.name, dtype, config, "hidden", final=False)
        for config in (configs.grad_hidden, configs.grad_hidden_short)
    )
    weight = packed_weight = packed_hidden = None
    again = hidden
    if configs.grad_weight is not None:
        assert configs.packed_sums is not None
        first = arch.listed["grad_hidden"][0]
        again = hidden or GradGemmSpec(arch.name, dtype, first, "hidden", final=False)
        weight = GradGemmSpec(arch.name, dtype, configs.grad_weight, "weight", final=True)
        packed_weight = dataclasses.replace(
            weight, config=configs.packed_sums, final=False, low_bits=FLOAT32_LOW_BITS
        )
        packed_hidden = dataclasses.replace(packed_weight, wrt="hidden", low_bits=LOW_BITS[0])
    return KernelSet(
        arch=arch.name,
        dtype=dtype,
        target_logit=TargetLogitSpec(arch.name, dtype, transform),
        row_sums=project(
            configs.project_exp, sums=True, store=can_keep(dtype), reductions=reductions
        ),
        exps=project(exps, sums=False, store=True),
        repair_exps=project(repair, sums=False, store=True, only_flagged=True),
        reduce_partials=ReducePartialsSpec(arch.name, repair.rows),
        grad_hidden=hidden,
        grad_hidden_short=short,
        grad_hidden_again=again,
        grad_hidden_packed=packed_hidden,
        grad_weight=weight,
        grad_weight_packed=packed_weight,
    )
