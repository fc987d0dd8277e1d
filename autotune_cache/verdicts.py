"""Verdicts: whether configurations gave right results on an architecture.

GPU models of an architecture execute the same code.  So what proves a configuration, of the kernel
sources and the compiler as they are, is a check on any of them: that of an entry of a tuned table,
or one that is recorded in a file of the user's folder.  Tuning verifies all defaults before it
writes a table that is shipped, so that one entry proves those of its dtype too.  An entry of other
sources or of another compiler is a choice without proof.

What is proven is a configuration of a kernel in a part of what calls launch (`cute_kernels.parts`).
"""

import contextlib
import json
from collections.abc import Iterable, Set
from dataclasses import dataclass, field
from pathlib import Path

from cutefce.autotune_cache import lookup
from cutefce.autotune_cache.ahead import with_gradients
from cutefce.autotune_cache.table import DSL_PACKAGE, Entry, Table
from cutefce.cute_kernels import cache_files
from cutefce.cute_kernels.arch.base import Arch
from cutefce.cute_kernels.cache_files import CacheError
from cutefce.cute_kernels.config import GemmConfig, KernelConfigs
from cutefce.cute_kernels.gpu import Gpu
from cutefce.cute_kernels.jit import cache as jit_cache
from cutefce.cute_kernels.parts import PARTS, part_configs
from cutefce.cute_kernels.process_cache import warn_once


@dataclass(frozen=True)
class Verdict:
    """The outcome of a verification."""

    passed: bool
    reason: str = ""
    """Why it failed."""
    uses: frozenset[str] = field(default=frozenset(), compare=False)
    """What passed, of a recorded one."""


def uses(configs: KernelConfigs, parts: Iterable[str] = PARTS) -> set[str]:
    """Return the names of what checks of `parts` with `configs` prove, and calls with both need."""
    found = set()
    for part in parts:
        found |= {_name(part, *each) for each in part_configs(part, configs)} or {part}
    return found


def _name(part: str, kernel: str, config: GemmConfig) -> str:
    return f"{part}: {kernel}: {config!r}"


def known(gpu: Gpu, dtype: str, needed: Set[str]) -> Verdict | None:
    """Return the verdict on what `uses` returned, None without one.

    A recorded failure is one on all kernels of `dtype`, and outweighs what tables prove.
    """
    recorded = _recorded(gpu.arch, dtype)
    if not recorded.passed:
        return recorded
    return Verdict(True) if needed <= recorded.uses | _of_tables(gpu, dtype) else None


def failure(gpu: Gpu, dtype: str) -> Verdict | None:
    """Return the recorded failure of the kernels of `dtype`, None without one."""
    verdict = _recorded(gpu.arch, dtype)
    return None if verdict.passed else verdict


def record(gpu: Gpu, dtype: str, verdict: Verdict, checked: Set[str]) -> None:
    """Write a verdict into the user's folder, if that can be written to.

    Args:
        gpu: A GPU of the architecture.
        dtype: Dtype of hidden states and weight.
        verdict: The outcome.
        checked: The uses that passed, which are added to those recorded before.
    """
    before = _recorded(gpu.arch, dtype).uses
    passed = sorted(before | checked) if verdict.passed else []
    data = {"passed": verdict.passed, "reason": verdict.reason, "uses": passed}
    with contextlib.suppress(OSError):
        cache_files.write(record_path(gpu.arch, dtype), f"{json.dumps(data)}\n".encode())


def record_path(arch: Arch, dtype: str) -> Path:
    """Return the file of the verdicts on these kernels, compiler and dtype.

    Raises:
        CacheError: without a cache folder.
    """
    name = f"{arch.name}-{dtype}-{jit_cache.fingerprint()}.json"
    return cache_files.base_folder() / "verified" / name


def _recorded(arch: Arch, dtype: str) -> Verdict:
    """Return what is recorded if nobody else can have written it; else that nothing has passed."""
    try:
        data = json.loads(cache_files.read(record_path(arch, dtype)))
        return Verdict(data["passed"] is True, str(data["reason"]), frozenset(data["uses"]))
    except CacheError as error:
        warn_once(str(error))
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        pass
    return Verdict(True)


def _of_tables(gpu: Gpu, dtype: str) -> set[str]:
    """Return the uses that tables prove: shipped ones of the architecture, and those of the GPU."""
    shipped = [table for table in lookup.shipped_tables() if table.gpu.arch == gpu.arch]
    own = {each for table in (*shipped, *lookup.tables(gpu)) for each in _current(table, dtype)}
    found = {_name(part, *each) for part in PARTS for each in own}
    if any(_current(table, dtype) for table in shipped):
        for project_exp in gpu.arch.prebuilt_configs():
            for configs in with_gradients(gpu.arch, project_exp):
                found |= uses(configs)
    return found


def _current(table: Table, dtype: str) -> set[tuple[str, GemmConfig]]:
    """Return kernels and configurations that entries for `dtype` prove."""
    return {
        (key.kernel, entry.config)
        for key, entry in table.entries.items()
        if key.dtype == dtype and entry.verified and _is_current(entry) and entry.config is not None
    }


def _is_current(entry: Entry) -> bool:
    """Whether an entry is of the installed kernel sources and compiler."""
    return {"kernels": entry.kernels, DSL_PACKAGE: entry.dsl} == lookup.current_build()
