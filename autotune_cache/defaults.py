"""Windows and tiles where nothing was tuned, by kind of device."""

from dataclasses import replace

from cutefce.cute_kernels.config import PortableTiles
from cutefce.cute_kernels.integers import round_up
from cutefce.cute_kernels.problem import Problem

PORTABLE_TILES = {
    # One float32 logits tile is 4 MiB: it stays in a CPU's last-level cache between the GEMM that
    # writes it and the exponentials that read it.
    "cpu": PortableTiles(window=4096, reference_block=1024, tile_columns=1024, tile_rows=1024),
    # Tiles of 128 MiB keep a GPU busy while the CPU launches the next; a window of two tiles makes
    # both gradient GEMMs long enough to run at full rate.
    "cuda": PortableTiles(window=8192, reference_block=1024, tile_columns=4096, tile_rows=8192),
    # Triton's kernel computes a window at a time, in registers.
    "triton": PortableTiles(window=32768, reference_block=128, tile_columns=32768, tile_rows=8192),
}
"""Tiles of the portable path by device type, and beside Triton's kernel; other device types are
tiled like "cuda"."""

TRITON_WINDOWS = (8192,)
"""Narrower windows beside Triton's kernels."""
KERNEL_WINDOWS = (67584, 33792, 16896, 8448, 4096, 1024)
"""Windows that the kernels can recompute.  From 8448 = 33·256 on, the 256-row tiles of a window's
dW spread evenly over 132 SMs."""
KERNEL_WINDOW_EXPS = 8192 * 8448
"""Exponentials of one recomputed window: 132 MiB in 16 bits."""
MAX_NARROWER_WINDOWS = 2
"""Narrower windows that a plan may choose from; still narrower ones save a few MiB."""
KERNEL_REFERENCE_BLOCK = 256
"""Stored columns are a multiple of this; the kernels' references are per row."""


def widest_window(problem: Problem) -> PortableTiles:
    """Return the widest window for `problem`, no wider than its vocabulary.

    For the kernels a tile is a window.
    """
    kind = "triton" if problem.triton else problem.device
    config = PORTABLE_TILES.get(kind, PORTABLE_TILES["cuda"])
    if problem.arch is not None:
        # a window whose exponentials are no larger than dX's float32 sums is always affordable
        affordable = (
            columns
            for columns in KERNEL_WINDOWS
            if columns <= 33 * problem.hidden // 16
            or columns * problem.tokens <= KERNEL_WINDOW_EXPS
        )
        columns = next(affordable, KERNEL_WINDOWS[-1])
        config = PortableTiles(columns, KERNEL_REFERENCE_BLOCK, columns, config.tile_rows)
    block = min(config.reference_block, round_up(problem.vocab, 8))
    tile = min(config.tile_columns, round_up(problem.vocab, block))
    window = min(config.window, round_up(problem.vocab, tile))
    return PortableTiles(window, block, tile, config.tile_rows)


def window_configs(problem: Problem) -> tuple[PortableTiles, ...]:
    """Return the windows that a plan for `problem` chooses from, the widest first."""
    widest = widest_window(problem)
    if problem.arch is None and not problem.triton:
        return (widest,)
    every = TRITON_WINDOWS if problem.triton else KERNEL_WINDOWS
    narrower = [columns for columns in every if columns < widest.window][:MAX_NARROWER_WINDOWS]
    # a tile is a window
    return widest, *(replace(widest, window=x, tile_columns=x) for x in narrower)
