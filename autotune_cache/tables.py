"""Tuned tables: the configuration that won for each problem on one GPU model.

A table is a JSON file with one entry a line (spread over several here):

    {"schema": 4, "device": "NVIDIA H200", "num_sms": 132, "arch": "sm_90a",
     "versions": {"kernels": "0123456789abcdef", "nvidia-cutlass-dsl": "4.8.1", ...},
     "entries": [
      {"kernel": "project_exp", "dtype": "bfloat16", "hidden": 4096, "vocab": 131072,
       "tokens": 8192, "config": {"tile_m": 128, ...}, "ms": 12.5, "default_ms": 13.0}]}

`tokens` is a bucket: a power of 2 or three quarters of one, which covers all token counts above the
next smaller bucket.  A `config` is one of `candidates`; null selects the cuBLAS GEMM.
All kernels for the dtypes of the entries passed verification with the kernel sources and the
compiler of `versions`.  With others, an entry is still the best guess of what is fast, but no proof
that the kernels are right.  `cutefce tune` measures the times; `cutefce verify --table` renews the
versions.
"""

import dataclasses
import itertools
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cutefce.cute_kernels import cache_files
from cutefce.cute_kernels.arch import arch_named
from cutefce.cute_kernels.arch.base import Arch, Gpu
from cutefce.cute_kernels.config import GemmConfig
from cutefce.cute_kernels.problem import Problem
from cutefce.cute_kernels.process_cache import warn_once

TUNED = "project_exp", "grad_hidden", "grad_weight"
"""Fields of `KernelConfigs` that are tuned."""
DSL_PACKAGE = "nvidia-cutlass-dsl"
"""Package of the kernels' compiler."""
BUILD = "kernels", DSL_PACKAGE
"""Versions that the proof of a table depends on."""
SCHEMA = 4

Candidate = GemmConfig | None
"""A configuration, or None for the cuBLAS GEMM."""


def candidates(arch: Arch, kernel: str) -> tuple[Candidate, ...]:
    """Return what may win for a tuned kernel: what the architecture lists, and verification covers.

    There are none for a kernel that the architecture does not have.
    """
    configs = arch.listed.get(kernel, ())
    return (None, *configs) if configs and kernel == "grad_hidden" else configs


@dataclass(frozen=True, order=True)
class Key:
    """One tuned kernel and problem."""

    kernel: str
    dtype: str
    hidden: int
    vocab: int
    tokens: int


def key_of(kernel: str, problem: Problem) -> Key:
    """Return the key of `problem` in a table."""
    return Key(kernel, problem.dtype, problem.hidden, problem.vocab, bucket(problem.tokens))


@dataclass(frozen=True)
class Entry:
    """The winner for one key."""

    config: Candidate
    ms: float
    default_ms: float
    """Time of the architecture's default, in the same run."""


@dataclass(frozen=True)
class Table:
    """The contents of one file."""

    gpu: Gpu
    versions: Mapping[str, str]
    """Versions with which the kernels were verified, those of `BUILD` among them."""
    entries: Mapping[Key, Entry] = field(default_factory=dict)
    left_out: int = field(default=0, compare=False)
    """How many entries a file has whose configuration is none of `candidates`."""

    @property
    def build(self) -> dict[str, str | None]:
        """The kernel sources and the compiler that it proves; None where merged tables differ."""
        return {name: self.versions.get(name) for name in BUILD}

    @property
    def dtypes(self) -> list[str]:
        """Dtypes of the entries."""
        return sorted({key.dtype for key in self.entries})


def bucket(tokens: int) -> int:
    """Return the smallest power of 2, or three quarters of one, that is at least `tokens`."""
    power = 1 << max(tokens - 1, 0).bit_length()
    return power * 3 // 4 if 0 < tokens <= power * 3 // 4 else power


def merge(tables: Sequence[Table]) -> Table:
    """Merge tables of one kind of GPU, in any order.

    Of two entries for a key the faster one wins.  Versions that differ are left out, and with them
    the proof of the kernels.
    """
    entries: dict[Key, Entry] = {}
    for table in tables:
        for key, entry in table.entries.items():
            entries[key] = min(entry, entries.get(key, entry), key=lambda e: (e.ms, repr(e)))
    common = set.intersection(*(set(table.versions.items()) for table in tables))
    return Table(tables[0].gpu, dict(sorted(common)), entries)


def file_name(gpu: Gpu) -> str:
    """Return the name of the file for a GPU model."""
    words = "".join(c if c.isalnum() else " " for c in gpu.name.lower()).split()
    return "_".join(words) + ".json"


class TableError(OSError):
    """A file is not the table that it should be; the message names both."""


def read(path: Path, gpu: Gpu | None = None) -> Table:
    """Read and check a file, which is of a kind of GPU if that is given.

    Entries with a configuration that the architecture does not list are left out, as tables of
    other versions may have some: the defaults serve there.

    Raises:
        CacheError: if it is in the cache folder and not trusted.
        OSError: if it cannot be read.
        TableError: if it is no such table; names the field, its value and what is expected.
    """
    try:
        return _parsed(json.loads(cache_files.read(path)), gpu)
    except (LookupError, TypeError, AttributeError) as error:
        text = f"{path}: a field is missing or has the wrong type: {error}"
        raise TableError(text) from error
    except (ValueError, RecursionError) as error:
        raise TableError(f"{path}: {error}") from error


def _parsed(data: Any, gpu: Gpu | None) -> Table:
    """Return what a file holds."""
    if data.get("schema") != SCHEMA:
        raise ValueError(f"schema: got {data.get('schema')!r}, expected {SCHEMA}")
    if gpu is None:
        arch, sms = arch_named(data["arch"]), _positive(data, "num_sms", int)
        gpu = Gpu(arch, str(data["device"]), sms)
    for name, expected in _header(gpu).items():
        if data[name] != expected:
            raise ValueError(f"{name}: got {data[name]!r}, expected {expected!r}")
    versions = {name: str(version) for name, version in data["versions"].items()}
    entries, left_out = dict[Key, Entry](), 0
    for item in data["entries"]:
        fields = {x: x and dataclasses.asdict(x) for x in candidates(gpu.arch, str(item["kernel"]))}
        configs = [config for config in fields if fields[config] == item["config"]]
        if not configs:
            left_out += 1
            continue
        if item["dtype"] not in gpu.arch.dtypes:
            raise ValueError(f"dtype: got {item['dtype']!r}, expected one of {gpu.arch.dtypes}")
        sizes = (_positive(item, name, int) for name in ("hidden", "vocab", "tokens"))
        key = Key(str(item["kernel"]), str(item["dtype"]), *sizes)
        times = (float(_positive(item, name, int, float)) for name in ("ms", "default_ms"))
        entries[key] = Entry(configs[0], *times)
    return Table(gpu, versions, entries, left_out)


def _header(gpu: Gpu) -> dict[str, Any]:
    """Return the fields of a file that name a GPU."""
    return {"device": gpu.name, "num_sms": gpu.num_sms, "arch": gpu.arch.name}


def _positive(item: dict[str, Any], name: str, *kinds: type) -> Any:
    """Return a number of an item, which is of one of `kinds`, above 0 and finite."""
    number = item[name]
    if type(number) not in kinds or not 0 < number < sys.maxsize:
        raise ValueError(f"{name}: got {number!r}, expected a number above 0")
    return number


def read_like(path: Path, like: Table) -> Table:
    """Do what `read` does of a file to which `like` can be added.

    Raises:
        TableError: also if it is of another kind of GPU, or proves other kernels.
    """
    table = read(path, like.gpu)
    if table.build != like.build:
        raise TableError(f"{path}: versions: got {table.build}, expected {like.build}")
    return table


def update(path: Path, found: Table) -> None:
    """Add `found` to a file that other processes may update too.

    A file to which it cannot be added is renamed to `.old`, with a number if there is one already,
    and with a warning.
    """

    def updated() -> Table:
        try:
            held = read_like(path, found)
        except FileNotFoundError:
            return found
        except TableError as error:
            _set_aside(path, error)
            return found
        return dataclasses.replace(found, entries={**held.entries, **found.entries})

    rewrite(path, updated)


def rewrite(path: Path, make: Callable[[], Table]) -> None:
    """Write what `make` returns, while no other process rewrites the file."""
    with cache_files.lock(path):
        cache_files.write(path, to_json(make()).encode())


def _set_aside(path: Path, reason: TableError) -> None:
    names = (path.with_suffix(f".old{number or ''}") for number in itertools.count())
    free = next(name for name in names if not name.exists())
    os.replace(path, free)
    warn_once(f"moved a tuned table aside, to {free.name}: {reason}")


def to_json(table: Table) -> str:
    """Return the text of a file: each entry on one line, sorted by key."""
    header = {"schema": SCHEMA, **_header(table.gpu), "versions": dict(table.versions)}
    fields = [f" {json.dumps(name)}: {json.dumps(value)}" for name, value in header.items()]
    entries = (
        dataclasses.asdict(key) | dataclasses.asdict(table.entries[key])
        for key in sorted(table.entries)
    )
    lines = ",\n".join(f"  {json.dumps(item)}" for item in entries)
    fields.append(f' "entries": [\n{lines}\n ]' if lines else ' "entries": []')
    return "{\n" + ",\n".join(fields) + "\n}\n"
