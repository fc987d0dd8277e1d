"""Which configuration serves a problem: the only place that the op layer asks.

`lookup` answers for the portable path with the default of the device's kind.  For the kernels,
`lookup_configs` takes what was tuned: the user's file first, then the one shipped for the GPU
model; in each an exact key, else the nearest; else the default of the architecture.  A file that
cannot be used is said once and ignored.
"""

import dataclasses
import functools
import os
import warnings
from pathlib import Path
from typing import Any

from cutefce.autotune_cache.table import WINDOW, Entry, Key, Table, file_name, key_of, read
from cutefce.cute_kernels.arch import Arch
from cutefce.cute_kernels.config import Configs, GemmConfig
from cutefce.cute_kernels.jit_cache import base_folder
from cutefce.cute_kernels.kernels import Kernel, all_kernels, kernel_set
from cutefce.cute_kernels.problem import Problem, TileConfig

AUTOTUNE_VARIABLE = "CUTEFCE_AUTOTUNE"
"""Environment variable that, set to 1, has each new problem tuned when it is first met."""
SHIPPED_FOLDER = Path(__file__).parent
"""Where the tables lie that come with the package."""

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


def tuned_widths(
    problem: Problem, arch: Arch, device: str, multiprocessors: int
) -> tuple[TileConfig, ...]:
    """Return the one of `widths` that won on a GPU of this name and size, all if none was tuned."""
    every, entry = widths(problem), tuned(WINDOW, problem, arch, device, multiprocessors)
    won = tuple(config for config in every if entry and config.window == entry.config)
    return won or every


@functools.lru_cache(maxsize=1024)
def lookup_configs(problem: Problem, arch: Arch, device: str, multiprocessors: int) -> Configs:
    """Return the kernels' configurations for `problem` on a GPU of this name and size."""
    default = arch.default_configs(problem.tokens, problem.hidden, multiprocessors)
    entries = {
        field.name: tuned(field.name, problem, arch, device, multiprocessors)
        for field in dataclasses.fields(Configs)
    }
    found: dict[str, Any] = {name: entry.config for name, entry in entries.items() if entry}
    return dataclasses.replace(default, **found)


def tuned(
    kernel: str, problem: Problem, arch: Arch, device: str, multiprocessors: int
) -> Entry | None:
    """Return what won for `problem` or, if it was not tuned, for the nearest one that was.

    None stands for the default.
    """
    key = key_of(kernel, problem)
    found: list[tuple[float, Entry | None]] = [
        table.nearest(key) for table in tables(arch, device, multiprocessors)
    ]
    distance, entry = min(found, key=lambda pair: pair[0], default=(0.0, None))
    if entry is None or distance == 0:
        return entry
    # where the default won elsewhere, the default of this problem is the better guess
    return entry if entry.gained and not _wastes_rows(key, entry, problem, arch) else None


def _wastes_rows(key: Key, entry: Entry, problem: Problem, arch: Arch) -> bool:
    """Whether what won for other tokens computes many more rows than these have."""
    if key.kernel == "grad_weight" or not isinstance(entry.config, GemmConfig):
        return False
    least = _round_up(problem.tokens, arch.default(problem.tokens).rows)
    return 16 * _round_up(problem.tokens, entry.config.rows) > 17 * least


def user_folder() -> Path:
    """Return the folder of the user's tuned tables; it need not exist."""
    return base_folder() / "tuning"


def tables(arch: Arch, device: str, multiprocessors: int) -> tuple[Table, ...]:
    """Return what was tuned for this kind of GPU: by the user, then as shipped."""
    found = (
        _table(folder, arch, device, multiprocessors) for folder in (user_folder(), SHIPPED_FOLDER)
    )
    return tuple(table for table in found if table is not None)


def tunes_on_first_use() -> bool:
    """Whether the user asked for that."""
    return os.environ.get(AUTOTUNE_VARIABLE) == "1"


def has_shipped(arch: Arch, device: str, multiprocessors: int) -> bool:
    """Whether the kernels were verified on this kind of GPU before they were shipped."""
    table = _table(SHIPPED_FOLDER, arch, device, multiprocessors)
    return table is not None and any(entry.verified for entry in table.entries.values())


def shipped_kernels(arch: Arch) -> list[Kernel]:
    """Return every kernel that can be chosen on `arch` where the user tuned nothing, each once."""
    found = all_kernels(arch)
    shipped = map(read, sorted(SHIPPED_FOLDER.glob("*.json")))
    for table in (table for table in shipped if table.arch == arch.name):
        for key, entry in table.entries.items():
            if key.kernel == WINDOW:
                continue
            winner: dict[str, Any] = {key.kernel: entry.config}
            configs = dataclasses.replace(Configs(arch.configs()[0], None, None), **winner)
            found += kernel_set(arch, key.dtype, configs).all()
    return list(dict.fromkeys(found))


def forget() -> None:
    """Read the tables again at the next lookup."""
    _table.cache_clear()
    lookup_configs.cache_clear()


@functools.cache
def _table(folder: Path, arch: Arch, device: str, multiprocessors: int) -> Table | None:
    path = folder / file_name(device)
    try:
        table = read(path)
        table.serves(device, multiprocessors, arch.name)
        return table
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:
        warnings.warn(f"cutefce: ignored the tuned table {path}: {error}", stacklevel=2)
    return None


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit
