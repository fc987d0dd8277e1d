"""Looks up the configurations that serve a problem on a GPU.

The entry of these sizes serves, of the user's table before the one shipped for the GPU model;
otherwise the architecture's default.  A table of other kernel sources serves too, as it proves
nothing then.  A table that cannot be used, or that others may write to, is ignored with one
warning.
"""

import dataclasses
from pathlib import Path
from typing import Any

from cutefce.autotune_cache.tables import DSL_PACKAGE, TUNED, Table, file_name, key_of, read
from cutefce.cute_kernels import cache_files
from cutefce.cute_kernels.arch.base import Gpu
from cutefce.cute_kernels.cache_files import CacheError
from cutefce.cute_kernels.config import KernelConfigs
from cutefce.cute_kernels.jit import cache as jit_cache
from cutefce.cute_kernels.problem import Problem
from cutefce.cute_kernels.process_cache import process_cache, warn_once

SHIPPED_FOLDER = Path(__file__).parent
"""Folder of the tables that come with the package."""


def kernel_configs(problem: Problem, gpu: Gpu) -> KernelConfigs:
    """Return the configurations of the kernels for `problem`: tuned ones, else the defaults."""
    tuned: dict[str, Any] = {}
    for table in reversed(tables(gpu)):
        keys = {name: key_of(name, problem) for name in TUNED}
        tuned |= {x: table.entries[key].config for x, key in keys.items() if key in table.entries}
    return dataclasses.replace(gpu.default_configs(problem.tokens, problem.hidden), **tuned)


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
    return tuple(map(read, sorted(SHIPPED_FOLDER.glob("*.json"))))


@process_cache
def _user_tables(gpu: Gpu) -> tuple[Table, ...]:
    """Return the user's table; nothing if there is none or, with a warning, if it is bad."""
    try:
        return (read(user_folder() / file_name(gpu), gpu),)
    except FileNotFoundError:
        pass
    except CacheError as error:
        warn_once(str(error))
    except OSError as error:
        warn_once(f"ignored the tuned table {error}")
    return ()
