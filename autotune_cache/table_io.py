"""Reads and writes tuned tables: checks on reading, atomic and locked on writing."""

import dataclasses
import json
import math
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import filelock

from cutefce.autotune_cache.table import WINDOW, Candidate, Entry, Key, Rejection, Table
from cutefce.cute_kernels.arch import arch_named
from cutefce.cute_kernels.arch.base import Arch
from cutefce.cute_kernels.config import GemmConfig
from cutefce.cute_kernels.gpu import Gpu

SCHEMA = 3
LOCK_SECONDS = 60
"""How long to wait for another process that writes the same file."""


def file_name(gpu: Gpu) -> str:
    """Return the name of the file for a GPU model."""
    words = "".join(c if c.isalnum() else " " for c in gpu.name.lower()).split()
    return "_".join(words) + ".json"


def read(path: Path) -> Table:
    """Read and check a file.

    Raises:
        OSError: if it cannot be read.
        ValueError: if it is not a table; names the field, its value and what is expected.
    """
    try:
        data = json.loads(path.read_text())
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"not JSON: {error}") from error
    if not isinstance(data, dict) or data.get("schema") != SCHEMA:
        got = data.get("schema") if isinstance(data, dict) else data
        raise ValueError(f"schema: got {got!r}, expected {SCHEMA}")
    try:
        arch = arch_named(data["arch"])
        return Table(
            Gpu(arch, str(data["device"]), int(data["num_sms"])),
            dict(data["versions"]),
            dict(_entry(arch, item) for item in data["entries"]),
            dict(_rejection(arch, item) for item in data["rejected"]),
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"a field is missing or has the wrong type: {error}") from error


def _key(item: dict[str, Any]) -> Key:
    key = Key(**{f.name: item[f.name] for f in dataclasses.fields(Key)})
    if not all(type(size) is int and 0 < size < sys.maxsize for size in key.sizes):
        raise ValueError(f"entry: got {item}, expected sizes and times above 0")
    return key


def _candidate(arch: Arch, item: dict[str, Any]) -> Candidate:
    if item["config"] is None and item["kernel"] == "grad_hidden":
        return None
    if item["kernel"] == WINDOW:
        return _columns(item["config"])
    config = GemmConfig(**item["config"])
    arch.check(config)
    return config


def _columns(number: Any) -> int:
    if type(number) is not int or not 0 < number < sys.maxsize:
        raise ValueError(f"config: got {number!r}, expected the columns of a window, above 0")
    return number


def _entry(arch: Arch, item: dict[str, Any]) -> tuple[Key, Entry]:
    ms, default_ms, cublas_ms = (float(item[name]) for name in ("ms", "default_ms", "cublas_ms"))
    if not all(0 < time < math.inf for time in (ms, default_ms, cublas_ms)):
        raise ValueError(f"entry: got {item}, expected sizes and times above 0")
    verified, kernels, dsl = item["verified"] is True, str(item["kernels"]), str(item["dsl"])
    candidate = _candidate(arch, item)
    return _key(item), Entry(candidate, ms, default_ms, cublas_ms, verified, kernels, dsl)


def _rejection(arch: Arch, item: dict[str, Any]) -> tuple[tuple[Key, Candidate], Rejection]:
    rejection = Rejection(str(item["reason"]), item["for_all_shapes"] is True)
    return (_key(item), _candidate(arch, item)), rejection


def write(path: Path, table: Table) -> None:
    """Write a file; readers see either the old or the new contents."""
    with _lock(path):
        _replace(path, table)


def update(path: Path, found: Table) -> None:
    """Add `found` to a file that other processes may update too.

    An unusable file is renamed to `.unusable`.
    """
    with _lock(path):
        try:
            held = read(path)
            held.check_matches(found.gpu)
            found = held.updated_with(found)
        except FileNotFoundError:
            pass
        except ValueError:
            os.replace(path, path.with_suffix(".unusable"))
        _replace(path, found)


def _lock(path: Path) -> filelock.BaseFileLock:
    path.parent.mkdir(parents=True, exist_ok=True)
    return filelock.FileLock(path.with_suffix(".lock"), timeout=LOCK_SECONDS)


def _replace(path: Path, table: Table) -> None:
    temporary = path.with_suffix(".tmp")
    temporary.write_text(to_json(table))
    os.replace(temporary, path)


def to_json(table: Table) -> str:
    """Return the text of a file: each entry and each rejection on one line, sorted by key."""
    entries = (
        dataclasses.asdict(key) | dataclasses.asdict(entry)
        for key, entry in sorted(table.entries.items(), key=lambda pair: _order(pair[0]))
    )
    rejected = (
        dataclasses.asdict(key)
        | {"config": dataclasses.asdict(config) if isinstance(config, GemmConfig) else config}
        | dataclasses.asdict(rejection)
        for (key, config), rejection in sorted(
            table.rejected.items(), key=lambda pair: (_order(pair[0][0]), repr(pair[0][1]))
        )
    )
    header = {
        "schema": SCHEMA,
        "device": table.gpu.name,
        "num_sms": table.gpu.num_sms,
        "arch": table.gpu.arch.name,
        "versions": dict(table.versions),
    }
    fields = [f" {json.dumps(name)}: {json.dumps(value)}" for name, value in header.items()]
    fields += [f' "entries": {_lines(entries)}', f' "rejected": {_lines(rejected)}']
    return "{\n" + ",\n".join(fields) + "\n}\n"


def _lines(items: Iterable[dict[str, Any]]) -> str:
    lines = ",\n".join(f"  {json.dumps(item)}" for item in items)
    return f"[\n{lines}\n ]" if lines else "[]"


def _order(key: Key) -> tuple[str, str, tuple[int, int, int]]:
    return key.kernel, key.dtype, key.sizes
