"""Launches of the kernels: logits, and whole rows of them to statistics and factors."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from cutefce.autotune_cache.verdicts import DIVERGENCES
from cutefce.cute_kernels.integers import ceil_div
from cutefce.cute_kernels.jit.cache import compiled
from cutefce.cute_kernels.schedule.order import choose_vocab_splits, num_waves
from cutefce.cute_kernels.spec.divergence import divergence_rows, logits_kernel
from cutefce.cute_kernels.spec.gemm import ProjectExpSpec
from cutefce.cute_kernels.variant import LogitTransform
from cutefce.ops.divergence.inputs import DivergenceInputs, Side
from cutefce.ops.divergence.options import STUDENT, TEACHER, Divergence
from cutefce.ops.dtypes import dtype_name
from cutefce.ops.primitives.dispatch import (
    arch_of,
    device_unsupported_reason,
    gpu_of,
    unproven_reason,
)
from cutefce.ops.primitives.products import logits_into
from cutefce.ops.primitives.select_rows import has_aligned_rows
from cutefce.ops.rows.logit_map import LogitMap

MIN_UTILIZATION = 0.95
"""Fraction of the waves of the kernel of logits that must be logits: below it cuBLAS, with other
tiles, is as fast."""
ALIGNMENT = 8
"""Classes that a row is a multiple of for the kernel of rows: it begins at 16 bytes, in 16 bits
too."""


def write_logits(out: Tensor, h: Tensor, w: Tensor, transform: LogitMap | None) -> Tensor | None:
    """Write the logits of h (R, D) and w (C, D) to `out` (R, C), contiguous, in the dtype of sums.

    The `transform` is that of these tokens and classes.  Return what the kernel sums, see `launch`;
    None if cuBLAS has multiplied.
    """
    if has_aligned_rows(h) and has_aligned_rows(out) and arch_of(h, w, DIVERGENCES) is not None:
        gpu = gpu_of(h.device)
        kernel = logits_kernel(gpu.arch, dtype_name(h.dtype))
        if kernel is not None:
            clusters = gpu.num_sms // kernel.config.cluster
            if _utilization(kernel, clusters, *out.shape) >= MIN_UTILIZATION:
                return launch(kernel, clusters, out, h, w, transform)
    logits_into(out, h, w, transform)
    return None


def launch(
    kernel: ProjectExpSpec,
    clusters: int,
    out: Tensor,
    h: Tensor,
    w: Tensor,
    transform: LogitMap | None = None,
) -> Tensor:
    """Do what `write_logits` does by `kernel` on `clusters` clusters.

    Return (2, R, P): of P parts of each row, a number t near the largest logit in units of ln 2,
    and Σ 2^(logit log2 e - t).
    """
    (rows, columns), operands = out.shape, None
    if transform is not None:
        operands = transform.columns(0, columns)
        given = (operand is not None for operand in operands)
        kernel = replace(kernel, transform=LogitTransform(*given))
    splits = choose_vocab_splits(rows, columns, kernel.config, clusters)
    sums = out.new_empty(2, rows, splits * kernel.config.partials_per_row)
    semaphores, no_targets = h.new_zeros(1, dtype=torch.int32), (None, None)
    more: tuple[Any, ...] = (operands, sums[1:], None)
    numbers = semaphores, 0, 0, splits, clusters
    compiled(kernel)(h, w, *no_targets, sums[0], out, semaphores, *more, *numbers)
    return sums


def _utilization(spec: ProjectExpSpec, clusters: int, rows: int, columns: int) -> float:
    """Return the fraction of the kernel's time, in whole waves, that computes logits."""
    config = spec.config
    tiles = ceil_div(rows, config.rows) * ceil_div(columns, config.tile_n)
    computed = num_waves(tiles, clusters, 1) * clusters * config.rows * config.tile_n
    return rows * columns / max(computed, 1)


@dataclass(frozen=True)
class RowKernel:
    """The kernel of rows of one call."""

    arch: str
    options: Divergence
    order: tuple[int, int]
    """The sides that the kernel has as a and b."""
    numbers: Tensor
    """(4,) the shares of a and b, and what their factors are multiplied by."""

    @staticmethod
    def of(x: DivergenceInputs) -> "RowKernel | None":
        """Return the kernel that serves a call; None if there is none."""
        if len(x.sides[STUDENT].w) % ALIGNMENT or any(side.cap is not None for side in x.sides):
            return None
        if any(_unsupported_reason(side) for side in x.sides):
            return None
        if len({x.sides[i].h.dtype for i in x.options.trained_sides}) > 1:
            return None  # verified kernels write the factors of both sides in one dtype
        return RowKernel.on(gpu_of(x.h.device).arch.name, x)

    @staticmethod
    def on(arch: str, x: DivergenceInputs) -> "RowKernel":
        """Return the kernel of an architecture for a call that it serves."""
        a = x.options.first
        if a is None:  # which has factors if one side alone has
            a = TEACHER if x.options.trained_sides == [TEACHER] else STUDENT
        order, numbers = (a, STUDENT + TEACHER - a), x.h.new_ones(4, dtype=torch.float32)
        for place, i in enumerate(order):
            _, scale = x.scales[i]
            numbers[place] = x.options.share(i)
            if not scale.ndim:  # else no factors are kept
                numbers[place + len(order)] = scale
        return RowKernel(arch, x.options, order, numbers)

    def run(
        self,
        stats: Tensor,
        logits: Sequence[Tensor],
        outs: Sequence[Sequence[Tensor]],
        sums: Sequence[Tensor | None],
        first: int = 0,
    ) -> None:
        """Write the statistics (7, R) of logits (R, V) of both sides, and their factors to `outs`.

        Those of a side are matrices (T, C) of windows of classes, of a power of 2 or of all, at
        equal distances in one memory: the first and the second are given, or none if its factors
        are not wanted.  The rows begin with row `first` of these.  `sums` are those of
        `write_logits`.
        """
        a, b = self.order
        given = all(x is not None for x in sums)
        form = "kl" if self.options.first is not None else self.options.divergence
        spec = divergence_rows(self.arch, form, bool(outs[a]), bool(outs[b]), given)
        memory = [_memory_from(x[0]) if x else None for x in outs]
        exchange = stats.new_empty(stats.shape[1] * spec.EXCHANGE)
        own_sums = (sums[a], sums[b]) if given else (None, None)
        operands = logits[a], logits[b], *own_sums, memory[a], memory[b], stats, exchange
        windows = outs[a] or outs[b] or logits[:1]
        columns, narrow = windows[0].shape[1], windows[0].dtype == torch.float16
        shift = columns.bit_length() - 1 if len(windows) > 1 else 31
        pitches = [x[1].storage_offset() - x[0].storage_offset() if len(x) > 1 else 0 for x in outs]
        places = int(narrow), first, columns, shift, pitches[a], pitches[b]
        compiled(spec)(*operands, self.numbers, a, *places)


def _memory_from(x: Tensor) -> Tensor:
    """Return the memory from a matrix on, as 16 bits of any dtype."""
    size = x.untyped_storage().nbytes() // x.element_size() - x.storage_offset()
    return x.as_strided((size,), (1,)).view(torch.bfloat16)


def _unsupported_reason(side: Side) -> str | None:
    """Return why the kernel of rows cannot read the logits of a side, None if it can."""
    device, dtype = side.h.device, side.h.dtype
    return device_unsupported_reason(device, dtype) or unproven_reason(
        device, dtype_name(dtype), DIVERGENCES
    )
