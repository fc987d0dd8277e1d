"""The GEMMs of the backward on the CuTe DSL kernels: what their launches are given.

`CutePrimitives` has a kernel for every GEMM but those of dX that cuBLAS runs faster; it adds the
targets' part of dW in the epilogue.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from cutefce.cute_kernels.arch.base import TILE_K
from cutefce.cute_kernels.config import KernelConfigs
from cutefce.cute_kernels.integers import ceil_div
from cutefce.cute_kernels.jit.cache import compiled
from cutefce.cute_kernels.problem import can_keep
from cutefce.cute_kernels.schedule.order import add_tiles, choose_k_splits
from cutefce.cute_kernels.spec.gemm import GradGemmSpec
from cutefce.cute_kernels.spec.rowwise import SortTargetsSpec
from cutefce.ops.primitives.cute_rowwise import CublasPrimitives, low_bits, with_rank_one
from cutefce.ops.primitives.products import matmul_into
from cutefce.ops.primitives.select_rows import row_count, row_order, row_range
from cutefce.ops.rows.coefficients import RankOne
from cutefce.ops.rows.packed_sums import Sums
from cutefce.ops.rows.selection import RowSelection
from cutefce.ops.rows.targets import Targets

SMALL_PRODUCT = 1 << 34
"""Multiplications of a product that takes an H200 as long as its host takes to call cuBLAS, 40 us:
kernels of this project are launched together."""


@dataclass(frozen=True)
class SortedTargets:
    """The tokens of each target, in order, and what each contributes to dW."""

    order: Tensor
    """(N,) int64: rows of `h` sorted by target; undefined behind the last list."""
    offsets: Tensor
    """(V + 1,) int32: where in `order` the tokens of each target begin; not read without tokens."""
    coefficient: Tensor
    """(N,): in that order."""
    h: Tensor
    """(N, D)"""

    def pack(self, first: int, rows: int) -> tuple[Tensor, ...]:
        """Return the kernels' arguments for `rows` rows of dW from `first` on."""
        offsets = self.offsets
        if self.order.shape[0]:
            offsets = row_range(offsets, first, first + rows + 1)
        return self.order, offsets, self.coefficient, self.h


class CutePrimitives(CublasPrimitives):
    """The same steps on the kernels of one device, dtype and configuration."""

    lists_targets = True

    def add_hidden(
        self,
        sums: Sums,
        exps: Tensor,
        w: Tensor,
        *,
        accumulate: bool,
        in_windows: bool = False,
        selection: RowSelection | None = None,
    ) -> None:
        if sums.low is not None:
            assert self.kernels.grad_hidden_packed is not None
            packed = replace(self.kernels.grad_hidden_packed, low_bits=low_bits(sums))
            given = exps, w.t(), (*sums,), None, None
            self._launch(packed, given, selection, overwrite=int(not accumulate))
            return
        (tokens, hidden), columns = sums.upper.shape, exps.shape[1]
        is_short = columns < KernelConfigs.SHORT
        spec = self.kernels.grad_hidden_short if is_short else self.kernels.grad_hidden
        if spec is None:  # cuBLAS is faster where its host is, and it adds those of float16
            own = in_windows or is_small(tokens, hidden, columns)
            own &= can_keep(self.kernels.row_sums.dtype)
            if own or (selection is not None and selection.must_skip):
                spec = self.kernels.grad_hidden_again
        if spec is None:
            matmul_into(sums.upper, exps, w, accumulate=accumulate)
            return
        clusters = self.num_sms // spec.config.cluster
        rows, features = spec.config.rows, spec.config.tile_n
        tiles = ceil_div(tokens, rows) * ceil_div(hidden, features)
        k_tiles, adds = ceil_div(columns, TILE_K), add_tiles(features)
        splits: int = choose_k_splits(tiles, clusters, k_tiles, adds)
        operands = exps, w.t(), sums.upper, None, None
        self._launch(spec, operands, selection, splits, int(not accumulate))

    def target_grad(self, h: Tensor, coefficient: Tensor | None, targets: Targets) -> SortedTargets:
        """Sort tokens by target; those of no target here are in no list.

        If tokens were selected, `h` has the rows of all.
        """
        if coefficient is None:
            offsets, none = targets.index.new_empty(1, dtype=torch.int32), targets.index[:0]
            return SortedTargets(none, offsets, h.new_empty(0, dtype=torch.float32), h)
        index = targets.index
        order, in_order = torch.empty_like(index), torch.empty_like(coefficient)
        offsets = index.new_empty(targets.vocab + 1, dtype=torch.int32)
        rows, are_selected = row_order(targets.order, index)
        operands = index, coefficient.contiguous(), rows, order, offsets, in_order
        launch = compiled(SortTargetsSpec(self.kernels.arch))
        launch(*operands, targets.options.ignore_index, are_selected)
        return SortedTargets(order, offsets, in_order, h)

    def add_weight(
        self,
        out: Sums,
        exps: Tensor,
        scaled: Tensor,
        target_grad: SortedTargets,
        first: int,
        *,
        grad_scale: Tensor | None = None,
        rank_one: RankOne | None = None,
        selection: RowSelection | None = None,
        accumulate: bool = False,
    ) -> None:
        """More than eight parameters: operands, and what is added."""
        upper, to = out.upper, (*out,) if grad_scale is None else out.upper
        if grad_scale is None:
            assert self.kernels.grad_weight_packed is not None
            spec = replace(self.kernels.grad_weight_packed, low_bits=low_bits(out))
        else:
            assert self.kernels.grad_weight is not None
            spec = self.kernels.grad_weight
        spec, term = with_rank_one(spec, rank_one)
        last = None if grad_scale is None else grad_scale.view(1)
        overwrite = int(not accumulate) if grad_scale is None else None
        targets = *target_grad.pack(first, len(upper)), last
        self._launch(spec, (exps.t(), scaled.t(), to, targets, term), selection, None, overwrite)

    def finish_packed_dw(self, sums: Sums, factor: Tensor) -> None:
        compiled(self.packed_kernel("round", sums))(*sums, factor.view(1))

    def _launch(
        self,
        spec: GradGemmSpec,
        operands: tuple[Any, ...],
        selection: RowSelection | None,
        splits: int | None = None,
        overwrite: int | None = None,
    ) -> None:
        """Launch a GEMM on all SMs."""
        clusters = self.num_sms // spec.config.cluster
        exps: Tensor = operands[0]
        semaphores = self.semaphores.take(spec.semaphore_count(clusters), exps.device)
        count = row_count(selection, semaphores)
        compiled(spec)(*operands, semaphores, *count, clusters, splits, overwrite)


def is_small(tokens: int, hidden: int, columns: int) -> bool:
    """Whether calling cuBLAS for dX takes the host longer than the product takes the GPU."""
    return tokens * hidden * columns <= SMALL_PRODUCT
