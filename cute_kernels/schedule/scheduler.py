"""Device-side tile scheduler: iterates over the tiles of a bᵀ in the order of `schedule.order`."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from cutefce.cute_kernels.config import GemmConfig
from cutefce.cute_kernels.schedule import order
from cutefce.cute_kernels.workspace import Semaphore


class WorkTile(NamedTuple):
    """A work tile, or one K split of it."""

    number: Int32
    k_start: Int32
    """Its first K tile."""
    k_end: Int32
    splits_before: Int32
    """K splits of the same work tile whose results are added before this one's."""
    splits_after: Int32


@dataclass(frozen=True)
class TileScheduler:
    """Sizes and indices that all roles of a thread block share, so that they agree on tiles.

    A role iterates `for index in range(cluster, num_indices(), clusters)`.
    """

    row_blocks: Int32
    vocab_splits: Int32
    """Column splits of each row block; gradient GEMMs split after every tile."""
    n_tiles: Int32
    """Column tiles."""
    k_tiles: Int32
    """K tiles of one tile: pipeline stages that it takes."""
    k_splits: Any
    """K splits of each work tile of the last wave; None if K is never split."""
    cluster: Int32
    clusters: Int32
    rank: Int32
    """Thread block within the cluster."""
    rows: Int32
    columns: Int32

    @cute.jit
    def num_work_tiles(self) -> Int32:
        """Return the number of work tiles."""
        return self.row_blocks * self.vocab_splits

    @cute.jit
    def num_indices(self) -> Int32:
        """Return the number of indices: of work tiles, where the last wave's count by K split."""
        count = self.num_work_tiles()
        if cutlass.const_expr(self.k_splits is not None):
            count += count % self.clusters * (self.k_splits - 1)
        return count

    @cute.jit
    def work_tile(self, index: Int32) -> Any:
        """Return the `WorkTile` of an index."""
        number, k_split, k_splits = index, Int32(0), Int32(1)
        if cutlass.const_expr(self.k_splits is not None):
            work_tiles = self.num_work_tiles()
            if index >= work_tiles - work_tiles % self.clusters:
                number, k_split = order.split_k(index, work_tiles, self.clusters)
                k_splits = self.k_splits
        k_start = self.k_tiles * k_split // k_splits
        k_end = self.k_tiles * (k_split + 1) // k_splits
        return WorkTile(number, k_start, k_end, k_split, k_splits - 1 - k_split)

    @cute.jit
    def coord(self, number: Int32, raster_group: int, semaphores: Any = None) -> Any:
        """Return (row block, vocabulary split, end of the column tiles) of a work tile.

        With `semaphores`, a row block without a repair flag has no tiles: its end is 0.
        """
        row_block, split = order.tile_coord(
            number, self.row_blocks, self.vocab_splits, raster_group, cutlass.min
        )
        n_end = self.n_tiles
        if cutlass.const_expr(semaphores is not None):
            if semaphores[Semaphore.REPAIR_FLAGS + row_block] == 0:
                n_end = Int32(0)
        return row_block, split, n_end


@cute.jit
def make_tile_scheduler(
    config: GemmConfig,
    tile_k: int,
    a: cute.Tensor,
    b: cute.Tensor,
    vocab_splits: Any = None,
    k_splits: Any = None,
) -> TileScheduler:
    """Return the scheduler for a (M, K) and b (N, K); by default every column tile is a split."""
    (rows, inner), columns = a.shape, b.shape[0]
    n_tiles = (columns + config.tile_n - 1) // config.tile_n
    return TileScheduler(
        row_blocks=(rows + config.rows - 1) // config.rows,
        vocab_splits=n_tiles if vocab_splits is None else vocab_splits,
        n_tiles=n_tiles,
        k_tiles=(inner + tile_k - 1) // tile_k,
        k_splits=k_splits,
        cluster=cute.arch.block_idx()[0] // config.cluster,
        clusters=cute.arch.grid_dim()[0] // config.cluster,
        rank=cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster()),
        rows=rows,
        columns=columns,
    )
