"""Which configuration serves a problem: the only place that the op layer asks.

`lookup` answers for the portable path with the default of the device's kind, `lookup_project_exp`
for the kernels with the default of their architecture.
"""

from cutefce.cute_kernels.arch import Sm90
from cutefce.cute_kernels.config import ProjectExpConfig
from cutefce.cute_kernels.problem import Problem, TileConfig

DEFAULTS = {
    # One float32 logits tile is 4 MiB: it stays in a CPU's last-level cache between the product
    # that writes it and the exponentials that read it.
    "cpu": TileConfig(window=4096, tile=1024, rows=1024, piece=1024),
    # Tiles of 128 MiB keep a GPU busy for longer than the host needs for the next; a window of 2
    # makes the two gradient products long enough to run at full rate.
    "cuda": TileConfig(window=8192, tile=4096, rows=8192, piece=1024),
}


def lookup(problem: Problem) -> TileConfig:
    """Return the tile configuration for `problem`, no wider than its vocabulary needs.

    Unknown devices are tiled as a GPU is.
    """
    config = DEFAULTS.get(problem.device, DEFAULTS["cuda"])
    piece = min(config.piece, _round_up(problem.vocab, 8))
    tile = min(config.tile, _round_up(problem.vocab, piece))
    window = min(config.window, _round_up(problem.vocab, tile))
    return TileConfig(window=window, tile=tile, rows=config.rows, piece=piece)


def lookup_project_exp(arch: Sm90, tokens: int) -> ProjectExpConfig:
    """Return the configuration of `project_exp` for `tokens` rows on `arch`."""
    return arch.default(tokens)


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit
