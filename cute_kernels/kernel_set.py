"""The kernels of a call: those that one architecture, dtype and configuration need.

This module does not import the DSL.
"""

import dataclasses
import functools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar, TypeVar

from cutefce.cute_kernels.arch import arch_named
from cutefce.cute_kernels.arch.base import Arch
from cutefce.cute_kernels.config import KernelConfigs
from cutefce.cute_kernels.parts import FORWARD, SAMPLES, SOFT_TARGETS, STEP
from cutefce.cute_kernels.problem import FLOAT32_LOW_BITS, LOW_BITS, WEIGHT_LOW_BITS, can_keep
from cutefce.cute_kernels.spec import (
    GradGemmSpec,
    KeptSumsSpec,
    KernelSpec,
    MoveRowsSpec,
    ProjectExpSpec,
    PutSoftSpec,
    ReducePartialsSpec,
    RowCoefficientsSpec,
    ScaleAddRowsSpec,
    SelectRowsSpec,
    SoftLogitsSpec,
    SortTargetsSpec,
    TargetLogitSpec,
)
from cutefce.cute_kernels.variant import PLAIN, KernelVariant

KeptT = TypeVar("KeptT", GradGemmSpec, KeptSumsSpec)


def with_low_bits(kernel: KeptT | None, low_bits: int) -> KeptT:
    """Return the kernel of sums with other low bits than those that a `KernelSet` names."""
    assert kernel is not None
    return dataclasses.replace(kernel, low_bits=low_bits)


@dataclass(frozen=True)
class KernelSet:
    """The kernels that one architecture, dtype and configuration need."""

    select_rows: SelectRowsSpec
    move_rows: MoveRowsSpec
    gather_scaled_rows: MoveRowsSpec
    """s_i h_i of the rows that count."""
    target_logit: TargetLogitSpec
    soft_logits: SoftLogitsSpec
    """Logits of soft targets but their leads."""
    put_soft: PutSoftSpec
    """Their entries among exponentials."""
    scale_soft: PutSoftSpec
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
    scale_rows: MoveRowsSpec
    """s_i h_i."""
    finish_dx: ScaleAddRowsSpec
    """s_i x_i + c_i W_y."""
    finish_dx_fp32: ScaleAddRowsSpec
    """The same without rounding: one rank's addend."""
    keep_sums: KeptSumsSpec
    """The sums of dX in a chunk, as gradients in forward keep them, in 20 bits."""
    finish_kept: KeptSumsSpec
    """dX of these, or of sums in 24 bits."""
    scale_kept_rows: KeptSumsSpec
    """Multiplies rows of these, which remain kept."""
    grad_hidden: GradGemmSpec | None
    """Adds to the sums of dX; None if cuBLAS computes those of all columns."""
    grad_hidden_short: GradGemmSpec | None
    """The same for few columns."""
    grad_hidden_again: GradGemmSpec | None
    """The same without cuBLAS: of windows, or where the device says whether there are any rows."""
    grad_hidden_keep: GradGemmSpec | None
    """Adds to these; None if cuBLAS and elementwise passes do."""
    grad_weight: GradGemmSpec | None
    """dW in one pass; None if cuBLAS and elementwise passes compute it."""
    grad_weight_keep: GradGemmSpec | None
    """Adds to sums of dW with each of `WEIGHT_LOW_BITS` that the dtype has."""
    finish_kept_weight: KeptSumsSpec | None
    """dW of sums in 20 and in 24 bits."""
    sort_targets: SortTargetsSpec | None
    """Lists the tokens of each target, whose terms the GEMMs of dW add."""

    @property
    def grad_hidden_scaling(self) -> GradGemmSpec | None:
        """`grad_hidden` that also multiplies exponentials, of calls with soft targets alone."""
        kernel = self.grad_hidden
        if kernel is None:
            return None
        config = arch_named(kernel.arch).scaling_config(kernel.config)
        return dataclasses.replace(kernel, config=config).scaling

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

    LOW_BITS: ClassVar = {
        "finish_kept": LOW_BITS,
        "scale_kept_rows": LOW_BITS,
        "grad_hidden_keep": LOW_BITS,
        "grad_weight_keep": WEIGHT_LOW_BITS,
        "finish_kept_weight": LOW_BITS,
    }
    """Low bits that kernels of kept sums are launched with, see `with_low_bits`."""

    OF_FORWARD: ClassVar = (
        "select_rows",
        "move_rows",
        "target_logit",
        "row_sums",
        "reduce_partials",
    )
    """Kernels of losses without gradients."""

    OF_SAMPLES: ClassVar = (
        "select_rows",
        "move_rows",
        "target_logit",
        "row_sums",
        "reduce_partials",
        "row_coefficients",
    )
    """Those beside `sampling_set` of sampled gradients."""

    SOFT_ONLY: ClassVar = "soft_logits", "put_soft", "scale_soft"
    """Kernels that only calls with soft targets launch, beside `grad_hidden_scaling`."""

    OF_SOFT_TARGETS: ClassVar = (
        *SOFT_ONLY,
        "target_logit",
        "grad_hidden",
        "grad_hidden_short",
        "grad_hidden_scaling",
    )
    """Kernels that compute what soft targets change."""

    def all(self) -> list[KernelSpec]:
        """Return every kernel of the set that a call may launch."""
        return self._named(field.name for field in dataclasses.fields(self))

    def of_part(self, part: str) -> list[KernelSpec]:
        """Return the kernels of this set that compute a part of calls, of `cute_kernels.parts`."""
        if part == STEP:
            fields = (field.name for field in dataclasses.fields(self))
            return self._named(name for name in fields if name not in self.SOFT_ONLY)
        named = {
            **{FORWARD: self.OF_FORWARD, SAMPLES: self.OF_SAMPLES},
            SOFT_TARGETS: self.OF_SOFT_TARGETS,
        }
        return self._named(named.get(part, ()))

    def _named(self, names: Iterable[str]) -> list[KernelSpec]:
        """Return the kernels of fields that calls of this dtype launch."""
        keeps = can_keep(self.row_sums.dtype)
        unused = () if keeps else self.STORED_EXPS_ONLY
        kernels: list[KernelSpec] = []
        for name in names:
            kernel: KernelSpec | None = getattr(self, name)
            if kernel is None or name in unused:
                continue
            if isinstance(kernel, GradGemmSpec | KeptSumsSpec) and name in self.LOW_BITS:
                every = self.LOW_BITS[name] if keeps else (FLOAT32_LOW_BITS,)
                kernels += [dataclasses.replace(kernel, low_bits=low_bits) for low_bits in every]
            else:
                kernels.append(kernel)
        return kernels


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
    weight = keep_weight = keep_hidden = sort_targets = None
    again = hidden
    kept = functools.partial(KeptSumsSpec, arch.name, dtype, LOW_BITS[0])
    if configs.grad_weight is not None:
        assert configs.kept_sums is not None
        first = arch.grad_hidden_configs()[0]
        again = hidden or GradGemmSpec(arch.name, dtype, first, "hidden", final=False)
        weight = GradGemmSpec(arch.name, dtype, configs.grad_weight, "weight", final=True)
        keep_weight = dataclasses.replace(
            weight, config=configs.kept_sums, final=False, low_bits=FLOAT32_LOW_BITS
        )
        keep_hidden = dataclasses.replace(keep_weight, wrt="hidden", low_bits=LOW_BITS[0])
        sort_targets = SortTargetsSpec(arch.name)
    narrow = not can_keep(dtype)
    return KernelSet(
        select_rows=SelectRowsSpec(arch.name),
        move_rows=MoveRowsSpec(arch.name),
        gather_scaled_rows=MoveRowsSpec(arch.name, dtype),
        target_logit=TargetLogitSpec(arch.name, dtype, transform),
        soft_logits=SoftLogitsSpec(arch.name, dtype),
        put_soft=PutSoftSpec(arch.name, dtype),
        scale_soft=PutSoftSpec(arch.name, dtype, scales=True),
        row_sums=project(
            configs.project_exp, sums=True, store=can_keep(dtype), reductions=reductions
        ),
        exps=project(exps, sums=False, store=True),
        repair_exps=project(repair, sums=False, store=True, only_flagged=True),
        reduce_partials=ReducePartialsSpec(arch.name, repair.rows),
        row_coefficients=RowCoefficientsSpec(arch.name, narrow=narrow),
        probability_coefficients=RowCoefficientsSpec(arch.name, in_reference=True, narrow=narrow),
        scale_rows=MoveRowsSpec(arch.name, dtype, orders=False),
        finish_dx=ScaleAddRowsSpec(arch.name, dtype, "float32", dtype),
        finish_dx_fp32=ScaleAddRowsSpec(arch.name, "float32", "float32", dtype),
        keep_sums=kept("keep"),
        finish_kept=kept("finish"),
        scale_kept_rows=kept("scale"),
        grad_hidden=hidden,
        grad_hidden_short=short,
        grad_hidden_again=again,
        grad_hidden_keep=keep_hidden,
        grad_weight=weight,
        grad_weight_keep=keep_weight,
        finish_kept_weight=None if weight is None else kept("round"),
        sort_targets=sort_targets,
    )
