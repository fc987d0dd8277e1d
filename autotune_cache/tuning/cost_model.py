"""A rough model of the time of `project_exp`, which decides what is worth a trial.

A multiprocessor computes a tile as fast as its tensor cores do, or as its inputs arrive: over the
interconnect from the L2 cache, into which they come from memory once for each time that the
clusters walk over them.  In turns, one warpgroup's exponentials hide behind the other's products;
warpgroups that share a tile wait for theirs.  Cycles are those of one multiprocessor; the numbers
are an H100's or H200's, and only the order of the results means anything.
"""

from cutefce.cute_kernels.config import GemmConfig
from cutefce.cute_kernels.problem import Problem

FLOP_A_CYCLE = 4096
"""16-bit dense products."""
EPILOGUE_CYCLES = 0.17
"""A logit's exponential, sum and store."""
L2_BYTES_A_CYCLE, MEMORY_BYTES_A_CYCLE = 56, 21
L2_BYTES = 30 << 20
"""Hidden states of a group that stay in the L2 cache beside the weight that streams through."""
LAUNCH_CYCLES = 8000
"""Launch, first loads and last stores."""
HIDDEN_SHARE = 1 / 20
"""What traffic costs that hides behind products: power, which the clock pays for."""


def product_cycles(rows: int, columns: int, inner: int, config: GemmConfig, num_sms: int) -> float:
    """Return the predicted time of a (rows, inner) @ (inner, columns) of 16 bits."""
    p = Problem(tokens=rows, hidden=inner, vocab=columns, dtype="bfloat16", device="cuda")
    return project_exp_cycles(p, config, num_sms)


def project_exp_cycles(p: Problem, config: GemmConfig, num_sms: int) -> float:
    """Return the predicted time of `project_exp` for `p`."""
    clusters = num_sms // config.cluster
    row_blocks, tiles = -(-p.tokens // config.rows), -(-p.vocab // config.tile_n)
    of_one = -(-row_blocks * tiles // clusters)
    products = 2 * config.tile_m * config.tile_n * p.hidden / FLOP_A_CYCLE
    loaded = (config.tile_m + config.tile_n / config.cluster) * p.hidden * p.item_bytes
    from_l2 = loaded / L2_BYTES_A_CYCLE
    from_memory = _memory_bytes(p, config, row_blocks, tiles, clusters) / (
        MEMORY_BYTES_A_CYCLE * num_sms * of_one
    )
    exposed = 0.0 if config.pingpong else EPILOGUE_CYCLES * config.tile_m * config.tile_n
    tile = max(products + exposed, from_l2, from_memory)
    tile += HIDDEN_SHARE * (from_l2 + from_memory)
    return LAUNCH_CYCLES + of_one * tile


def _memory_bytes(
    p: Problem, config: GemmConfig, row_blocks: int, tiles: int, clusters: int
) -> float:
    """Bytes of the inputs that come from memory: the weight again for each group of row blocks.

    A group's hidden states come once if they stay in the cache, else for every tile, shared by the
    clusters that are at the same row block.
    """
    row_bytes = p.hidden * p.item_bytes
    height = min(config.raster_group, row_blocks)
    again = 1.0
    if height * config.rows * row_bytes > L2_BYTES:
        again = max(1.0, tiles * height / clusters)
    return row_bytes * (p.vocab * -(-row_blocks // height) + p.tokens * again)
