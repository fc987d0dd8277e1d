"""Tile order over the (tokens, vocab) plane, as integer functions for host and device.

A work tile is one row block times one vocabulary split: split i of S holds the column tiles i,
i + S, i + 2·S, …  Cluster c of C computes the work tiles c, c + C, c + 2·C, …  Work tiles are
numbered rows first within raster groups of row blocks: concurrent clusters then share the hidden
states of one group and read neighboring vocabulary tiles, and both stay in the L2 cache.

Kernels that add to memory can split K for the work tiles of an incomplete last wave.  With r full
waves, index C·r + i then denotes one K split of one of these work tiles, numbered by work tile
first, so that concurrent clusters share operands there too.  Splits of a work tile are added one
after the other.  If all are computed at once, the earlier ones have fewer K tiles, so that none
waits long for its turn.
"""

from typing import Any

from cutefce.cute_kernels.config import GemmConfig
from cutefce.cute_kernels.integers import ceil_div
from cutefce.cute_kernels.process_cache import process_cache

PARTIAL_BYTES = 5 << 20
"""Limit on the memory of partial sums; more vocabulary splits balance the clusters better."""
MAX_K_SPLITS, MIN_K_TILES_PER_SPLIT = 8, 16
"""Limits on K splits: each split is added to memory."""
MAX_SPLIT_WAVES = 8
"""Waves of work tiles that vocabulary splits are chosen for on the device."""
ADD_COLUMNS = 1664
"""Adding one K split's tile to memory takes as long as the MMAs of one K tile over so many columns:
3.7 us on an H200, mostly latency, for tiles of 128 to 256 columns."""
MIN_FIRST_K_TILES = 4
"""K tiles of the first split of a work tile."""


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


def split_start(
    k_tiles: Any,
    k_split: Any,
    k_splits: Any,
    add_tiles: Any,
    minimum: Any = min,
    maximum: Any = max,
) -> Any:
    """Return the first K tile of a K split, or `k_tiles` for the end of the last one.

    Each split has `add_tiles` K tiles more than the one before it, if there are so many.  Takes
    Python integers, or device integers and their `minimum` and `maximum`.
    """
    spare = 2 * (k_tiles // k_splits - MIN_FIRST_K_TILES)
    more = minimum(add_tiles, maximum(spare, 0) // maximum(k_splits - 1, 1))
    later = k_splits * k_split * (k_splits - k_split)
    return (2 * k_tiles * k_split - more * later) // (2 * k_splits)


def add_tiles(tile_n: int) -> int:
    """Return the K tiles that take as long as adding a tile of `tile_n` columns."""
    return ADD_COLUMNS // tile_n


@process_cache
def choose_k_splits(work_tiles: int, clusters: int, k_tiles: int, add_tiles: int = 0) -> int:
    """Return the number of K splits for the last wave's work tiles: 1 to `MAX_K_SPLITS`.

    Minimizes the time of this wave, where each add takes that of `add_tiles` K tiles; the fewest
    splits win a tie.
    """
    return int(fastest_k_splits(work_tiles, clusters, k_tiles, add_tiles))


def fastest_k_splits(
    work_tiles: Any, clusters: Any, k_tiles: Any, add_tiles: Any, number: Any = int
) -> Any:
    """Return what `choose_k_splits` does.

    Takes Python integers, or device integers and the `number` that makes one of a comparison.
    """
    last_wave, limit = work_tiles % clusters, k_tiles // MIN_K_TILES_PER_SPLIT
    best, waves = number(1), (last_wave + clusters - 1) // clusters
    least = 2 * (k_tiles * waves + add_tiles)
    for k_splits in range(2, MAX_K_SPLITS + 1):
        waves = (last_wave * k_splits + clusters - 1) // clusters
        # twice the time, times splits: `split_start` hides half of the adds
        time = 2 * k_tiles * waves + add_tiles * k_splits * (k_splits + 1)
        # time / k_splits < least / best, in integers
        better = number(k_splits <= limit) * number(time * best < least * k_splits)
        best += better * (k_splits - best)
        least += better * (time - least)
    return best


def rescale_vocab_splits(
    vocab_splits: Any,
    planned_blocks: Any,
    row_blocks: Any,
    n_tiles: Any,
    clusters: Any,
    most: Any,
    minimum: Any = min,
    maximum: Any = max,
) -> Any:
    """Return the splits of fewer row blocks than the planned ones that have `vocab_splits`.

    They have as many work tiles as planned, or as many as fit into a few waves, with at most `most`
    splits: whatever gives `busiest_cluster` the fewest column tiles.  Takes Python integers, or
    device integers and their `minimum` and `maximum`.
    """
    choices = [minimum((vocab_splits * planned_blocks + row_blocks - 1) // row_blocks, most)]
    for waves in range(1, MAX_SPLIT_WAVES + 1):
        choices.append(maximum(minimum(waves * clusters // row_blocks, most), 1))
    best, base = None, most + 1
    for splits in choices:
        number = busiest_cluster(row_blocks, n_tiles, splits, clusters) * base + splits
        best = number if best is None else minimum(best, number)
    return best % base


def busiest_cluster(row_blocks: Any, n_tiles: Any, vocab_splits: Any, clusters: Any) -> Any:
    """Return an upper bound of `tiles_per_cluster` for one raster group.

    Takes Python or device integers.
    """
    # the first splits have one tile more
    waves = (row_blocks * vocab_splits + clusters - 1) // clusters
    longer_waves = (n_tiles % vocab_splits * row_blocks + clusters - 1) // clusters
    return waves * (n_tiles // vocab_splits) + longer_waves


def num_waves(work_tiles: int, clusters: int, k_splits: int) -> float:
    """Return the time of all work tiles, in units of one work tile's time."""
    whole, last_wave = divmod(work_tiles, clusters)
    return whole + ceil_div(last_wave * k_splits, clusters) / k_splits


def most_vocab_splits(tokens: int, vocab: int, config: GemmConfig) -> int:
    """Return the largest useful number of vocabulary splits whose partial sums are affordable."""
    affordable = PARTIAL_BYTES // (4 * config.partials_per_row * max(tokens, 1))
    # ping-pong needs a second tile to keep the other warpgroup busy
    useful = ceil_div(ceil_div(vocab, config.tile_n), 2 if config.pingpong else 1)
    return max(1, min(affordable, useful))


@process_cache
def choose_vocab_splits(tokens: int, vocab: int, config: GemmConfig, clusters: int) -> int:
    """Return the number of vocabulary splits that balances `clusters` clusters best.

    Minimizes the tiles of the busiest cluster; the fewest splits win a tie.
    """
    n_tiles = ceil_div(vocab, config.tile_n)
    row_blocks = max(1, ceil_div(tokens, config.rows))
    limit = most_vocab_splits(tokens, vocab, config)
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
