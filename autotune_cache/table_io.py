"""Reads and writes tuned tables: checks on reading, atomic and locked on writing."""

import dataclasses
import itertools
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from cutefce.autotune_cache.table import TUNED, Entry, Key, Table, candidates
from cutefce.cute_kernels import cache_files
from cutefce.cute_kernels.arch import arch_named
from cutefce.cute_kernels.gpu import Gpu
from cutefce.cute_kernels.process_cache import warn_once

SCHEMA = 4
MIN_MS, MAX_MS = 1e-6, 1e9
"""Times that an entry may have."""
LOCK_SECONDS = 60
"""How long to wait for another process that writes the same file."""


def file_name(gpu: Gpu) -> str:
    """Return the name of the file for a GPU model."""
    words = "".join(c if c.isalnum() else " " for c in gpu.name.lower()).split()
    return "_".join(words) + ".json"


def read(path: Path) -> Table:
    """Read and check a file.

    Entries with a configuration that the architecture does not list are left out, as tables of
    other versions may have some: the defaults serve there.

    Raises:
        CacheError: if it is in the cache folder and not trusted.
        OSError: if it cannot be read.
        ValueError: if it is not a table; names the field, its value and what is expected.
    """
    try:
        data = json.loads(cache_files.read(path))
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"not JSON: {error}") from error
    if not isinstance(data, dict) or data.get("schema") != SCHEMA:
        got = data.get("schema") if isinstance(data, dict) else data
        raise ValueError(f"schema: got {got!r}, expected {SCHEMA}")
    try:
        arch = arch_named(_text(data, "arch"))
        gpu = Gpu(arch, _text(data, "device"), _integer(data, "num_sms"))
        versions = {name: _text(data["versions"], name) for name in data["versions"]}
        entries, left_out = dict[Key, Entry](), 0
        for item in data["entries"]:
            kernel = _text(item, "kernel", TUNED)
            fields = {x: x and dataclasses.asdict(x) for x in candidates(arch, kernel)}
            configs = [config for config in fields if fields[config] == item["config"]]
            if not configs:
                left_out += 1
                continue
            sizes = (_integer(item, name) for name in ("hidden", "vocab", "tokens"))
            key = Key(kernel, _text(item, "dtype", arch.dtypes), *sizes)
            entries[key] = Entry(configs[0], _ms(item, "ms"), _ms(item, "default_ms"))
    except (LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"a field is missing or has the wrong type: {error}") from error
    return Table(gpu, versions, entries, left_out)


def read_like(path: Path, like: Table) -> Table:
    """Do what `read` does of a file to which `like` can be added.

    Raises:
        ValueError: also if it is of another kind of GPU, or proves other kernels.
    """
    table = read(path)
    table.check_matches(like.gpu)
    if table.build != like.build:
        raise ValueError(f"versions: got {table.build}, expected {like.build}")
    return table


def _text(item: dict[str, Any], name: str, choices: Sequence[str] = ()) -> str:
    text = item[name]
    if type(text) is not str or (choices and text not in choices):
        raise ValueError(f"{name}: got {text!r}, expected {' or '.join(choices) or 'text'}")
    return text


def _integer(item: dict[str, Any], name: str) -> int:
    number = item[name]
    if type(number) is not int or not 0 < number < sys.maxsize:
        raise ValueError(f"{name}: got {number!r}, expected an integer above 0")
    return number


def _ms(item: dict[str, Any], name: str) -> float:
    time = item[name]
    if type(time) not in (int, float) or not MIN_MS <= time <= MAX_MS:
        raise ValueError(f"{name}: got {time!r}, expected {MIN_MS:g} to {MAX_MS:g}")
    return float(time)


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
        except ValueError as error:
            _set_aside(path, error)
            return found
        return dataclasses.replace(found, entries={**held.entries, **found.entries})

    rewrite(path, updated)


def rewrite(path: Path, make: Callable[[], Table]) -> None:
    """Write what `make` returns, while no other process rewrites the file."""
    with cache_files.lock(path, LOCK_SECONDS):
        cache_files.write(path, to_json(make()).encode())


def _set_aside(path: Path, reason: ValueError) -> None:
    names = (path.with_suffix(f".old{number or ''}") for number in itertools.count())
    free = next(name for name in names if not name.exists())
    os.replace(path, free)
    warn_once(f"moved the tuned table {path} aside, to {free.name}: {reason}")


def to_json(table: Table) -> str:
    """Return the text of a file: each entry on one line, sorted by key."""
    header = {
        "schema": SCHEMA,
        "device": table.gpu.name,
        "num_sms": table.gpu.num_sms,
        "arch": table.gpu.arch.name,
        "versions": dict(table.versions),
    }
    fields = [f" {json.dumps(name)}: {json.dumps(value)}" for name, value in header.items()]
    entries = (
        dataclasses.asdict(key) | dataclasses.asdict(table.entries[key])
        for key in sorted(table.entries)
    )
    lines = ",\n".join(f"  {json.dumps(item)}" for item in entries)
    fields.append(f' "entries": [\n{lines}\n ]' if lines else ' "entries": []')
    return "{\n" + ",\n".join(fields) + "\n}\n"
