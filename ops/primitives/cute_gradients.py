"""`Gradients` on the CuTe DSL kernels: what their launches are given.

`CuteGradients` has a kernel for every GEMM but those of dX that cuBLAS runs faster; it adds the
targets' part of dW in the epilogue.  `CublasGradients` is for architectures without GEMM kernels:
cuBLAS, and kernels for the row-wise steps.
"""

from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from cutefce.cute_kernels.arch.base import TILE_K
from cutefce.cute_kernels.config import KernelConfigs
from cutefce.cute_kernels.integers import ceil_div
from cutefce.cute_kernels.jit.cache import compiled
from cutefce.cute_kernels.kernel_set import GradWeightKernels, KernelSet
from cutefce.cute_kernels.schedule.order import choose_k_splits
from cutefce.cute_kernels.spec import GradGemmSpec, ScaleAddRowsSpec, SortTargetsSpec
from cutefce.cute_kernels.workspace import Coefficient
from cutefce.ops.primitives.cute_projection import Semaphores
from cutefce.ops.primitives.interface import row_range
from cutefce.ops.primitives.portable_gradients import PortableGradients, TargetRows, matmul_into
from cutefce.ops.primitives.row_selection import gather_rows, row_count
from cutefce.ops.rows.coefficients import RankOne, RowCoefficients
from cutefce.ops.rows.scaling import Scaling, scaling_of
from cutefce.ops.rows.selection import RowSelection
from cutefce.ops.rows.statistics import RowStats
from cutefce.ops.rows.targets import Targets

SpecT = TypeVar("SpecT", GradGemmSpec, ScaleAddRowsSpec)

RankOneArgument = tuple[Tensor, Tensor] | None
"""A kernel's argument: factor (M,) and row (D,)."""


@dataclass(frozen=True)
class TargetCsr:
    """The tokens of each target, in order, and what each contributes to dW."""

    order: Tensor
    """(N,) int64: tokens sorted by target; undefined behind the last list."""
    offsets: Tensor
    """(V + 1,) int32: where in `order` the tokens of each target begin."""
    coefficient: Tensor
    """(N,): in that order."""
    h: Tensor
    """(N, D)"""

    @staticmethod
    def of(spec: SortTargetsSpec, h: Tensor, coefficient: Tensor, targets: Targets) -> "TargetCsr":
        """Sort tokens with coefficients (N,) by target; those of no target here are in no list.

        If tokens were selected, `h` has the rows of all.
        """
        index, chosen = targets.index, targets.selection
        order, in_order = torch.empty_like(index), torch.empty_like(coefficient)
        offsets = index.new_empty(targets.vocab + 1, dtype=torch.int32)
        rows, maps = (index, 0) if chosen is None else (chosen.order, 1)
        operands = index, coefficient.contiguous(), rows, order, offsets, in_order
        compiled(spec)(*operands, targets.options.ignore_index, maps)
        return TargetCsr(order, offsets, in_order, h)

    def pack(self, first: int, rows: int) -> tuple[Tensor, ...]:
        """Return the kernels' arguments for `rows` rows of dW from `first` on."""
        offsets = row_range(self.offsets, first, first + rows + 1)
        return self.order, offsets, self.coefficient, self.h


class RowwiseSteps:
    """The row-wise steps of `cutefce.ops.primitives.interface.Gradients`, on the kernels."""

    kernels: KernelSet
    semaphores: Semaphores

    def scaling(
        self,
        dtype: torch.dtype,
        targets: Targets,
        stats: RowStats,
        upstream: Tensor,
        *,
        in_reference: bool,
    ) -> Scaling:
        if not targets.is_uniform:
            return scaling_of(dtype, targets, stats, upstream, in_reference=in_reference)
        if targets.tensors.denominator is not None:
            upstream = upstream * targets.loss_scale(stats.rows.dtype)
        kernels, rows, terms = self.kernels, stats.rows, targets.terms
        spec = kernels.probability_coefficients if in_reference else kernels.row_coefficients
        if terms is not None:
            spec = replace(spec, terms=True)
        coefficients = rows.new_empty(spec.planes, rows.shape[1])
        grad_scale, zeros = rows.new_empty(()), self.semaphores.adopt_new(rows.device)
        upstream = upstream.to(rows.dtype).reshape(-1).contiguous()
        count = row_count(targets.selection, zeros)
        numbers = targets.options.ignore_index, int(targets.divides_by_count)
        more = targets.vocab, None if terms is None else terms.numbers
        results = coefficients, grad_scale, zeros
        compiled(spec)(rows, targets.index, upstream, *results, *count, *numbers, *more)
        part = coefficients.unbind()
        has_every = terms is not None and terms.has_class_row
        scale, target = part[Coefficient.DX_SCALE], part[Coefficient.DX_TARGET]
        every = part[Coefficient.DX_EVERY] if has_every else None
        dx = RowCoefficients(scale, target, every)
        if in_reference or spec.narrow:
            scale, target = part[Coefficient.DW_SCALE], part[Coefficient.DW_TARGET]
            every = part[Coefficient.DW_EVERY] if has_every else None
        return Scaling(
            reference=part[Coefficient.REFERENCE] if in_reference else stats.reference,
            row_scale=None if in_reference else scale,
            target=target,
            every=every,
            factor=None,
            grad_scale=grad_scale,
            dx=dx,
        )

    def scale_rows(self, out: Tensor, x: Tensor, scale: Tensor) -> None:
        same = x.dtype == out.dtype
        spec = self.kernels.scale_rows if same else self.kernels.scale_fp32_rows
        launch_scale_rows(spec, out, x, scale)

    def finish_dx(
        self,
        out: Tensor,
        sums: Tensor,
        w: Tensor,
        targets: Targets,
        coefficients: RowCoefficients,
        rank_one: RankOne | None = None,
        order: Tensor | None = None,
    ) -> None:
        kernels = self.kernels
        spec = kernels.finish_dx if out.dtype == w.dtype else kernels.finish_dx_fp32
        spec, term = with_rank_one(spec, rank_one)
        rows = coefficients.scale.contiguous(), coefficients.target, targets.index
        places = (targets.index, 0) if order is None else (order, 1)
        compiled(spec)(out, sums, w, *rows, term, *places)


class CublasGradients(RowwiseSteps, PortableGradients):
    """`cutefce.ops.primitives.interface.Gradients` with kernels for the row-wise steps alone."""

    def __init__(self, kernels: KernelSet, window: int, semaphores: Semaphores) -> None:
        super().__init__(window)
        self.kernels, self.semaphores = kernels, semaphores

    def target_grad(self, h: Tensor, coefficient: Tensor, targets: Targets) -> TargetRows:
        if targets.selection is not None:
            h = gather_rows(self.kernels, h, targets.selection)
        return super().target_grad(h, coefficient, targets)


class CuteGradients(RowwiseSteps):
    """`cutefce.ops.primitives.interface.Gradients` for one device, dtype and configuration."""

    def __init__(
        self,
        kernels: KernelSet,
        grad_weight: GradWeightKernels,
        num_sms: int,
        semaphores: Semaphores,
    ) -> None:
        self.kernels, self.num_sms, self.semaphores = kernels, num_sms, semaphores
        self.grad_weight = grad_weight

    def add_grad_hidden(
        self,
        sums: Tensor,
        exps: Tensor,
        w: Tensor,
        *,
        accumulate: bool,
        selection: RowSelection | None = None,
    ) -> None:
        short = exps.shape[1] < KernelConfigs.SHORT
        spec = self.kernels.grad_hidden_short if short else self.kernels.grad_hidden
        if spec is None:
            matmul_into(sums, exps, w, accumulate=accumulate)
        else:
            self._gemm(spec, sums, exps, w, accumulate, selection)

    def add_grad_weight(
        self,
        sums: Tensor,
        exps: Tensor,
        scaled: Tensor,
        *,
        accumulate: bool,
        selection: RowSelection | None = None,
    ) -> None:
        spec = self.grad_weight.accumulate
        self._gemm(spec, sums, exps.t(), scaled, accumulate, selection)

    def target_grad(self, h: Tensor, coefficient: Tensor, targets: Targets) -> TargetCsr:
        return TargetCsr.of(self.grad_weight.sort_targets, h, coefficient, targets)

    def finish_dw(
        self,
        out: Tensor,
        exps: Tensor,
        scaled: Tensor,
        target_grad: TargetCsr,
        first: int,
        grad_scale: Tensor,
        rank_one: RankOne | None = None,
        selection: RowSelection | None = None,
    ) -> None:
        spec, term = with_rank_one(self.grad_weight.final, rank_one)
        clusters, semaphores = self._launch_shape(spec, out.device)
        targets = *target_grad.pack(first, out.shape[0]), grad_scale.view(1)
        operands = exps.t(), scaled.t(), out, targets, term
        count = row_count(selection, semaphores)
        compiled(spec)(*operands, semaphores, *count, clusters, None, None)

    def add_target_grad(
        self,
        sums: Tensor,
        target_grad: TargetCsr,
        first: int,
        rank_one: RankOne | None = None,
    ) -> None:
        compiled(self.grad_weight.add_targets)(sums, *target_grad.pack(first, sums.shape[0]))
        if rank_one is not None:
            sums.addr_(rank_one.factor, rank_one.row)

    def _gemm(
        self,
        spec: GradGemmSpec,
        out: Tensor,
        a: Tensor,
        b: Tensor,
        accumulate: bool,
        selection: RowSelection | None,
    ) -> None:
        """`out (M, N) = a (M, K) @ b (K, N)`, or `out +=` if `accumulate`."""
        clusters, semaphores = self._launch_shape(spec, out.device)
        tiles = ceil_div(out.shape[0], spec.config.rows)
        tiles *= ceil_div(out.shape[1], spec.config.tile_n)
        splits = choose_k_splits(tiles, clusters, ceil_div(a.shape[1], TILE_K))
        overwrite = int(not accumulate)
        count = row_count(selection, semaphores)
        launch = compiled(spec)
        launch(a, b.t(), out, None, None, semaphores, *count, clusters, splits, overwrite)

    def _launch_shape(self, spec: GradGemmSpec, device: torch.device) -> tuple[int, Tensor]:
        """Return the clusters of a launch, and its semaphores."""
        clusters = self.num_sms // spec.config.cluster
        return clusters, self.semaphores.take(spec.semaphore_count(clusters), device)


def with_rank_one(spec: SpecT, rank_one: RankOne | None) -> tuple[SpecT, RankOneArgument]:
    """Return the kernel that adds `rank_one`, and its argument; `spec` itself without one."""
    if rank_one is None:
        return spec, None
    return replace(spec, rank_one=True), (rank_one.factor.contiguous(), rank_one.row)


def launch_scale_rows(spec: ScaleAddRowsSpec, out: Tensor, x: Tensor, scale: Tensor) -> None:
    """Write scale_i x_i to `out` (M, D), rounded once; `out` may be `x`."""
    scale = scale.contiguous()
    compiled(spec)(out, x, None, scale, None, None, None, None, 0)
