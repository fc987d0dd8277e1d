"""Verdicts: whether the kernels of one dtype gave right results on a GPU model.

A verdict holds for the kernel sources, the compiler and the configurations that lookups return.  It
is a file in the user's folder that `autotune_cache.tuning.verify` writes; without one, it follows
from a shipped table that was verified with the same sources and compiler.  An entry of other
sources or of another compiler is a choice without proof.
"""

import contextlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path

from cutefce.autotune_cache import lookup
from cutefce.autotune_cache.table import DSL_PACKAGE, Entry
from cutefce.autotune_cache.table_io import file_name
from cutefce.cute_kernels import cache_files
from cutefce.cute_kernels.cache_files import CacheError
from cutefce.cute_kernels.gpu import Gpu
from cutefce.cute_kernels.jit import cache as jit_cache
from cutefce.cute_kernels.process_cache import warn_once


@dataclass(frozen=True)
class Verdict:
    """The outcome of a verification."""

    passed: bool
    reason: str = ""
    """Why it failed."""


def known(gpu: Gpu, dtype: str) -> Verdict | None:
    """Return the verdict on the kernels of `dtype` on this kind of GPU, None without one."""
    unproven_configs = unproven(gpu, dtype)
    recorded = _recorded(gpu, dtype, unproven_configs)
    if recorded is None and not unproven_configs and _is_shipped(gpu, dtype):
        return Verdict(True)
    return recorded


def record(gpu: Gpu, dtype: str, verdict: Verdict, checked: set[str]) -> None:
    """Write the verdict into the user's folder, if that can be written to.

    Args:
        gpu: The GPU model.
        dtype: Dtype of hidden states and weight.
        verdict: The outcome.
        checked: What `unproven` returned when the verification began.
    """
    data = asdict(verdict) | {"configs": sorted(checked)}
    with contextlib.suppress(OSError):
        cache_files.write(record_path(gpu, dtype), f"{json.dumps(data)}\n".encode())


def record_path(gpu: Gpu, dtype: str) -> Path:
    """Return the file of the verdict on these kernels, compiler and dtype.

    Raises:
        CacheError: without a cache folder.
    """
    stem = file_name(gpu).removesuffix(".json")
    name = f"{stem}-{gpu.num_sms}-{dtype}-{jit_cache.fingerprint()}.json"
    return cache_files.base_folder() / "verified" / name


def _recorded(gpu: Gpu, dtype: str, configs: set[str]) -> Verdict | None:
    """Return the recorded verdict if it covers `configs` and nobody else can have written it."""
    try:
        data = json.loads(cache_files.read(record_path(gpu, dtype)))
        covers = configs <= set(data["configs"])
        return Verdict(data["passed"] is True, str(data["reason"])) if covers else None
    except CacheError as error:
        warn_once(str(error))
        return None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def _is_shipped(gpu: Gpu, dtype: str) -> bool:
    """Whether the shipped table has an entry for `dtype`.

    Tuning verifies the defaults before it writes an entry, so that one entry of these sources and
    this compiler proves the defaults too.
    """
    table = lookup.shipped_table(gpu)
    return table is not None and any(
        key.dtype == dtype and entry.verified and _is_current(entry)
        for key, entry in table.entries.items()
    )


def unproven(gpu: Gpu, dtype: str) -> set[str]:
    """Return the configurations for `dtype` that lookups use and no current entry proves."""
    entries = [
        (f"{key.kernel}: {entry.config!r}", _is_current(entry))
        for table in lookup.tables(gpu)
        for key, entry in table.entries.items()
        if key.dtype == dtype and entry.verified
    ]
    proven = {config for config, is_proven in entries if is_proven}
    return {config for config, _ in entries} - proven


def _is_current(entry: Entry) -> bool:
    """Whether an entry is of the installed kernel sources and compiler."""
    return {"kernels": entry.kernels, DSL_PACKAGE: entry.dsl} == lookup.current_build()
