"""Exponentials times factors of their tokens, as soon as all products of dX have read them.

The warps of `GradGemmSm90` that load no tiles scale the rows of one raster group while the MMAs of
the next ones run.  The rows of the last group have no such MMAs: all warps share them.  Warps wait
for the reads of all clusters, which must fit on the device at the same time.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from cutefce.cute_kernels.common.dsl import await_count
from cutefce.cute_kernels.common.row_vectors import scale_row_part
from cutefce.cute_kernels.config import GemmConfig
from cutefce.cute_kernels.schedule.scheduler import TileScheduler, WorkTile
from cutefce.cute_kernels.sm90.mainloop import SPARE_WARPS
from cutefce.cute_kernels.spec.gemm import GradGemmSpec
from cutefce.cute_kernels.workspace import SPLIT_K_COUNTERS

WARPS = SPARE_WARPS + GradGemmSpec.WARPS
"""Warps of a thread block that scale rows."""
VECTORS = 2
"""Vectors of 8 elements that a thread loads before it stores one."""
PART = 32 * 8 * VECTORS
"""Elements of a row that a warp scales at a time: neighboring warps have neighboring ones."""


class RowScaling(NamedTuple):
    """A launch argument: what is multiplied."""

    exps: cute.Tensor
    """(N, W)"""
    factor: cute.Tensor
    """(N,) float32"""


@cute.jit
def count_reads(semaphores: cute.Tensor, row_block: Int32, work_tile: WorkTile) -> None:
    """Count K tiles of a row block that a thread block has read, by one thread."""
    counter, k_tiles = read_counters(semaphores) + row_block, work_tile.k_end - work_tile.k_start
    cute.arch.red(counter, k_tiles, op="add", dtype="s32", sem="release", scope="gpu")


@cute.jit
def scale_rows(
    scheduler: TileScheduler,
    config: GemmConfig,
    scaling: RowScaling,
    semaphores: cute.Tensor,
    warp: Int32,
) -> None:
    """Scale the share of a warp: the first `SPARE_WARPS` of a thread block run no MMAs."""
    block, blocks = cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
    group = config.raster_group
    last_group = cutlass.max(scheduler.row_blocks - 1, 0) // group * group
    operands = scheduler, config, scaling, read_counters(semaphores)
    if warp < SPARE_WARPS:
        share = block * SPARE_WARPS + warp, blocks * SPARE_WARPS
        scale_row_blocks(*operands, (Int32(0), last_group), share)
    share = block * WARPS + warp, blocks * WARPS
    scale_row_blocks(*operands, (last_group, scheduler.row_blocks), share)


@cute.jit
def scale_row_blocks(
    scheduler: TileScheduler,
    config: GemmConfig,
    scaling: RowScaling,
    counters: Any,
    row_blocks: Any,
    share: Any,
) -> None:
    """Scale the rows of `row_blocks` (first, last), each once it was read.

    The warp is number i of n that share them, `share`.
    """
    (first, last), (warp, warps) = row_blocks, share
    (exps, factor), lane = scaling, cute.arch.lane_idx()
    parts = (exps.shape[1] + PART - 1) // PART
    reads = scheduler.n_tiles * scheduler.k_tiles * config.cluster
    for row_block in cutlass.range(first, last, unroll=1):
        await_count(counters + row_block, reads)
        begin = row_block * config.rows
        rows = cutlass.min(scheduler.rows - begin, config.rows)
        for unit in cutlass.range(warp, rows * parts, warps, unroll=1):
            row, part = begin + unit // parts, unit % parts
            scale_row_part(exps, row, factor[row], part * PART // 8, (lane, 32, VECTORS))


def read_counters(semaphores: cute.Tensor) -> Any:
    """Return the counters of row blocks, behind those of K splits."""
    splits = cute.arch.grid_dim()[0] * GradGemmSpec.WARPS
    return semaphores.iterator + SPLIT_K_COUNTERS + splits
