"""The kernels of a call: those that one architecture, dtype and configuration need.

This module does not import the DSL.
"""

import dataclasses
import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from cutefce.cute_kernels.arch import arch_named
from cutefce.cute_kernels.arch.base import Arch
from cutefce.cute_kernels.config import KernelConfigs
from cutefce.cute_kernels.parts import FORWARD, SAMPLES, SOFT_TARGETS, STEP
from cutefce.cute_kernels.problem import FLOAT32_LOW_BITS, LOW_BITS, WEIGHT_LOW_BITS, can_keep
from cutefce.cute_kernels.spec import (
    ClearRowsSpec,
    GatherRowsSpec,
    GradGemmSpec,
    KeptSumsSpec,
    KernelSpec,
    PrepareSoftSpec,
    ProjectExpSpec,
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
from cutefce.cute_kernels.spec.groups import GradWeightKernels, KeptHiddenKernels
from cutefce.cute_kernels.variant import IDENTITY, PLAIN, KernelVariant


@dataclass(frozen=True)
class KernelSet:
    """The kernels that one architecture, dtype and configuration need."""

    select_rows: SelectRowsSpec
    gather_rows: GatherRowsSpec
    gather_scaled_rows: GatherRowsSpec
    """s_i h_i of the rows that count."""
    scatter_rows: ScatterRowsSpec
    clear_rows: ClearRowsSpec
    target_logit: TargetLogitSpec
    soft_leads: SoftLeadsSpec
    """Classes of the largest probabilities of soft targets."""
    prepare_soft: PrepareSoftSpec
    """The other classes, sorted."""
    soft_logits: SoftLogitsSpec
    """Their logits."""
    put_soft: PutSoftSpec
    """Their entries among exponentials."""
    scale_soft: ScaleSoftSpec
    """The same where exponentials get the factors of tokens."""
    row_sums: ProjectExpSpec
    """Row sums; if `can_keep`, it stores the exponentials of the first columns, too."""
    exps: ProjectExpSpec
    """Recomputes exponentials in the backward."""
    repair_exps: ProjectExpSpec
    """Stores exponentials of flagged row blocks again."""
    reduce_partials: ReducePartialsSpec
    row_coefficients: RowCoefficientsSpec
    """Factors of the rows of dX and dW from their statistics."""
    probability_coefficients: RowCoefficientsSpec
    """The same where exponentials are computed again, as probabilities."""
    scale_rows: ScaleAddRowsSpec
    """s_i h_i."""
    finish_dx: ScaleAddRowsSpec
    """s_i x_i + c_i W_y."""
    finish_dx_fp32: ScaleAddRowsSpec
    """The same without rounding: one rank's addend."""
    keep_sums: KeptSumsSpec
    """The sums of dX in a chunk, as gradients in forward keep them, in 20 bits."""
    finish_kept: tuple[KeptSumsSpec, ...]
    """dX of sums in 20 and in 24 bits, as `LOW_BITS` are."""
    scale_kept_rows: tuple[ScaleKeptSpec, ...]
    """Multiply rows of these, which remain kept."""
    grad_hidden: GradGemmSpec | None
    """Adds to the sums of dX; None if cuBLAS computes those of all columns."""
    grad_hidden_short: GradGemmSpec | None
    """The same for few columns."""
    grad_hidden_again: GradGemmSpec | None
    """The same without cuBLAS: of windows, or where the device says whether there are any rows."""
    grad_hidden_keep: tuple[GradGemmSpec | None, ...]
    """Add to these; None if cuBLAS and elementwise passes do."""
    grad_weight: GradGemmSpec | None
    """dW in one pass; None if cuBLAS and elementwise passes compute it."""
    grad_weight_keep: tuple[GradGemmSpec, ...]
    """Add to sums of dW with each of `WEIGHT_LOW_BITS` that the dtype has."""
    finish_kept_weight: tuple[ScaleKeptSpec, ...]
    """dW of sums in 20 and in 24 bits."""
    sort_targets: SortTargetsSpec | None
    """Lists the tokens of each target, whose terms the GEMMs of dW add."""

    @property
    def kept_hidden_kernels(self) -> dict[int, KeptHiddenKernels]:
        """The kernels of dX's kept sums, by their low bits."""
        kernels = zip(self.grad_hidden_keep, self.scale_kept_rows, self.finish_kept, strict=True)
        return {of.finish.low_bits: of for of in map(KeptHiddenKernels._make, kernels)}

    @property
    def grad_weight_kernels(self) -> GradWeightKernels | None:
        """The kernels of dW, None on architectures without them."""
        final, sort = self.grad_weight, self.sort_targets
        if not (final and sort):
            return None
        keep = {kernel.low_bits: kernel for kernel in self.grad_weight_keep if kernel.low_bits}
        finish_kept = {kernel.low_bits: kernel for kernel in self.finish_kept_weight}
        return GradWeightKernels(final, keep, finish_kept, sort)

    @property
    def of_soft_targets(self) -> list[ProjectExpSpec | GradGemmSpec]:
        """The variants that only calls with soft targets launch."""
        found: list[ProjectExpSpec | GradGemmSpec] = []
        if self.reads_soft_logits:
            found.append(self.with_soft_logits(self.row_sums))
        return found if self.grad_hidden_scaling is None else [*found, self.grad_hidden_scaling]

    @property
    def grad_hidden_scaling(self) -> GradGemmSpec | None:
        """`grad_hidden` that also multiplies exponentials."""
        kernel = self.grad_hidden
        if kernel is None:
            return None
        config = arch_named(kernel.arch).scaling_config(kernel.config)
        return dataclasses.replace(kernel, config=config).scaling

    @property
    def reads_soft_logits(self) -> bool:
        """Whether the kernel of row sums can write logits of soft targets."""
        return arch_named(self.exps.arch).reads_soft_logits(self.exps.config)

    def with_soft_logits(self, kernel: ProjectExpSpec) -> ProjectExpSpec:
        """Return a kernel of row sums that also writes logits of soft targets."""
        return dataclasses.replace(kernel, config=self.exps.config, soft=True)

    STORED_EXPS_ONLY: ClassVar = (
        "repair_exps",
        "keep_sums",
        "finish_kept",
        "scale_kept_rows",
        "grad_hidden_again",
        "grad_hidden_keep",
        "finish_kept_weight",
    )
    """Kernels that only plans with stored exponentials launch."""

    OF_FORWARD: ClassVar = (
        "select_rows",
        "gather_rows",
        "target_logit",
        "row_sums",
        "reduce_partials",
    )
    """Kernels of losses without gradients."""

    OF_SAMPLES: ClassVar = (
        "select_rows",
        "gather_rows",
        "target_logit",
        "row_sums",
        "reduce_partials",
        "row_coefficients",
    )
    """Those beside `sampling_set` of sampled gradients."""

    SOFT_ONLY: ClassVar = "soft_leads", "prepare_soft", "soft_logits", "put_soft", "scale_soft"
    """Kernels that only calls with soft targets launch, beside `of_soft_targets`."""

    OF_SOFT_TARGETS: ClassVar = (
        *SOFT_ONLY,
        "target_logit",
        "row_sums",
        "grad_hidden",
        "grad_hidden_short",
    )
    """Kernels that compute what soft targets change, beside `of_soft_targets`."""

    def all(self) -> list[KernelSpec]:
        """Return every kernel of the set that a call may launch."""
        return self._named(field.name for field in dataclasses.fields(self))

    def of_part(self, part: str) -> list[KernelSpec]:
        """Return the kernels of this set that compute a part of calls, of `cute_kernels.parts`."""
        if part == STEP:
            fields = (field.name for field in dataclasses.fields(self))
            return self._named(name for name in fields if name not in self.SOFT_ONLY)
        if part == SOFT_TARGETS:
            return [*self._named(self.OF_SOFT_TARGETS), *self.of_soft_targets]
        named = {FORWARD: self.OF_FORWARD, SAMPLES: self.OF_SAMPLES}
        return self._named(named.get(part, ()))

    def _named(self, names: Iterable[str]) -> list[KernelSpec]:
        """Return the kernels of fields that calls of this dtype launch."""
        unused = () if can_keep(self.row_sums.dtype) else self.STORED_EXPS_ONLY
        kernels: list[KernelSpec | None] = []
        for found in (getattr(self, name) for name in names if name not in unused):
            kernels += found if isinstance(found, tuple) else [found]
        return [kernel for kernel in kernels if kernel is not None]


def kernel_set(
    arch: Arch, dtype: str, configs: KernelConfigs, variant: KernelVariant = PLAIN
) -> KernelSet:
    """Return the kernels that `dtype` needs on `arch` with `configs`."""
    transform, reductions = variant.transform, variant.reductions
    assert variant == PLAIN or not configs.project_exp.swaps
    exps = configs.exps or configs.project_exp
    repair = arch.exps_configs()[0] if configs.exps else exps  # it seldom has anything to do
    project = functools.partial(ProjectExpSpec, arch.name, dtype, transform=transform)
    hidden, short = (
        None if config is None else GradGemmSpec(arch.name, dtype, config, "hidden", final=False)
        for config in (configs.grad_hidden, configs.grad_hidden_short)
    )
    weight = sort_targets = None
    keep_hidden: Sequence[GradGemmSpec | None] = [None] * len(LOW_BITS)
    keep: Sequence[GradGemmSpec] = ()
    finish_kept: Sequence[ScaleKeptSpec] = ()
    again = hidden
    if configs.grad_weight is not None:
        assert configs.kept_sums is not None
        first = arch.grad_hidden_configs()[0]
        again = hidden or GradGemmSpec(arch.name, dtype, first, "hidden", final=False)
        weight = GradGemmSpec(arch.name, dtype, configs.grad_weight, "weight", final=True)
        of_weight = dataclasses.replace(weight, config=configs.kept_sums, final=False)
        kept_bits = WEIGHT_LOW_BITS if can_keep(dtype) else (FLOAT32_LOW_BITS,)
        keep = [dataclasses.replace(of_weight, low_bits=n) for n in kept_bits]
        of_hidden = GradGemmSpec(arch.name, dtype, configs.kept_sums, "hidden", final=False)
        keep_hidden = [dataclasses.replace(of_hidden, low_bits=n) for n in LOW_BITS]
        finish_kept = [ScaleKeptSpec(arch.name, dtype, n) for n in LOW_BITS]
        sort_targets = SortTargetsSpec(arch.name)
    narrow = not can_keep(dtype)
    return KernelSet(
        select_rows=SelectRowsSpec(arch.name),
        gather_rows=GatherRowsSpec(arch.name),
        gather_scaled_rows=GatherRowsSpec(arch.name, dtype),
        scatter_rows=ScatterRowsSpec(arch.name),
        clear_rows=ClearRowsSpec(arch.name),
        target_logit=TargetLogitSpec(arch.name, dtype, transform != IDENTITY),
        soft_leads=SoftLeadsSpec(arch.name),
        prepare_soft=PrepareSoftSpec(arch.name),
        soft_logits=SoftLogitsSpec(arch.name, dtype),
        put_soft=PutSoftSpec(arch.name, dtype),
        scale_soft=ScaleSoftSpec(arch.name, dtype),
        row_sums=project(
            configs.project_exp, sums=True, store=can_keep(dtype), reductions=reductions
        ),
        exps=project(exps, sums=False, store=True),
        repair_exps=project(repair, sums=False, store=True, only_flagged=True),
        reduce_partials=ReducePartialsSpec(arch.name, repair.rows),
        row_coefficients=RowCoefficientsSpec(arch.name, narrow=narrow),
        probability_coefficients=RowCoefficientsSpec(arch.name, in_reference=True, narrow=narrow),
        scale_rows=ScaleAddRowsSpec(arch.name, dtype, dtype),
        finish_dx=ScaleAddRowsSpec(arch.name, dtype, "float32", dtype),
        finish_dx_fp32=ScaleAddRowsSpec(arch.name, "float32", "float32", dtype),
        keep_sums=KeptSumsSpec(arch.name, dtype, LOW_BITS[0]),
        finish_kept=tuple(KeptSumsSpec(arch.name, dtype, n, finishes=True) for n in LOW_BITS),
        scale_kept_rows=tuple(ScaleKeptSpec(arch.name, dtype, n, by_rows=True) for n in LOW_BITS),
        grad_hidden=hidden,
        grad_hidden_short=short,
        grad_hidden_again=again,
        grad_hidden_keep=tuple(keep_hidden),
        grad_weight=weight,
        grad_weight_keep=tuple(keep),
        finish_kept_weight=tuple(finish_kept),
        sort_targets=sort_targets,
    )
