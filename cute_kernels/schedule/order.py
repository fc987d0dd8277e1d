"""Tile order over the (tokens, vocab) plane, as integer functions for host and device.

A work tile is one row block times one vocabulary split: split i of S holds the column tiles i,
i + S, i + 2·S, …  Cluster c of C computes the work tiles c, c + C, c + 2·C, …  Work tiles are
numbered rows first within raster groups of row blocks: concurrent clusters then share the hidden
states of one group and read neighboring vocabulary tiles, and both stay in the L2 cache.

Kernels that add to memory can split K for the work tiles of an incomplete last wave.  With r full
waves, index C·r + i then denotes one K split of one of these work tiles, numbered by work tile
first, so that concurrent clusters share operands there too.
"""

from typing import Any

from cutefce.cute_kernels.config import GemmConfig
from cutefce.cute_kernels.integers import ceil_div
from cutefce.cute_kernels.process_cache import process_cache

PARTIAL_BYTES = 5 << 20
"""Limit on the memory of partial sums; more vocabulary splits balance the clusters better."""
MAX_K_SPLITS, MIN_K_TILES_PER_SPLIT = 8, 16
"""Limits on K splits: each split is added to memory."""


def tile_coord(
    work_tile: Any, row_blocks: Any, vocab_splits: Any, raster_group: int, minimum: Any = min
) -> tuple[Any, Any]:
    """Return (row block, vocabulary split) of a work tile.

    Takes Python integers, or device integers and their `minimum`.
    """
    per_group = vocab_splits * raster_group
    first_row = work_tile // per_group * raster_group
    height = minimum(row_blocks - first_row, raster_group)
    inside = work_tile % per_group
    return first_row + inside % height, inside // height


def split_k(index: Any, work_tiles: Any, clusters: Any) -> tuple[Any, Any]:
    """Return (work tile, K split) of an index in the last wave, if that wave is split.

    Takes Python or device integers.
    """
    last_wave = work_tiles % clusters
    whole = work_tiles - last_wave
    return whole + (index - whole) % last_wave, (index - whole) // last_wave


@process_cache
def choose_k_splits(work_tiles: int, clusters: int, k_tiles: int) -> int:
    """Return the number of K splits for the last wave's work tiles: 1 to `MAX_K_SPLITS`.

    Minimizes the number of waves; the fewest splits win a tie.
    """
    limit = max(1, min(MAX_K_SPLITS, k_tiles // MIN_K_TILES_PER_SPLIT))
    return min(range(1, limit + 1), key=lambda k_splits: num_waves(work_tiles, clusters, k_splits))


def num_waves(work_tiles: int, clusters: int, k_splits: int) -> float:
    """Return the time of all work tiles, in units of one work tile's time."""
    whole, last_wave = divmod(work_tiles, clusters)
    return whole + ceil_div(last_wave * k_splits, clusters) / k_splits


@process_cache
def choose_vocab_splits(tokens: int, vocab: int, config: GemmConfig, clusters: int) -> int:
    """Return the number of vocabulary splits that balances `clusters` clusters best.

    Minimizes the tiles of the busiest cluster; the fewest splits win a tie.
    """
    n_tiles = ceil_div(vocab, config.tile_n)
    row_blocks = max(1, ceil_div(tokens, config.rows))
    affordable = PARTIAL_BYTES // (4 * config.partials_per_row * max(tokens, 1))
    # ping-pong needs a second tile to keep the other warpgroup busy
    limit = max(1, min(affordable, ceil_div(n_tiles, config.partials_per_row)))
    even, best, least = ceil_div(n_tiles * row_blocks, clusters), 1, n_tiles * row_blocks
    for splits in range(1, limit + 1):
        busiest = max(tiles_per_cluster(row_blocks, n_tiles, splits, config.raster_group, clusters))
        if busiest < least:
            best, least = splits, busiest
        if busiest <= even:
            break
    return best


def tiles_per_cluster(
    row_blocks: int, n_tiles: int, vocab_splits: int, raster_group: int, clusters: int
) -> list[int]:
    """Return the number of tiles that each cluster computes.

    Within a raster group, the first splits hold one tile more than the others.  Work tiles of
    equal size are numbered consecutively, and cluster c computes those congruent to c modulo C.
    """
    short, longer = divmod(n_tiles, vocab_splits)
    result = [0] * clusters
    start = 0
    for first_row in range(0, row_blocks, raster_group):
        height = min(raster_group, row_blocks - first_row)
        kinds = (longer * height, short + 1), ((vocab_splits - longer) * height, short)
        for count, size in kinds:
            each, more = divmod(count, clusters)
            for cluster in range(clusters):
                has_one_more = (cluster - start) % clusters < more
                result[cluster] += (each + has_one_more) * size
            start += count
    return result
