"""Rough time model of `project_exp` and the gradient GEMMs, used to rank candidates.

A streaming multiprocessor (SM) computes a tile at the rate of its tensor cores or of its inputs,
whichever is slower:

    tile = max(mma + exposed epilogue, bytes / L2 rate, bytes from memory / memory rate)

Inputs come from the L2 cache; memory feeds that once for each pass of the clusters over them.  With
ping-pong, the exponentials of one warpgroup overlap with the GEMM of the other; warpgroups that
share a tile expose them.  Rates are those of an H100 or H200; only the order of costs is used.
"""

from cutefce.cute_kernels.config import GemmConfig
from cutefce.cute_kernels.integers import ceil_div
from cutefce.cute_kernels.problem import Problem

FLOP_PER_CYCLE = 4096
"""Dense 16-bit FLOP of one SM."""
EPILOGUE_CYCLES = 0.17
"""Exponential, sum and store of one logit."""
L2_BYTES_PER_CYCLE, MEMORY_BYTES_PER_CYCLE = 56, 21
"""Of one SM."""
L2_BYTES = 30 << 20
"""Part of the L2 cache that keeps a raster group's hidden states while the weight streams."""
LAUNCH_CYCLES = 8000
"""Launch, first loads and last stores."""
OVERLAPPED_TRAFFIC_COST = 1 / 20
"""Cost of traffic behind the GEMM, relatively: it draws power, which lowers the clock."""


def gemm_cycles(rows: int, columns: int, inner: int, config: GemmConfig, num_sms: int) -> float:
    """Return the predicted cycles of a 16-bit (rows, inner) @ (inner, columns)."""
    p = Problem(tokens=rows, hidden=inner, vocab=columns, dtype="bfloat16", device="cuda")
    return project_exp_cycles(p, config, num_sms)


def project_exp_cycles(p: Problem, config: GemmConfig, num_sms: int) -> float:
    """Return the predicted cycles of `project_exp` for `p`."""
    clusters = num_sms // config.cluster
    row_blocks, tiles = ceil_div(p.tokens, config.rows), ceil_div(p.vocab, config.columns)
    tiles_per_cluster = ceil_div(row_blocks * tiles, clusters)
    mma = 2 * config.tile_m * config.tile_n * p.hidden / FLOP_PER_CYCLE
    loaded = (config.tile_m + config.tile_n / config.cluster) * p.hidden * p.item_bytes
    from_l2 = loaded / L2_BYTES_PER_CYCLE
    from_memory = _memory_bytes(p, config, row_blocks, tiles, clusters) / (
        MEMORY_BYTES_PER_CYCLE * num_sms * tiles_per_cluster
    )
    exposed = 0.0 if config.pingpong else EPILOGUE_CYCLES * config.tile_m * config.tile_n
    tile = max(mma + exposed, from_l2, from_memory)
    tile += OVERLAPPED_TRAFFIC_COST * (from_l2 + from_memory)
    return LAUNCH_CYCLES + tiles_per_cluster * tile


def _memory_bytes(
    p: Problem, config: GemmConfig, row_blocks: int, tiles: int, clusters: int
) -> float:
    """Return the bytes of inputs from memory: the weight once for each raster group.

    A group's hidden states come once if they fit in the L2 cache, else once for each tile, shared
    by the clusters at the same row block.
    """
    row_bytes = p.hidden * p.item_bytes
    height = min(config.raster_group, row_blocks)
    passes = 1.0
    if height * config.rows * row_bytes > L2_BYTES:
        passes = max(1.0, tiles * height / clusters)
    return row_bytes * (p.vocab * ceil_div(row_blocks, height) + p.tokens * passes)
