"""`Primitives` on the CuTe DSL kernels, whose GEMMs in the backward are those of cuBLAS."""

from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor

from cutefce.cute_kernels.config import PortableTiles
from cutefce.cute_kernels.jit.cache import compiled
from cutefce.cute_kernels.kernel_set import KernelSet
from cutefce.cute_kernels.problem import FLOAT32_LOW_BITS, can_keep
from cutefce.cute_kernels.spec.gemm import GradGemmSpec
from cutefce.cute_kernels.spec.rowwise import (
    OUT_AND_SUMS,
    MoveRowsSpec,
    PackedStep,
    PackedSumsSpec,
    RowCoefficientsSpec,
    ScaleAddRowsSpec,
)
from cutefce.cute_kernels.workspace import Coefficient, Move
from cutefce.ops.primitives.cute_projection import CuteProjection, Semaphores
from cutefce.ops.primitives.portable_gradients import TargetGrad
from cutefce.ops.primitives.primitives import Primitives
from cutefce.ops.primitives.select_rows import gather_rows, row_count, row_order
from cutefce.ops.rows.coefficients import RankOne, RowCoefficients
from cutefce.ops.rows.packed_sums import Sums
from cutefce.ops.rows.scaling import Scaling, scaling_of
from cutefce.ops.rows.statistics import RowStats
from cutefce.ops.rows.targets import Targets

SpecT = TypeVar("SpecT", GradGemmSpec, ScaleAddRowsSpec, PackedSumsSpec)

RankOneArgument = tuple[Tensor, Tensor] | None
"""A kernel's argument: factor (M,) and row (D,)."""


class CublasPrimitives(CuteProjection, Primitives):
    """Kernels for the steps of the forward, and for the row-wise ones of the backward.

    It is for architectures without GEMM kernels.
    """

    def __init__(
        self, kernels: KernelSet, num_sms: int, tiles: PortableTiles, clears: bool
    ) -> None:
        super().__init__(tiles)
        self.kernels, self.num_sms = kernels, num_sms
        self.semaphores, self.clears = Semaphores(), clears

    def target_grad(self, h: Tensor, coefficient: Tensor | None, targets: Targets) -> TargetGrad:
        if coefficient is not None and targets.selection is not None:
            h = gather_rows(self.kernels, h, targets.selection)
        return super().target_grad(h, coefficient, targets)

    def scaling(
        self,
        dtype: torch.dtype,
        targets: Targets,
        stats: RowStats,
        upstream: Tensor,
        *,
        in_reference: bool,
    ) -> Scaling:
        if not targets.is_plain:
            return scaling_of(dtype, targets, stats, upstream, in_reference=in_reference)
        if targets.tensors.denominator is not None:
            upstream = upstream * targets.loss_scale(stats.rows.dtype)
        kernels, rows = self.kernels, stats.rows
        spec = RowCoefficientsSpec(kernels.arch, in_reference, narrow=not can_keep(kernels.dtype))
        coefficients = rows.new_empty(spec.planes, rows.shape[1])
        grad_scale, zeros = rows.new_empty(()), self.semaphores.adopt(rows)
        if upstream.dtype != rows.dtype:
            upstream = upstream.to(rows.dtype)
        upstream = upstream.reshape(-1).contiguous()
        count = row_count(targets.selection, zeros)
        numbers = targets.options.ignore_index, int(targets.divides_by_count)
        results = coefficients, grad_scale, zeros
        compiled(spec)(rows, targets.index, upstream, *results, *count, *numbers)
        part = coefficients.unbind()
        scale, target = part[Coefficient.DX_SCALE], part[Coefficient.DX_TARGET]
        dx = RowCoefficients(scale, target)
        if in_reference or spec.narrow:
            scale, target = part[Coefficient.DW_SCALE], part[Coefficient.DW_TARGET]
        return Scaling(
            reference=part[Coefficient.REFERENCE] if in_reference else stats.reference,
            row_scale=None if in_reference else scale,
            target=target,
            every=None,
            factor=None,
            grad_scale=grad_scale,
            dx=dx,
            relative=scale if in_reference else None,
        )

    def scale_rows(self, out: Tensor, x: Tensor, scale: Tensor) -> None:
        spec = MoveRowsSpec(self.kernels.arch, self.kernels.dtype, orders=False)
        compiled(spec)(out, x, None, scale.contiguous(), None, Move.GATHER)

    def finish_dx(
        self,
        out: Sums,
        sums: Sums,
        w: Tensor,
        targets: Targets,
        coefficients: RowCoefficients,
        rank_one: RankOne | None = None,
        order: Tensor | None = None,
    ) -> None:
        index = targets.index
        scale, target = coefficients.scale.contiguous(), coefficients.target
        order, scatters = row_order(order, index)
        if sums.low is None:
            dtype = self.kernels.dtype
            result = dtype if out.upper.dtype == w.dtype else "float32"  # one rank's addend
            plain = ScaleAddRowsSpec(self.kernels.arch, result, "float32", dtype)
            spec, term = with_rank_one(plain, rank_one)
            rows = scale, target, index, term, order, scatters
            compiled(spec)(out.upper, sums.upper, w, *rows)
            return
        if scatters and out.upper is sums.upper:
            scatters = OUT_AND_SUMS
        packed, term = with_rank_one(self.packed_kernel("finish", sums), rank_one)
        compiled(packed)(out.upper, *sums, w, index, scale, target, term, order, scatters)

    def pack_sums(
        self,
        packed: Sums,
        sums: Tensor,
        w: Tensor,
        targets: Targets,
        stats: RowStats,
        order: Tensor | None = None,
    ) -> None:
        rows = targets.index, stats.sum_exp_others, targets.options.ignore_index
        compiled(self.packed_kernel("pack", packed))(
            *packed, sums, w, *rows, *row_order(order, targets.index)
        )

    def scale_packed_rows(self, sums: Sums, scale: Tensor) -> None:
        compiled(self.packed_kernel("scale", sums))(*sums, scale.contiguous())

    def packed_kernel(self, step: PackedStep, sums: Sums) -> PackedSumsSpec:
        """Return the kernel of a step of packed sums."""
        return PackedSumsSpec(self.kernels.arch, self.kernels.dtype, low_bits(sums), step)


def low_bits(sums: Sums) -> int:
    """Return the low bits of each sum (M, D) beside the upper 16."""
    upper, low = sums
    return FLOAT32_LOW_BITS if low is None else 8 * low.shape[1] // upper.shape[1]


def with_rank_one(spec: SpecT, rank_one: RankOne | None) -> tuple[SpecT, RankOneArgument]:
    """Return the kernel that adds `rank_one`, and its argument; `spec` itself without one."""
    if rank_one is None:
        return spec, None
    return replace(spec, rank_one=True), (rank_one.factor.contiguous(), rank_one.row)
