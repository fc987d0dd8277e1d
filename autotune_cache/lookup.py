"""Looks up the configurations that serve a problem on a GPU.

The user's table is searched first, then the one shipped for the GPU model; in each the exact key,
else the nearest one; otherwise the architecture's default serves.  A table of other kernel sources
serves too, as it proves nothing then.  A table that cannot be used, or that others may write to, is
ignored with one warning.
"""

import dataclasses
from pathlib import Path
from typing import Any

from cutefce.autotune_cache.table import DSL_PACKAGE, TUNED, Entry, Key, Table, key_of
from cutefce.autotune_cache.table_io import file_name, read
from cutefce.cute_kernels import cache_files
from cutefce.cute_kernels.cache_files import CacheError
from cutefce.cute_kernels.config import KernelConfigs
from cutefce.cute_kernels.gpu import Gpu
from cutefce.cute_kernels.integers import round_up
from cutefce.cute_kernels.jit import cache as jit_cache
from cutefce.cute_kernels.problem import Problem
from cutefce.cute_kernels.process_cache import process_cache, warn_once

SHIPPED_FOLDER = Path(__file__).parent
"""Folder of the tables that come with the package."""
MAX_WASTED_ROWS = 1 / 16
"""Rows beyond those of the default tile that an entry for other tokens may compute, relatively."""


@process_cache
def kernel_configs(problem: Problem, gpu: Gpu) -> KernelConfigs:
    """Return the configurations of the kernels for `problem`: tuned ones, else the defaults."""
    default = gpu.default_configs(problem.tokens, problem.hidden)
    entries = {name: entry_for(name, problem, gpu) for name in TUNED}
    tuned: dict[str, Any] = {name: entry.config for name, entry in entries.items() if entry}
    return dataclasses.replace(default, **tuned)


def entry_for(kernel: str, problem: Problem, gpu: Gpu) -> Entry | None:
    """Return the entry of `problem`, else the nearest usable one, else None for the default."""
    key = key_of(kernel, problem)
    found = [table.nearest(key) for table in tables(gpu)]
    distance, entry = min(found, key=lambda pair: pair[0], default=(0.0, None))
    if entry is None:
        return None
    if distance == 0:
        # the default may have smaller tiles for few tokens than the most of a bucket need
        swaps = gpu.arch.default(problem.tokens).swaps
        return None if swaps and _wastes_rows(key, entry, problem, gpu) else entry
    # where the default won for other sizes, the default for these sizes is the better guess
    return entry if entry.beats_default and not _wastes_rows(key, entry, problem, gpu) else None


def _wastes_rows(key: Key, entry: Entry, problem: Problem, gpu: Gpu) -> bool:
    """Whether the tiles of an entry for other tokens compute many rows beyond these tokens."""
    if key.kernel == "grad_weight" or entry.config is None:
        return False
    default_rows = round_up(problem.tokens, gpu.arch.default(problem.tokens).rows)
    return round_up(problem.tokens, entry.config.rows) > (1 + MAX_WASTED_ROWS) * default_rows


def user_folder() -> Path:
    """Return the folder of the user's tuned tables, which may not exist.

    Raises:
        CacheError: without a cache folder.
    """
    return cache_files.base_folder() / "tuning"


def current_build() -> dict[str, str]:
    """Return the kernels' source fingerprint and the compiler's version, as tables name them."""
    return {
        "kernels": jit_cache.source_fingerprint(),
        DSL_PACKAGE: jit_cache.package_version(DSL_PACKAGE),
    }


def tables(gpu: Gpu) -> tuple[Table, ...]:
    """Return the tables for this kind of GPU, the user's first."""
    return *_user_tables(gpu), *(table for table in shipped_tables() if table.gpu == gpu)


@process_cache
def shipped_tables() -> tuple[Table, ...]:
    """Return every table that comes with the package."""
    return tuple(table for path in sorted(SHIPPED_FOLDER.glob("*.json")) for table in _read(path))


@process_cache
def _user_tables(gpu: Gpu) -> tuple[Table, ...]:
    try:
        return _read(user_folder() / file_name(gpu), gpu)
    except CacheError as error:
        warn_once(str(error))
        return ()


def _read(path: Path, gpu: Gpu | None = None) -> tuple[Table, ...]:
    """Return the table of a file, which must be of `gpu`; nothing, with a warning, if it is bad."""
    try:
        table = read(path)
        if gpu is not None:
            table.check_matches(gpu)
        return (table,)
    except FileNotFoundError:
        pass
    except CacheError as error:
        warn_once(str(error))
    except (OSError, ValueError) as error:
        warn_once(f"ignored the tuned table {path}: {error}")
    return ()
