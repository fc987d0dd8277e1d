"""The logits of a side of a divergence, by a kernel where it is faster than cuBLAS."""

import torch
from torch import Tensor

from cutefce.cute_kernels.integers import ceil_div
from cutefce.cute_kernels.jit.cache import compiled
from cutefce.cute_kernels.process_cache import process_cache
from cutefce.cute_kernels.schedule.order import num_waves
from cutefce.cute_kernels.spec import LogitsSpec
from cutefce.cute_kernels.spec.divergence import logits_kernel
from cutefce.ops.primitives.dispatch import arch_of, gpu_of
from cutefce.ops.primitives.portable_gradients import matmul_into
from cutefce.ops.primitives.row_selection import has_aligned_rows

MIN_UTILIZATION = 0.95
"""Fraction of the waves of the kernel of logits that must be logits: below it cuBLAS, with other
tiles, is as fast."""


def write_logits(out: Tensor, h: Tensor, w: Tensor) -> None:
    """Write h wᵀ of h (R, D) and w (C, D) to `out` (R, C), contiguous and of the dtype of sums."""
    kernel = None
    if has_aligned_rows(h) and has_aligned_rows(out) and arch_of(h, w) is not None:
        kernel = _logits_kernel_on(h.device, str(h.dtype).removeprefix("torch."))
    if kernel is None or _utilization(*kernel, *out.shape) < MIN_UTILIZATION:
        matmul_into(out, h, w.t(), accumulate=False)
        return
    launch(*kernel, out, h, w)


def launch(kernel: LogitsSpec, clusters: int, out: Tensor, h: Tensor, w: Tensor) -> None:
    """Do what `write_logits` does by `kernel` on `clusters` clusters."""
    compiled(kernel)(h, w, out, h.new_zeros(1, dtype=torch.int32), clusters)


@process_cache
def _logits_kernel_on(device: torch.device, dtype: str) -> tuple[LogitsSpec, int] | None:
    """Return the kernel of logits and its clusters on a GPU, None if it has none."""
    gpu = gpu_of(device)
    spec = logits_kernel(gpu.arch, dtype)
    return None if spec is None else (spec, gpu.num_sms // spec.config.cluster)


def _utilization(spec: LogitsSpec, clusters: int, rows: int, columns: int) -> float:
    """Return the fraction of the kernel's time, in whole waves, that computes logits."""
    config = spec.config
    tiles = ceil_div(rows, config.rows) * ceil_div(columns, config.tile_n)
    computed = num_waves(tiles, clusters, 1) * clusters * config.rows * config.tile_n
    return rows * columns / max(computed, 1)
