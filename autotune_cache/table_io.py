"""Reads and writes tuned tables: checks on reading, atomic and locked on writing."""

import dataclasses
import itertools
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cutefce.autotune_cache.table import Entry, Key, Table, candidates
from cutefce.cute_kernels import cache_files
from cutefce.cute_kernels.arch import arch_named
from cutefce.cute_kernels.arch.base import Gpu
from cutefce.cute_kernels.process_cache import warn_once

SCHEMA = 4


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
