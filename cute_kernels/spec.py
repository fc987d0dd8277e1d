"""Kernel specs: frozen descriptions of every kernel that can be compiled, which are its JIT keys.

This module does not import the DSL.
"""

import dataclasses
import functools
from dataclasses import dataclass
from itertools import product
from typing import ClassVar, Literal, NamedTuple

from cutefce.cute_kernels.arch.base import Arch
from cutefce.cute_kernels.config import GemmConfig, KernelConfigs
from cutefce.cute_kernels.integers import ceil_div
from cutefce.cute_kernels.problem import can_keep
from cutefce.cute_kernels.variant import (
    IDENTITY,
    PLAIN,
    PREBUILT,
    SUM_ONLY,
    KernelVariant,
    LogitTransform,
    RowReductions,
)
from cutefce.cute_kernels.workspace import forward_semaphore_count


@dataclass(frozen=True)
class ProjectExpSpec:
    """Exponentials of the logits: their row sums, the exponentials themselves, or both.

    With softcap, what is stored is multiplied by the derivative of tanh; row sums are not.
    """

    arch: str
    dtype: str
    config: GemmConfig
    sums: bool
    """Whether to write row sums."""
    store: bool
    """Whether to store exponentials."""
    only_flagged: bool = False
    """Whether to skip row blocks without a repair flag."""
    transform: LogitTransform = IDENTITY
    reductions: RowReductions = SUM_ONLY


@dataclass(frozen=True)
class TargetLogitSpec:
    """The targets' logits; also zeroes the semaphores of the kernels that follow."""

    arch: str
    dtype: str
    transform: LogitTransform = IDENTITY

    WARPS: ClassVar[int] = 8
    """Warps of a thread block, one a row."""

    def max_zeros(self, tokens: int) -> int:
        """Return the number of int32 zeros that its threads can write, one each."""
        return ceil_div(tokens, self.WARPS) * 32 * self.WARPS


@dataclass(frozen=True)
class ReducePartialsSpec:
    """Partial sums to row statistics and the loss; flags row blocks that need repair."""

    arch: str
    rows: int
    """Rows of a row block."""


@dataclass(frozen=True)
class FusedForwardSpec:
    """The forward without stored exponentials: three kernels launched by one host function."""

    arch: str
    dtype: str
    config: GemmConfig
    transform: LogitTransform = IDENTITY

    @property
    def target_logit(self) -> TargetLogitSpec:
        """The first kernel."""
        return TargetLogitSpec(self.arch, self.dtype, self.transform)

    @property
    def row_sums(self) -> ProjectExpSpec:
        """The second kernel."""
        kind = self.arch, self.dtype, self.config
        return ProjectExpSpec(*kind, sums=True, store=False, transform=self.transform)

    @property
    def reduce_partials(self) -> ReducePartialsSpec:
        """The third kernel."""
        return ReducePartialsSpec(self.arch, self.config.rows)

    def workspace_size(self, tokens: int, vocab_splits: int) -> int:
        """Return the size of the workspace between its kernels, in elements of 4 bytes."""
        semaphores: int = forward_semaphore_count(tokens, self.config.rows)
        return tokens * (1 + vocab_splits * self.config.partials_per_row) + semaphores


@dataclass(frozen=True)
class ScaleAddRowsSpec:
    """out_i = row_scale_i x_i + gather_scale_i table_{index_i}: s ⊙ h, and dX's last step.

    With `rank_one`, factor_i row is added.
    """

    arch: str
    out: str
    """Dtype of the result."""
    x: str
    """Dtype of x."""
    table: str | None = None
    """Dtype of the table; None without the second term."""
    rank_one: bool = False
    """Whether to add a matrix of rank one; needs a table."""


@dataclass(frozen=True)
class GradGemmSpec:
    """A gradient GEMM: exponentials times w, or transposed exponentials times hidden states."""

    arch: str
    dtype: str
    config: GemmConfig
    wrt: Literal["hidden", "weight"]
    """The operand that the gradient belongs to."""
    final: bool
    """Whether to add the targets' terms and round; otherwise it accumulates in float32."""
    rank_one: bool = False
    """Whether to add a matrix of rank one before rounding; needs `final`."""

    WARPS: ClassVar[int] = 8
    """Warps of a thread block that run MMAs."""

    def semaphore_count(self, clusters: int) -> int:
        """Return the size of its int32 semaphores on `clusters` clusters."""
        return 1 if self.final else 1 + clusters * self.config.cluster * self.WARPS


@dataclass(frozen=True)
class AddTargetsSpec:
    """Adds the targets' terms to the float32 sums of dW."""

    arch: str
    dtype: str


KernelSpec = (
    ProjectExpSpec
    | GradGemmSpec
    | TargetLogitSpec
    | ReducePartialsSpec
    | FusedForwardSpec
    | ScaleAddRowsSpec
    | AddTargetsSpec
)


@dataclass(frozen=True)
class KernelSet:
    """The kernels that one architecture, dtype and configuration need."""

    fused_forward: FusedForwardSpec
    """The forward without stored exponentials."""
    target_logit: TargetLogitSpec
    row_sums: ProjectExpSpec
    """The same forward's row sums, where ranks split the vocabulary."""
    row_sums_and_exps: ProjectExpSpec
    """The forward that stores exponentials."""
    exps: ProjectExpSpec
    """Recomputes exponentials in the backward."""
    repair_exps: ProjectExpSpec
    """Stores exponentials of flagged row blocks again."""
    reduce_partials: ReducePartialsSpec
    scale_rows: ScaleAddRowsSpec
    """s_i h_i."""
    scale_fp32_rows: ScaleAddRowsSpec
    """The same for float32 rows."""
    finish_dx: ScaleAddRowsSpec
    """s_i x_i + c_i W_y."""
    finish_dx_fp32: ScaleAddRowsSpec
    """The same without rounding: one rank's addend."""
    grad_hidden: GradGemmSpec | None
    """Adds to the sums of dX; None if cuBLAS does."""
    grad_hidden_short: GradGemmSpec | None
    """The same for few columns."""
    grad_weight: GradGemmSpec | None
    """dW in one pass; None if cuBLAS and elementwise passes compute it."""
    grad_weight_accumulate: GradGemmSpec | None
    """Adds to the sums of dW."""
    add_targets: AddTargetsSpec | None
    """Adds the targets' terms to the sums of dW."""

    @property
    def grad_weight_kernels(self) -> "GradWeightKernels | None":
        """The kernels of dW, None on architectures without them."""
        if self.grad_weight is None or self.grad_weight_accumulate is None or not self.add_targets:
            return None
        return GradWeightKernels(self.grad_weight, self.grad_weight_accumulate, self.add_targets)

    STORED_EXPS_ONLY: ClassVar = (
        "row_sums_and_exps",
        "repair_exps",
        "scale_fp32_rows",
        "grad_weight_accumulate",
        "add_targets",
    )
    """Kernels that only plans with stored exponentials launch."""

    def all(self) -> list[KernelSpec]:
        """Return every kernel of the set that a call may launch."""
        unused = () if can_keep(self.row_sums.dtype) else self.STORED_EXPS_ONLY
        names = (field.name for field in dataclasses.fields(self) if field.name not in unused)
        kernels = (getattr(self, name) for name in names)
        return [kernel for kernel in kernels if kernel is not None]


class GradWeightKernels(NamedTuple):
    """The kernels of dW."""

    final: GradGemmSpec
    accumulate: GradGemmSpec
    add_targets: AddTargetsSpec


def kernel_set(
    arch: Arch, dtype: str, configs: KernelConfigs, variant: KernelVariant = PLAIN
) -> KernelSet:
    """Return the kernels that `dtype` needs on `arch` with `configs`.

    The fused forward has no row reductions beside Σ exp.
    """
    transform, reductions = variant.transform, variant.reductions
    project_exp = arch.name, dtype, configs.project_exp
    project = functools.partial(ProjectExpSpec, *project_exp, transform=transform)
    hidden, short = (
        None if config is None else GradGemmSpec(arch.name, dtype, config, "hidden", final=False)
        for config in (configs.grad_hidden, configs.grad_hidden_short)
    )
    weight = accumulate = add_targets = None
    if configs.grad_weight is not None:
        weight = GradGemmSpec(arch.name, dtype, configs.grad_weight, "weight", final=True)
        accumulate = dataclasses.replace(weight, final=False)
        add_targets = AddTargetsSpec(arch.name, dtype)
    forward = FusedForwardSpec(*project_exp, transform)
    return KernelSet(
        fused_forward=forward,
        target_logit=forward.target_logit,
        row_sums=project(sums=True, store=False, reductions=reductions),
        row_sums_and_exps=project(sums=True, store=True, reductions=reductions),
        exps=project(sums=False, store=True),
        repair_exps=project(sums=False, store=True, only_flagged=True),
        reduce_partials=forward.reduce_partials,
        scale_rows=ScaleAddRowsSpec(arch.name, dtype, dtype),
        scale_fp32_rows=ScaleAddRowsSpec(arch.name, dtype, "float32"),
        finish_dx=ScaleAddRowsSpec(arch.name, dtype, "float32", dtype),
        finish_dx_fp32=ScaleAddRowsSpec(arch.name, "float32", "float32", dtype),
        grad_hidden=hidden,
        grad_hidden_short=short,
        grad_weight=weight,
        grad_weight_accumulate=accumulate,
        add_targets=add_targets,
    )


MANY_TOKENS = 8192
"""Tokens whose default configuration the prebuilt variants have."""


def all_kernels(arch: Arch) -> list[KernelSpec]:
    """Return the kernels of every prebuilt and verified configuration on `arch`, each once.

    These configurations are the defaults and common winners; those of variants are fewer.
    """
    gradients = arch.grad_gemm_configs() or (None,)
    sets = [
        kernel_set(arch, dtype, KernelConfigs(config, gradient, gradient))
        for dtype, config, gradient in product(arch.dtypes, arch.prebuilt_configs(), gradients)
    ]
    gradient, default = gradients[0], arch.default(MANY_TOKENS)
    configs = KernelConfigs(default, gradient, gradient)
    sets += [kernel_set(arch, arch.dtypes[0], configs, variant) for variant in PREBUILT]
    return list(dict.fromkeys(kernel for kernels in sets for kernel in kernels.all()))
