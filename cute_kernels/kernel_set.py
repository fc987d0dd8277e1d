"""The kernels of a call: those that one architecture, dtype and configuration need.

This module does not import the DSL.
"""

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import ClassVar

from cutefce.cute_kernels.arch import arch_named
from cutefce.cute_kernels.arch.base import Arch
from cutefce.cute_kernels.config import KernelConfigs
from cutefce.cute_kernels.problem import LOW_BITS, WEIGHT_LOW_BITS, can_keep
from cutefce.cute_kernels.spec import (
    ClearRowsSpec,
    FusedBackwardSpec,
    FusedForwardSpec,
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
from cutefce.cute_kernels.variant import PLAIN, KernelVariant


@dataclass(frozen=True)
class KernelSet:
    """The kernels that one architecture, dtype and configuration need."""

    select_rows: SelectRowsSpec
    gather_rows: GatherRowsSpec
    gather_scaled_rows: GatherRowsSpec
    """s_i h_i of the rows that count."""
    scatter_rows: ScatterRowsSpec
    scatter_fp32_rows: ScatterRowsSpec
    """The same for one rank's addend of dX."""
    clear_rows: ClearRowsSpec
    fused_forward: FusedForwardSpec
    """The forward without stored exponentials."""
    fused_selecting_forward: FusedForwardSpec
    """The same over the rows that count alone."""
    fused_storing_forward: FusedForwardSpec | None
    """The forward of a plain loss that stores exponentials; None without kernels of dW."""
    fused_selecting_storing_forward: FusedForwardSpec | None
    """The same over the rows that count alone."""
    fused_backward: FusedBackwardSpec | None
    """Its backward, but for sums of dX that cuBLAS computes."""
    fused_selecting_backward: FusedBackwardSpec | None
    """The same over the rows that count alone."""
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
    """Row sums without stored exponentials, where ranks split the vocabulary."""
    row_sums_and_exps: ProjectExpSpec
    """The forward that stores exponentials."""
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
    finish_kept_20: KeptSumsSpec
    """dX of sums in 20 bits."""
    finish_kept_24: KeptSumsSpec
    """dX of those in 24 bits."""
    scale_kept_rows_20: ScaleKeptSpec
    """Multiplies rows of sums in 20 bits, which remain kept."""
    scale_kept_rows_24: ScaleKeptSpec
    """The same of those in 24 bits."""
    grad_hidden: GradGemmSpec | None
    """Adds to the sums of dX; None if cuBLAS computes those of all columns."""
    grad_hidden_short: GradGemmSpec | None
    """The same for few columns."""
    grad_hidden_again: GradGemmSpec | None
    """The same without cuBLAS: of windows, or where the device says whether there are any rows."""
    grad_hidden_keep_20: GradGemmSpec | None
    """Adds to sums of dX in 20 bits; None if cuBLAS and elementwise passes do."""
    grad_hidden_keep_24: GradGemmSpec | None
    """Adds to those in 24 bits."""
    grad_weight: GradGemmSpec | None
    """dW in one pass; None if cuBLAS and elementwise passes compute it."""
    grad_weight_keep_16: GradGemmSpec | None
    """Adds to the sums of dW that are rounded to 16 bits at random."""
    grad_weight_keep_20: GradGemmSpec | None
    """Adds to those in 20 bits."""
    grad_weight_keep_24: GradGemmSpec | None
    """Adds to those in 24 bits."""
    grad_weight_keep_32: GradGemmSpec | None
    """Adds to those in float32."""
    finish_kept_weight_20: ScaleKeptSpec | None
    """dW of sums in 20 bits."""
    finish_kept_weight_24: ScaleKeptSpec | None
    """dW of those in 24 bits."""
    sort_targets: SortTargetsSpec | None
    """Lists the tokens of each target, whose terms the GEMMs of dW add."""

    @property
    def kept_hidden_kernels(self) -> dict[int, KeptHiddenKernels]:
        """The kernels of dX's kept sums, by their low bits."""
        of_20 = self.grad_hidden_keep_20, self.scale_kept_rows_20, self.finish_kept_20
        of_24 = self.grad_hidden_keep_24, self.scale_kept_rows_24, self.finish_kept_24
        return {4: KeptHiddenKernels(*of_20), 8: KeptHiddenKernels(*of_24)}

    def fused_backward_of(self, selects: bool, hidden_bits: int | None) -> FusedBackwardSpec | None:
        """Return the backward of a plain loss with `hidden_bits` of dX's sums beside 16."""
        kernel = self.fused_selecting_backward if selects else self.fused_backward
        if kernel is None or hidden_bits is None:
            return kernel
        add = self.kept_hidden_kernels[hidden_bits].add
        assert add is not None
        return dataclasses.replace(
            kernel, hidden_bits=hidden_bits, hidden_config=add.config, short_config=add.config
        )

    @property
    def grad_weight_kernels(self) -> GradWeightKernels | None:
        """The kernels of dW, None on architectures without them."""
        final, sort = self.grad_weight, self.sort_targets
        keeps = self.grad_weight_keep_16, self.grad_weight_keep_20, self.grad_weight_keep_24
        finishes = self.finish_kept_weight_20, self.finish_kept_weight_24
        if not (final and sort):
            return None
        every = *keeps, self.grad_weight_keep_32
        keep = {kernel.low_bits or 0: kernel for kernel in every if kernel}
        finish_kept = {kernel.low_bits: kernel for kernel in finishes if kernel}
        return GradWeightKernels(final, keep, finish_kept, sort)

    @property
    def of_soft_targets(self) -> list[ProjectExpSpec | GradGemmSpec]:
        """The variants that only calls with soft targets launch."""
        found: list[ProjectExpSpec | GradGemmSpec] = []
        if arch_named(self.row_sums.arch).reads_soft_logits(self.row_sums.config):
            sums = [self.row_sums, *[self.row_sums_and_exps] * can_keep(self.row_sums.dtype)]
            found += [dataclasses.replace(kernel, soft=True) for kernel in sums]
        return found if self.grad_hidden is None else [*found, self.grad_hidden.scaling]

    STORED_EXPS_ONLY: ClassVar = (
        "fused_storing_forward",
        "fused_selecting_storing_forward",
        "fused_backward",
        "fused_selecting_backward",
        "row_sums_and_exps",
        "repair_exps",
        "keep_sums",
        "finish_kept_20",
        "finish_kept_24",
        "scale_kept_rows_20",
        "scale_kept_rows_24",
        "grad_hidden_again",
        "grad_hidden_keep_20",
        "grad_hidden_keep_24",
        "grad_weight_keep_16",
        "grad_weight_keep_20",
        "grad_weight_keep_24",
        "finish_kept_weight_20",
        "finish_kept_weight_24",
    )
    """Kernels that only plans with stored exponentials launch."""

    def all(self) -> list[KernelSpec]:
        """Return every kernel of the set that a call may launch."""
        unused = () if can_keep(self.row_sums.dtype) else self.STORED_EXPS_ONLY
        names = (field.name for field in dataclasses.fields(self) if field.name not in unused)
        kernels = [getattr(self, name) for name in names]
        if not unused:
            kernels += [self.fused_backward_of(*kind) for kind in product((False, True), LOW_BITS)]
        return [kernel for kernel in kernels if kernel is not None]


def kernel_set(
    arch: Arch, dtype: str, configs: KernelConfigs, variant: KernelVariant = PLAIN
) -> KernelSet:
    """Return the kernels that `dtype` needs on `arch` with `configs`.

    The fused forward has no row reductions beside Σ exp.
    """
    transform, reductions = variant.transform, variant.reductions
    assert variant == PLAIN or not configs.project_exp.swaps
    project_exp = arch.name, dtype, configs.project_exp
    project = functools.partial(ProjectExpSpec, *project_exp, transform=transform)
    hidden, short = (
        None if config is None else GradGemmSpec(arch.name, dtype, config, "hidden", final=False)
        for config in (configs.grad_hidden, configs.grad_hidden_short)
    )
    forward = FusedForwardSpec(*project_exp, transform)
    weight = sort_targets = None
    keep: Sequence[GradGemmSpec | None] = [None] * len(WEIGHT_LOW_BITS)
    keep_hidden: Sequence[GradGemmSpec | None] = [None] * len(LOW_BITS)
    finish_kept: Sequence[ScaleKeptSpec | None] = [None] * len(LOW_BITS)
    storing = backward = None
    again = hidden
    if configs.grad_weight is not None:
        assert configs.kept_sums is not None
        first = arch.grad_gemm_configs()[0]
        again = hidden or GradGemmSpec(arch.name, dtype, first, "hidden", final=False)
        weight = GradGemmSpec(arch.name, dtype, configs.grad_weight, "weight", final=True)
        of_weight = dataclasses.replace(weight, config=configs.kept_sums, final=False)
        keep = [dataclasses.replace(of_weight, low_bits=n) for n in WEIGHT_LOW_BITS]
        of_hidden = GradGemmSpec(arch.name, dtype, configs.kept_sums, "hidden", final=False)
        keep_hidden = [dataclasses.replace(of_hidden, low_bits=n) for n in LOW_BITS]
        finish_kept = [ScaleKeptSpec(arch.name, dtype, n) for n in LOW_BITS]
        sort_targets = SortTargetsSpec(arch.name)
        if variant == PLAIN:
            storing = dataclasses.replace(forward, stores=True)
            gemms = configs.grad_weight, again.config, (short or again).config
            backward = FusedBackwardSpec(arch.name, dtype, *gemms, configs.project_exp)
    narrow = not can_keep(dtype)
    return KernelSet(
        select_rows=forward.select_rows,
        gather_rows=forward.gather_rows,
        gather_scaled_rows=dataclasses.replace(forward.gather_rows, scales=True),
        scatter_rows=ScatterRowsSpec(arch.name, dtype),
        scatter_fp32_rows=ScatterRowsSpec(arch.name, "float32"),
        clear_rows=ClearRowsSpec(arch.name, dtype),
        fused_forward=forward,
        fused_selecting_forward=dataclasses.replace(forward, selects=True),
        fused_storing_forward=storing,
        fused_selecting_storing_forward=storing and dataclasses.replace(storing, selects=True),
        fused_backward=backward,
        fused_selecting_backward=backward and dataclasses.replace(backward, selects=True),
        target_logit=forward.target_logit,
        soft_leads=SoftLeadsSpec(arch.name),
        prepare_soft=PrepareSoftSpec(arch.name),
        soft_logits=SoftLogitsSpec(arch.name, dtype),
        put_soft=PutSoftSpec(arch.name, dtype),
        scale_soft=ScaleSoftSpec(arch.name, dtype),
        row_sums=project(sums=True, store=False, reductions=reductions),
        row_sums_and_exps=project(sums=True, store=True, reductions=reductions),
        exps=project(sums=False, store=True),
        repair_exps=project(sums=False, store=True, only_flagged=True),
        reduce_partials=forward.reduce_partials,
        row_coefficients=RowCoefficientsSpec(arch.name, narrow=narrow),
        probability_coefficients=RowCoefficientsSpec(arch.name, in_reference=True, narrow=narrow),
        scale_rows=ScaleAddRowsSpec(arch.name, dtype, dtype),
        finish_dx=ScaleAddRowsSpec(arch.name, dtype, "float32", dtype),
        finish_dx_fp32=ScaleAddRowsSpec(arch.name, "float32", "float32", dtype),
        keep_sums=KeptSumsSpec(arch.name, dtype, LOW_BITS[0]),
        finish_kept_20=KeptSumsSpec(arch.name, dtype, 4, finishes=True),
        finish_kept_24=KeptSumsSpec(arch.name, dtype, 8, finishes=True),
        scale_kept_rows_20=ScaleKeptSpec(arch.name, dtype, 4, by_rows=True),
        scale_kept_rows_24=ScaleKeptSpec(arch.name, dtype, 8, by_rows=True),
        grad_hidden=hidden,
        grad_hidden_short=short,
        grad_hidden_again=again,
        grad_hidden_keep_20=keep_hidden[0],
        grad_hidden_keep_24=keep_hidden[1],
        grad_weight=weight,
        grad_weight_keep_16=keep[0],
        grad_weight_keep_20=keep[1],
        grad_weight_keep_24=keep[2],
        grad_weight_keep_32=keep[3],
        finish_kept_weight_20=finish_kept[0],
        finish_kept_weight_24=finish_kept[1],
        sort_targets=sort_targets,
    )
