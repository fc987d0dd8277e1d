"""Which configuration serves a problem: the only place that the op layer asks.

`lookup` answers for the portable path with the default of the device's kind.  For the kernels,
`lookup_project_exp` takes what was tuned: the user's file first, then the one shipped for the GPU
model; in each an exact key, else the nearest; else the default of the architecture.  A file that
cannot be used is said once and ignored.
"""

import functools
import warnings
from pathlib import Path

from cutefce.autotune_cache.table import Entry, Key, Table, bucket, file_name, read
from cutefce.cute_kernels.arch import Arch
from cutefce.cute_kernels.config import ProjectExpConfig
from cutefce.cute_kernels.jit_cache import base_folder
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


@functools.lru_cache(maxsize=1024)
def lookup_project_exp(
    problem: Problem, arch: Arch, device: str, multiprocessors: int
) -> ProjectExpConfig:
    """Return the configuration of `project_exp` for `problem` on a GPU of this name and size."""
    tokens = bucket(problem.tokens)
    key = Key("project_exp", problem.dtype, problem.hidden, problem.vocab, tokens)
    found: list[tuple[float, Entry | None]] = [
        table.nearest(key) for table in tables(arch, device, multiprocessors)
    ]
    _, entry = min(found, key=lambda pair: pair[0], default=(0.0, None))
    return arch.default(problem.tokens) if entry is None else entry.config


def user_folder() -> Path:
    """Return the folder of the user's tuned tables; it need not exist."""
    return base_folder() / "tuning"


@functools.cache
def tables(arch: Arch, device: str, multiprocessors: int) -> tuple[Table, ...]:
    """Return what was tuned for this kind of GPU: by the user, then as shipped."""
    usable = []
    for folder in (user_folder(), Path(__file__).parent):
        path = folder / file_name(device)
        try:
            table = read(path)
            table.serves(device, multiprocessors, arch.name)
            usable.append(table)
        except FileNotFoundError:
            continue
        except (OSError, ValueError) as error:
            warnings.warn(f"cutefce: ignored the tuned table {path}: {error}", stacklevel=2)
    return tuple(usable)


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit
