"""TODO."""

import dataclasses
import json
import math
import os
import sys
from pathlib import Path
from typing import Any

import filelock

from cutefce.autotune_cache.table import WINDOW, Choice, Entry, Key, Rejection, Table
from cutefce.cute_kernels.arch import arch_named
from cutefce.cute_kernels.arch.base import Arch
from cutefce.cute_kernels.config import GemmConfig

SCHEMA = 3
LOCK_SECONDS = 60
"""How long to wait for another process that writes the same file."""


def file_name(device: str) -> str:
    """Return the name of the file for a GPU model."""
    return "_".join("".join(c if c.isalnum() else " " for c in device.lower()).split()) + ".json"


def read(path: Path) -> Table:
    """Read and check a file.

    Raises:
        OSError: if it cannot be read.
        ValueError: naming what is wrong in it.
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
            str(data["device"]),
            int(data["num_sms"]),
            arch.name,
            dict(data["versions"]),
            dict(_entry(arch, item) for item in data["entries"]),
            dict(_rejection(arch, item) for item in data["rejected"]),
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"a field is missing or of another kind: {error}") from error


def _key(item: dict[str, Any]) -> Key:
    key = Key(**{f.name: item[f.name] for f in dataclasses.fields(Key)})
    if not all(type(size) is int and 0 < size < sys.maxsize for size in key._sizes()):
        raise ValueError(f"entry: got {item}, expected sizes and times above 0")
    return key


def _choice(arch: Arch, item: dict[str, Any]) -> Choice:
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
    names = ("milliseconds", "baseline_milliseconds", "product_milliseconds")
    tuned, baseline, product = (float(item[name]) for name in names)
    if not all(0 < time < math.inf for time in (tuned, baseline, product)):
        raise ValueError(f"entry: got {item}, expected sizes and times above 0")
    verified, kernels = item["verified"] is True, str(item["kernels"])
    return _key(item), Entry(_choice(arch, item), tuned, baseline, product, verified, kernels)


def _rejection(arch: Arch, item: dict[str, Any]) -> tuple[tuple[Key, Choice], Rejection]:
    rejection = Rejection(str(item["reason"]), item["everywhere"] is True)
    return (_key(item), _choice(arch, item)), rejection


def write(path: Path, table: Table) -> None:
    """Write a file, which appears whole or not at all."""
    with _lock(path):
        _replace(path, table)


def update(path: Path, found: Table) -> None:
    """Add what was found to the file, beside what other processes add to it.

    A file that cannot be used is moved aside.
    """
    with _lock(path):
        try:
            held = read(path)
            held.serves(found.device, found.num_sms, found.arch)
            found = held.joined(found)
        except FileNotFoundError:
            pass
        except ValueError:
            os.replace(path, path.with_suffix(".unusable"))
        _replace(path, found)


def _lock(path: Path) -> filelock.BaseFileLock:
    path.parent.mkdir(parents=True, exist_ok=True)
    return filelock.FileLock(path.with_suffix(".lock"), timeout=LOCK_SECONDS)


def _replace(path: Path, table: Table) -> None:
    data = {"schema": SCHEMA} | {f.name: getattr(table, f.name) for f in dataclasses.fields(table)}
    data["entries"] = [
        dataclasses.asdict(key) | dataclasses.asdict(entry)
        for key, entry in sorted(table.entries.items(), key=_order)
    ]
    data["rejected"] = [
        dataclasses.asdict(key)
        | {"config": dataclasses.asdict(config) if isinstance(config, GemmConfig) else config}
        | dataclasses.asdict(rejection)
        for (key, config), rejection in sorted(table.rejected.items(), key=_order)
    ]
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(data, indent=1) + "\n")
    os.replace(temporary, path)


def _order(pair: tuple[object, object]) -> str:
    return repr(pair[0])
