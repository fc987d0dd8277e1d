"""Which configuration serves a problem: the only place that the op layer asks.

`lookup` answers with the default of the device's kind.
"""

from cutefce.cute_kernels.problem import Problem, TileConfig

DEFAULTS = {
    # One float32 logits tile is 4 MiB: it stays in a CPU's last-level cache between the product
    # that writes it and the exponentials that read it.
    "cpu": TileConfig(window=4096, tile=1024, rows=1024),
    # 32 MiB: the same for a GPU's L2 cache.  A window of 8 tiles makes the two gradient
    # products of a window long enough to run at full rate.
    "cuda": TileConfig(window=8192, tile=1024, rows=8192),
}


def lookup(problem: Problem) -> TileConfig:
    """Return the tile configuration for `problem`, no wider than its vocabulary needs.

    Unknown devices are tiled as a GPU is.
    """
    config = DEFAULTS.get(problem.device, DEFAULTS["cuda"])
    tile = min(config.tile, -(-problem.vocab // 8) * 8)
    return TileConfig(
        window=min(config.window, -(-problem.vocab // tile) * tile), tile=tile, rows=config.rows
    )
