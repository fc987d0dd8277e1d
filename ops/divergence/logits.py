"""The logits of a side of a divergence, by a kernel where it is faster than cuBLAS."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from cutefce.autotune_cache.verdicts import DIVERGENCES
from cutefce.cute_kernels.integers import ceil_div
from cutefce.cute_kernels.jit.cache import compiled
from cutefce.cute_kernels.schedule.order import choose_vocab_splits, num_waves
from cutefce.cute_kernels.spec.divergence import logits_kernel
from cutefce.cute_kernels.spec.gemm import ProjectExpSpec
from cutefce.cute_kernels.variant import LogitTransform
from cutefce.ops.dtypes import dtype_name
from cutefce.ops.primitives.dispatch import arch_of, gpu_of
from cutefce.ops.primitives.products import logits_into
from cutefce.ops.primitives.select_rows import has_aligned_rows
from cutefce.ops.rows.logit_map import LogitMap

MIN_UTILIZATION = 0.95
"""Fraction of the waves of the kernel of logits that must be logits: below it cuBLAS, with other
tiles, is as fast."""


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
