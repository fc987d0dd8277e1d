"""TODO."""

import dataclasses

from cutefce.cute_kernels.problem import Problem, TileConfig

DEFAULTS = {
    # One float32 logits tile is 4 MiB: it stays in a CPU's last-level cache between the product
    # that writes it and the exponentials that read it.
    "cpu": TileConfig(window=4096, tile=1024, rows=1024, piece=1024),
    # Tiles of 128 MiB keep a GPU busy for longer than the host needs for the next; a window of 2
    # makes the two gradient products long enough to run at full rate.
    "cuda": TileConfig(window=8192, tile=4096, rows=8192, piece=1024),
}


KERNEL_WINDOWS = (67584, 33792, 16896, 8448, 4096, 2048, 1024)
"""Columns that the kernels can compute again at a time.  Those from 33·256 on give dW, whose
products take 256 rows of it, as many tiles as 132 multiprocessors share evenly."""
KERNEL_WINDOW = 8192 * 8448
"""Exponentials of a window, 132 MiB of 16 bits; more where dX's sums take as much anyway."""
NARROWER = 2
"""How many of these below the widest one a plan may choose: others cost more than they save."""
KERNEL_PIECE = 256
"""What kept columns are a multiple of: the kernels' references are those of rows."""


def lookup(problem: Problem) -> TileConfig:
    """Return the tile configuration for `problem`, no wider than its vocabulary needs.

    Unknown devices are tiled as a GPU is.
    """
    config = DEFAULTS.get(problem.device, DEFAULTS["cuda"])
    if problem.arch is not None:
        # by comparison, so that a symbolic number of tokens gives one of a few numbers
        affordable = (
            columns
            for columns in KERNEL_WINDOWS
            if columns <= 33 * problem.hidden // 16 or columns * problem.tokens <= KERNEL_WINDOW
        )
        columns = next(affordable, KERNEL_WINDOWS[-1])
        config = dataclasses.replace(config, window=columns, tile=columns, piece=KERNEL_PIECE)
    piece = min(config.piece, _round_up(problem.vocab, 8))
    tile = min(config.tile, _round_up(problem.vocab, piece))
    window = min(config.window, _round_up(problem.vocab, tile))
    return TileConfig(window=window, tile=tile, rows=config.rows, piece=piece)


def widths(problem: Problem) -> tuple[TileConfig, ...]:
    """Return what a plan for `problem` chooses from: `lookup`'s, then narrower windows."""
    widest = lookup(problem)
    if problem.arch is None:
        return (widest,)
    narrower = [columns for columns in KERNEL_WINDOWS if columns < widest.window][:NARROWER]
    return widest, *(of_width(widest, columns) for columns in narrower)


def of_width(config: TileConfig, columns: int) -> TileConfig:
    """Return the kernels' `config` with windows of so many columns, each walked as one tile."""
    return dataclasses.replace(config, window=columns, tile=columns)


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit
