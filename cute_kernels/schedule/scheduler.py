"""Device-side tile scheduler: iterates over the tiles of a bᵀ in the order of `schedule.order`."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from cutefce.cute_kernels.config import GemmConfig
from cutefce.cute_kernels.schedule import order
from cutefce.cute_kernels.workspace import Semaphore


class RowCount(NamedTuple):
    """How many rows of tokens count, which come before all others; see `rowwise.select_rows`."""

    count: cute.Tensor
    """(1,) int32, written by an earlier kernel."""
    selects: Int32
    """0 if all rows count, and `count` means nothing; else one more than the fewest of which a
    launch computes anything.  Of more rows than its operands have, it computes nothing either."""


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
    add_tiles: Int32
    """K tiles that take as long as adding a split; 0 unless all splits are computed at once."""
    cluster: Int32
    clusters: Int32
    rank: Int32
    """Thread block within the cluster."""
    rows: Int32
    columns: Int32
    selects: Int32
    """Whether rows of the last row block beyond `rows` are stored: they must be 0."""
    last_k: Any = None
    """K of the last K tile that is not 0; None if all of it may be."""

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
        k_start, k_end = Int32(0), self.k_tiles
        if cutlass.const_expr(self.k_splits is not None):
            more = k_splits, self.add_tiles, cutlass.min, cutlass.max
            k_start = order.split_start(self.k_tiles, k_split, *more)
            k_end = order.split_start(self.k_tiles, k_split + 1, *more)
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
    row_count: RowCount,
    vocab_splits: Int32,
    most_splits: Int32,
) -> TileScheduler:
    """Return the scheduler for the tokens a (N, D) that count, and the weight b (V, D).

    `vocab_splits` are those for all tokens; those for fewer are at most `most_splits`.  One
    row block is computed even of no tokens, so that what a GEMM over them reads is 0, unless
    `row_count` says that nothing is.
    """
    (size, inner), columns = a.shape, b.shape[0]
    n_tiles = (columns + config.tile_n - 1) // config.tile_n
    rows = Int32(size)
    row_blocks = (rows + config.rows - 1) // config.rows
    splits = vocab_splits
    cluster, clusters, rank = place(config)
    if row_count.selects != 0:
        cute.arch.griddepcontrol_wait()
        rows, computes = counted_rows(row_count, rows)
        planned = row_blocks
        row_blocks = cutlass.max((rows + config.rows - 1) // config.rows, computes)
        if row_blocks < planned:
            blocks = planned, cutlass.max(row_blocks, 1)
            more = n_tiles, clusters, most_splits, cutlass.min, cutlass.max
            splits = order.rescale_vocab_splits(vocab_splits, *blocks, *more)
    return TileScheduler(
        row_blocks=row_blocks,
        vocab_splits=splits,
        n_tiles=n_tiles,
        k_tiles=(inner + tile_k - 1) // tile_k,
        k_splits=None,
        add_tiles=Int32(0),
        cluster=cluster,
        clusters=clusters,
        rank=rank,
        rows=rows,
        columns=columns,
        selects=row_count.selects,
    )


@cute.jit
def make_gemm_scheduler(
    config: GemmConfig,
    tile_k: int,
    a: cute.Tensor,
    b: cute.Tensor,
    row_count: RowCount,
    tokens_inside: bool,
    k_splits: Any,
    must_write: Any,
) -> TileScheduler:
    """Return the scheduler of a gradient GEMM of a (M, K) and b (N, K).

    Tokens are the K of these, if `tokens_inside`, or their M.  With `k_splits`, those for all
    tokens, K is split.  Nothing is computed where `row_count` says so, or where no token counts
    and `must_write` is 0.
    """
    (size, inner), columns = a.shape, b.shape[0]
    n_tiles = (columns + config.tile_n - 1) // config.tile_n
    rows = Int32(size)
    row_blocks = (rows + config.rows - 1) // config.rows
    k_tiles, splits = (inner + tile_k - 1) // tile_k, k_splits
    last_k = None
    cluster, clusters, rank = place(config)
    tokens = Int32(inner)
    if row_count.selects != 0:
        if cutlass.const_expr(tokens_inside):
            count, computes = counted_rows(row_count, Int32(inner))
            tokens = count
            k_tiles = cutlass.max((count + tile_k - 1) // tile_k, 1)
            if cutlass.const_expr(must_write is not None):
                if count == 0 and must_write == 0:
                    computes = Int32(0)
            row_blocks *= computes
        else:
            rows, computes = counted_rows(row_count, rows)
            row_blocks = cutlass.max((rows + config.rows - 1) // config.rows, computes)
        if cutlass.const_expr(k_splits is not None):
            of_adds = order.add_tiles(config.tile_n), Int32
            splits = order.fastest_k_splits(row_blocks * n_tiles, clusters, k_tiles, *of_adds)
    adds = Int32(0)
    if cutlass.const_expr(k_splits is not None):
        if row_blocks * n_tiles % clusters * splits <= clusters:
            adds = Int32(order.add_tiles(config.tile_n))
    if cutlass.const_expr(tokens_inside):
        last_k = cutlass.max(tokens - (k_tiles - 1) * tile_k, 1)
    return TileScheduler(
        row_blocks=row_blocks,
        vocab_splits=n_tiles,
        n_tiles=n_tiles,
        k_tiles=k_tiles,
        k_splits=splits,
        add_tiles=adds,
        cluster=cluster,
        clusters=clusters,
        rank=rank,
        rows=rows,
        columns=columns,
        selects=row_count.selects,
        last_k=last_k,
    )


@cute.jit
def counted_rows(row_count: RowCount, rows: Int32) -> Any:
    """Return how many of `rows` rows are computed, and whether anything is: 1 or 0."""
    count = row_count.count[0]
    computes = Int32(count <= rows) * Int32(count >= row_count.selects - 1)
    return count * computes, computes


@cute.jit
def place(config: GemmConfig) -> Any:
    """Return the index of the cluster, their number, and the thread block within the cluster."""
    block, blocks = cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
    rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
    return block // config.cluster, blocks // config.cluster, rank
