"""The kernels that can be compiled: each a frozen description, which is its key in the cache.

Nothing here needs the DSL.
"""

import dataclasses
import functools
from dataclasses import dataclass
from itertools import product
from typing import ClassVar, NamedTuple

from cutefce.cute_kernels.arch.base import Arch
from cutefce.cute_kernels.config import GemmConfig, KernelConfigs
from cutefce.cute_kernels.problem import can_keep
from cutefce.cute_kernels.workspace import forward_semaphore_count


@dataclass(frozen=True)
class ProjectExpSpec:
    """Exponentials of the logits: their row sums, or the exponentials themselves, or both."""

    arch: str
    dtype: str
    config: GemmConfig
    sums: bool
    """Whether it returns row sums."""
    store: bool
    """Whether it stores exponentials."""
    masked: bool = False
    """Whether it leaves out row blocks that are not noted."""


@dataclass(frozen=True)
class TargetLogitSpec:
    """Row dots h_i · w_y, and zeros for the notes of the kernels that follow."""

    arch: str
    dtype: str

    WARPS: ClassVar[int] = 8
    """Warps of a thread block, each of which takes a row."""

    def max_zeros(self, tokens: int) -> int:
        """Return how many zeros its threads can write."""
        return -(-tokens // self.WARPS) * 32 * self.WARPS


@dataclass(frozen=True)
class ReducePartialsSpec:
    """Partial sums to row sums and losses, and notes of the row blocks to store again."""

    arch: str
    rows: int
    """Rows of a row block."""


@dataclass(frozen=True)
class FusedForwardSpec:
    """The forward where nothing is stored: what `target_logit`, `sums` and `finish` do, at once."""

    arch: str
    dtype: str
    config: GemmConfig

    @property
    def target_logit(self) -> TargetLogitSpec:
        """Its first part."""
        return TargetLogitSpec(self.arch, self.dtype)

    @property
    def sums(self) -> ProjectExpSpec:
        """Its second part."""
        return ProjectExpSpec(self.arch, self.dtype, self.config, sums=True, store=False)

    @property
    def finish(self) -> ReducePartialsSpec:
        """Its third part."""
        return ReducePartialsSpec(self.arch, self.config.rows)

    def workspace_size(self, tokens: int, windows: int) -> int:
        """Return how many numbers of 4 bytes lie between its parts."""
        notes: int = forward_semaphore_count(tokens, self.config.rows)
        return tokens * (1 + windows * self.config.partials_per_row) + notes


@dataclass(frozen=True)
class ScaleAddRowsSpec:
    """out_i = a_i (x_i + b_i t_{k_i}): the last step of dX, and s ⊙ h."""

    arch: str
    out: str
    x: str
    table: str | None
    """Dtype of t; None without the second term."""
    scaled: bool
    """Whether there is an a; 1 if not."""
    weighted: bool
    """Whether there is a b; 1 if not."""


@dataclass(frozen=True)
class GradGemmSpec:
    """A product of exponentials with the weight, or of their transpose with the hidden states."""

    arch: str
    dtype: str
    config: GemmConfig
    of: str
    """What it is the gradient of: "hidden" or "weight"."""
    final: bool
    """Whether it adds the targets' part and rounds; if not, it adds to float32 sums."""

    WARPS: ClassVar[int] = 8
    """Warps of a thread block that multiply."""

    def semaphore_count(self, clusters: int) -> int:
        """Return the size of its notes on `clusters` clusters; see `cute_kernels.dsl`."""
        return 1 if self.final else 1 + clusters * self.config.cluster * self.WARPS


@dataclass(frozen=True)
class AddTargetsSpec:
    """The targets' part, added to dW's sums."""

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
    """The forward alone."""
    target_logit: TargetLogitSpec
    row_sums: ProjectExpSpec
    """The forward alone, of ranks that share it."""
    row_sums_and_exps: ProjectExpSpec
    """The forward that keeps exponentials."""
    exps: ProjectExpSpec
    """What the backward computes again."""
    repair_exps: ProjectExpSpec
    """The repair of what the forward kept."""
    reduce_partials: ReducePartialsSpec
    scale_rows: ScaleAddRowsSpec
    """s_i h_i."""
    scale_fp32_rows: ScaleAddRowsSpec
    """The same of float32 sums."""
    finish_dx: ScaleAddRowsSpec
    """s_i (x_i - S_i W_y)."""
    finish_dx_fp32: ScaleAddRowsSpec
    """The same, not rounded: one rank's part of a sum."""
    grad_hidden: GradGemmSpec | None
    """Adds to dX's sums; None: a plain product does."""
    grad_hidden_short: GradGemmSpec | None
    """The same, for few columns."""
    grad_weight: GradGemmSpec | None
    """dW at once; None: plain products, and what the portable path does with them."""
    grad_weight_accumulate: GradGemmSpec | None
    """Adds to dW's sums."""
    add_targets: AddTargetsSpec | None
    """Adds the targets' part to dW's sums."""

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
    """Those of plans that store exponentials in the forward."""

    def all(self) -> list[KernelSpec]:
        """Return every kernel of the set that a call may launch."""
        unused = () if can_keep(self.row_sums.dtype) else self.STORED_EXPS_ONLY
        names = (field.name for field in dataclasses.fields(self) if field.name not in unused)
        found = (getattr(self, name) for name in names)
        return [kernel for kernel in found if kernel is not None]


class GradWeightKernels(NamedTuple):
    """The kernels of dW."""

    final: GradGemmSpec
    accumulate: GradGemmSpec
    add_targets: AddTargetsSpec


def scale_rows(arch: str, out: str, x: str) -> ScaleAddRowsSpec:
    """Return the kernel that scales rows of dtype `x` to rows of dtype `out`."""
    return ScaleAddRowsSpec(arch, out, x, None, scaled=True, weighted=False)


def kernel_set(arch: Arch, dtype: str, configs: KernelConfigs) -> KernelSet:
    """Return the kernels that `dtype` needs on `arch` with `configs`."""
    project = functools.partial(ProjectExpSpec, arch.name, dtype, configs.project_exp)
    hidden, short = (
        None if config is None else GradGemmSpec(arch.name, dtype, config, "hidden", final=False)
        for config in (configs.grad_hidden, configs.grad_hidden_short)
    )
    weight = weight_sums = add_targets = None
    if configs.grad_weight is not None:
        weight = GradGemmSpec(arch.name, dtype, configs.grad_weight, "weight", final=True)
        weight_sums = dataclasses.replace(weight, final=False)
        add_targets = AddTargetsSpec(arch.name, dtype)
    combine = functools.partial(ScaleAddRowsSpec, arch.name, dtype)
    forward = FusedForwardSpec(arch.name, dtype, configs.project_exp)
    return KernelSet(
        fused_forward=forward,
        target_logit=forward.target_logit,
        row_sums=forward.sums,
        row_sums_and_exps=project(sums=True, store=True),
        exps=project(sums=False, store=True),
        repair_exps=project(sums=False, store=True, masked=True),
        reduce_partials=forward.finish,
        scale_rows=combine(dtype, None, scaled=True, weighted=False),
        scale_fp32_rows=combine("float32", None, scaled=True, weighted=False),
        finish_dx=combine("float32", dtype, scaled=True, weighted=True),
        finish_dx_fp32=ScaleAddRowsSpec(
            arch.name, "float32", "float32", dtype, scaled=True, weighted=True
        ),
        grad_hidden=hidden,
        grad_hidden_short=short,
        grad_weight=weight,
        grad_weight_accumulate=weight_sums,
        add_targets=add_targets,
    )


def all_kernels(arch: Arch) -> list[KernelSpec]:
    """Return every kernel that can be chosen on `arch` where nothing was tuned, each once."""
    gradients = arch.grad_gemm_configs() or (None,)
    sets = [
        kernel_set(arch, dtype, KernelConfigs(config, gradient, gradient))
        for dtype, config, gradient in product(arch.dtypes, arch.prebuilt_configs(), gradients)
    ]
    every = [kernel for s in sets for kernel in s.all()]
    return list(dict.fromkeys(every))
