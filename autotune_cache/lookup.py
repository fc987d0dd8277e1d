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

from cutefce.autotune_cache.defaults import window_configs
from cutefce.autotune_cache.table import WINDOW, Entry, Key, Table, key_of
from cutefce.autotune_cache.table_io import file_name, read
from cutefce.cute_kernels.arch.base import Arch
from cutefce.cute_kernels.config import GemmConfig, KernelConfigs, PortableTiles
from cutefce.cute_kernels.integers import round_up
from cutefce.cute_kernels.jit.cache import base_folder
from cutefce.cute_kernels.problem import Problem
from cutefce.cute_kernels.spec import KernelSpec, all_kernels, kernel_set

AUTOTUNE_VARIABLE = "CUTEFCE_AUTOTUNE"
"""Environment variable that, set to 1, has each new problem tuned when it is first met."""
SHIPPED_FOLDER = Path(__file__).parent
"""Where the tables lie that come with the package."""


def tuned_widths(
    problem: Problem, arch: Arch, device: str, num_sms: int
) -> tuple[PortableTiles, ...]:
    """Return the one of `window_configs` that won on a GPU of this name and size, all if none was tuned."""
    every, entry = window_configs(problem), tuned(WINDOW, problem, arch, device, num_sms)
    won = tuple(config for config in every if entry and config.window == entry.config)
    return won or every


@functools.lru_cache(maxsize=1024)
def lookup_configs(problem: Problem, arch: Arch, device: str, num_sms: int) -> KernelConfigs:
    """Return the kernels' configurations for `problem` on a GPU of this name and size."""
    default = arch.default_configs(problem.tokens, problem.hidden, num_sms)
    entries = {
        field.name: tuned(field.name, problem, arch, device, num_sms)
        for field in dataclasses.fields(KernelConfigs)
    }
    found: dict[str, Any] = {name: entry.config for name, entry in entries.items() if entry}
    return dataclasses.replace(default, **found)


def tuned(kernel: str, problem: Problem, arch: Arch, device: str, num_sms: int) -> Entry | None:
    """Return what won for `problem` or, if it was not tuned, for the nearest one that was.

    None stands for the default.
    """
    key = key_of(kernel, problem)
    found: list[tuple[float, Entry | None]] = [
        table.nearest(key) for table in tables(arch, device, num_sms)
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
    least = round_up(problem.tokens, arch.default(problem.tokens).rows)
    return 16 * round_up(problem.tokens, entry.config.rows) > 17 * least


def user_folder() -> Path:
    """Return the folder of the user's tuned tables; it need not exist."""
    return base_folder() / "tuning"


def tables(arch: Arch, device: str, num_sms: int) -> tuple[Table, ...]:
    """Return what was tuned for this kind of GPU: by the user, then as shipped."""
    found = (_table(folder, arch, device, num_sms) for folder in (user_folder(), SHIPPED_FOLDER))
    return tuple(table for table in found if table is not None)


def tunes_on_first_use() -> bool:
    """Whether the user asked for that."""
    return os.environ.get(AUTOTUNE_VARIABLE) == "1"


def has_shipped(arch: Arch, device: str, num_sms: int) -> bool:
    """Whether the kernels were verified on this kind of GPU before they were shipped."""
    table = _table(SHIPPED_FOLDER, arch, device, num_sms)
    return table is not None and any(entry.verified for entry in table.entries.values())


def shipped_kernels(arch: Arch) -> list[KernelSpec]:
    """Return every kernel that can be chosen on `arch` where the user tuned nothing, each once."""
    found = all_kernels(arch)
    shipped = map(read, sorted(SHIPPED_FOLDER.glob("*.json")))
    for table in (table for table in shipped if table.arch == arch.name):
        for key, entry in table.entries.items():
            if key.kernel == WINDOW:
                continue
            winner: dict[str, Any] = {key.kernel: entry.config}
            configs = dataclasses.replace(
                KernelConfigs(arch.prebuilt_configs()[0], None, None), **winner
            )
            found += kernel_set(arch, key.dtype, configs).all()
    return list(dict.fromkeys(found))


def forget() -> None:
    """Read the tables again at the next lookup."""
    _table.cache_clear()
    lookup_configs.cache_clear()


@functools.cache
def _table(folder: Path, arch: Arch, device: str, num_sms: int) -> Table | None:
    path = folder / file_name(device)
    try:
        table = read(path)
        table.serves(device, num_sms, arch.name)
        return table
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:
        warnings.warn(f"cutefce: ignored the tuned table {path}: {error}", stacklevel=2)
    return None
