"""Reads and writes tuned tables: checks on reading, atomic and locked on writing."""

import dataclasses
import itertools
import json
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from cutefce.autotune_cache.table import (
    BUILD,
    TUNED,
    Candidate,
    Entry,
    Key,
    Rejected,
    Table,
)
from cutefce.cute_kernels import cache_files
from cutefce.cute_kernels.arch import arch_named
from cutefce.cute_kernels.arch.base import Arch
from cutefce.cute_kernels.config import GemmConfig
from cutefce.cute_kernels.gpu import Gpu

SCHEMA = 3
MIN_MS, MAX_MS = 1e-6, 1e9
"""Times that an entry may have."""
LOCK_SECONDS = 60
"""How long to wait for another process that writes the same file."""


def file_name(gpu: Gpu) -> str:
    """Return the name of the file for a GPU model."""
    words = "".join(c if c.isalnum() else " " for c in gpu.name.lower()).split()
    return "_".join(words) + ".json"


def read(path: Path) -> Table:
    """Read and check a file; entries that its own rejections exclude are left out.

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
        versions = {name: _text(data["versions"], name) for name in (*data["versions"], *BUILD)}
        entries = dict(_entry(arch, item) for item in data["entries"])
        rejected = dict(_rejection(arch, item) for item in data["rejected"])
    except (LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"a field is missing or has the wrong type: {error}") from error
    return Table(gpu, versions, entries, rejected).without_rejected(rejected)


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


def _key(arch: Arch, item: dict[str, Any]) -> Key:
    sizes = (_integer(item, name) for name in ("hidden", "vocab", "tokens"))
    return Key(*_kernel(arch, item), *sizes)


def _kernel(arch: Arch, item: dict[str, Any]) -> tuple[str, str]:
    return _text(item, "kernel", TUNED), _text(item, "dtype", arch.dtypes)


def _candidate(arch: Arch, item: dict[str, Any]) -> Candidate:
    if item["config"] is None and item["kernel"] == "grad_hidden":
        return None
    config = GemmConfig(**item["config"])
    arch.check(config)
    if config.swaps and item["kernel"] != "project_exp":
        raise ValueError("swaps: got True, expected False of gradients")
    return config


def _entry(arch: Arch, item: dict[str, Any]) -> tuple[Key, Entry]:
    entry = Entry(
        _candidate(arch, item),
        _ms(item, "ms"),
        _ms(item, "default_ms"),
        _ms(item, "cublas_ms"),
        verified=item["verified"] is True,
        kernels=_text(item, "kernels"),
        dsl=_text(item, "dsl"),
    )
    return _key(arch, item), entry


def _rejection(arch: Arch, item: dict[str, Any]) -> tuple[Rejected, str]:
    return (*_kernel(arch, item), _candidate(arch, item)), _text(item, "reason")


def write(path: Path, table: Table) -> None:
    """Write a file; readers see either the old or the new contents."""
    rewrite(path, lambda: table)


def update(path: Path, found: Table) -> None:
    """Add `found` to a file that other processes may update too.

    An unusable file is renamed to `.unusable`, with a number if there is one already.
    """

    def updated() -> Table:
        try:
            held = read(path)
            held.check_matches(found.gpu)
        except FileNotFoundError:
            return found
        except ValueError:
            _set_aside(path)
            return found
        return held.updated_with(found)

    rewrite(path, updated)


def rewrite(path: Path, make: Callable[[], Table]) -> None:
    """Write what `make` returns, while no other process rewrites the file."""
    with cache_files.lock(path, LOCK_SECONDS):
        cache_files.write(path, to_json(make()).encode())


def _set_aside(path: Path) -> None:
    names = (path.with_suffix(f".unusable{number or ''}") for number in itertools.count())
    os.replace(path, next(name for name in names if not name.exists()))


def to_json(table: Table) -> str:
    """Return the text of a file: each entry and each rejection on one line, sorted by key."""
    entries = (
        dataclasses.asdict(key) | dataclasses.asdict(entry)
        for key, entry in sorted(table.entries.items(), key=lambda pair: pair[0])
    )
    rejected = (
        {
            "kernel": kernel,
            "dtype": dtype,
            "config": None if config is None else dataclasses.asdict(config),
            "reason": reason,
        }
        for (kernel, dtype, config), reason in sorted(table.rejected.items(), key=repr)
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
