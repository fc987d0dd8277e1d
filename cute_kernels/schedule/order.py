"""The order in which clusters walk the (tokens, vocab) plane, as plain integer functions.

The plane is cut into units: one row block times one window of vocabulary tiles.  Window i of W
holds the tiles i, i + W, i + 2·W, …  Cluster c of C takes the units c, c + C, c + 2·C, …  Units
are numbered rows first within groups of row blocks: the clusters at work then share the hidden
states of one group and read neighbouring vocabulary tiles, and both stay in the L2 cache.

Where results are added to memory, the units of the last round, in which not all clusters would have
one, can be cut into pieces of the inner dimension: C·r + i is then no unit but piece i of these,
numbered by unit first, so that clusters at work share what they read here too.
"""

import functools
from typing import Any

from cutefce.cute_kernels.config import GemmConfig

PARTIAL_BYTES = 5 << 20
"""What partial sums may take: with more windows the clusters' shares are more even."""
MAX_K_SPLITS, MIN_STEPS_PER_SPLIT = 8, 16
"""Pieces of a unit at most, and stages of a piece at least: each is added to memory."""


def unit(
    index: Any, row_blocks: Any, windows: Any, group: int, minimum: Any = min
) -> tuple[Any, Any]:
    """Return (row block, window) of a unit.

    Takes Python integers, or a kernel's integers and their `minimum`.
    """
    per_group = windows * group
    first_row = index // per_group * group
    height = minimum(row_blocks - first_row, group)
    inside = index % per_group
    return first_row + inside % height, inside // height


def piece(index: Any, units: Any, clusters: Any) -> tuple[Any, Any]:
    """Return (unit, which of its pieces) of an index in the last round, if that is cut.

    Takes Python integers or a kernel's.
    """
    left = units % clusters
    whole = units - left
    return whole + (index - whole) % left, (index - whole) // left


@functools.lru_cache(maxsize=1024)
def choose_k_splits(units: int, clusters: int, steps: int) -> int:
    """Return into how many pieces units of the last round are cut: 1 to `MAX_K_SPLITS`.

    The time is that of the cluster with the most steps; of equal ones the fewest pieces win.
    """
    most = max(1, min(MAX_K_SPLITS, steps // MIN_STEPS_PER_SPLIT))
    return min(range(1, most + 1), key=lambda cuts: num_waves(units, clusters, cuts))


def num_waves(units: int, clusters: int, cuts: int) -> float:
    """Return the time of all units, relative to that of one."""
    whole, left = divmod(units, clusters)
    return whole + -(-left * cuts // clusters) / cuts


@functools.lru_cache(maxsize=1024)
def choose_vocab_splits(tokens: int, vocab: int, config: GemmConfig, clusters: int) -> int:
    """Return the number of windows that lets `clusters` clusters finish at the same time.

    The time is that of the cluster with the most tiles; of equal ones the fewest windows win.
    """
    tiles = -(-vocab // config.tile_n)
    row_blocks = max(1, -(-tokens // config.rows))
    affordable = PARTIAL_BYTES // (4 * config.partials_per_row * max(tokens, 1))
    # a warpgroup in turns needs another tile for the other one to be busy
    most = max(1, min(affordable, -(-tiles // config.partials_per_row)))
    even, best, least = -(-tiles * row_blocks // clusters), 1, tiles * row_blocks
    for windows in range(1, most + 1):
        busiest = max(tiles_per_cluster(row_blocks, tiles, windows, config.raster_group, clusters))
        if busiest < least:
            best, least = windows, busiest
        if busiest <= even:
            break
    return best


def tiles_per_cluster(
    row_blocks: int, tiles: int, windows: int, group: int, clusters: int
) -> list[int]:
    """Return the number of tiles that each cluster computes.

    Within a group, the first windows have a tile more than the others; the units of either kind
    are numbered without a gap, and of n numbers from a on, cluster c has those ≡ c modulo C.
    """
    short, longer = divmod(tiles, windows)
    result = [0] * clusters
    start = 0
    for first_row in range(0, row_blocks, group):
        height = min(group, row_blocks - first_row)
        for count, size in ((longer * height, short + 1), ((windows - longer) * height, short)):
            each, more = divmod(count, clusters)
            for cluster in range(clusters):
                has_one_more = (cluster - start) % clusters < more
                result[cluster] += (each + has_one_more) * size
            start += count
    return result
