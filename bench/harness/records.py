"""Data of the benchmarks: JSON Lines to read again, and the same as CSV.

The first line of a .jsonl file says on what, when and with which versions its rows were measured;
each other line is a row.
"""

import csv
import dataclasses
import gc
import hashlib
import json
import os
import platform
import re
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

import click
import torch

import cutefce

Row = dict[str, Any]
Piece = tuple[Row, Callable[[], Iterable[Any]]]
"""What all rows of a piece have in common and no other row has, and how to measure them."""

PACKAGES = (
    "torch",
    "triton",
    "nvidia-cutlass-dsl",
    "apache-tvm-ffi",
    "quack-kernels",
    "liger-kernel",
    "cut-cross-entropy",
)
SOURCES = (
    *(Path(cutefce.__file__).parent / name for name in ("ops", "cute_kernels", "autotune_cache")),
    Path(__file__).parent,
)


def device_name() -> str:
    """Return the name of the GPU model, or "cpu"."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


def folder_name() -> str:
    """Return the name of this machine's folder of data."""
    return re.sub(r"\W+", "_", device_name().lower())


def collect(path: Path, pieces: Sequence[Piece], resume: bool, **more: Any) -> list[Row]:
    """Measure the pieces one after another and write to `path`, a .jsonl, after each.

    Rows are dataclasses; `more` goes into the header.  With `resume`, pieces that `path` has are
    not measured again, if it was written with the same versions.
    """
    header = {"date": datetime.now(timezone.utc).date().isoformat(), "device": device_name()}
    head: Row = {**header, "versions": _versions(), **more}
    rows: list[Row] = []
    if resume and path.exists():
        before, there = read(path)
        rows = there if {**before, "date": head["date"]} == head else []
    for number, (key, measure) in enumerate(pieces, 1):
        label = f"{path.stem} {number}/{len(pieces)} " + ", ".join(f"{k} {key[k]}" for k in key)
        if any(key.items() <= row.items() for row in rows):
            click.echo(f"{label}: there")
            continue
        begin = time.perf_counter()
        rows += [dataclasses.asdict(row) for row in measure()]
        write(path, head, rows)
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()  # pieces run in child processes too
        click.echo(f"{label}: {time.perf_counter() - begin:.0f} s")
    return rows


def read(path: Path) -> tuple[Row, list[Row]]:
    """Return header and rows of a .jsonl file."""
    header, *rows = map(json.loads, path.read_text().splitlines())
    return header, rows


def write(path: Path, header: Row, rows: list[Row]) -> None:
    """Write a .jsonl file and the .csv beside it, each whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".new")
    temporary.write_text("".join(json.dumps(line) + "\n" for line in (header, *rows)))
    os.replace(temporary, path)
    with temporary.open("w", newline="") as file:
        table = csv.DictWriter(file, rows[0])
        table.writeheader()
        table.writerows({name: _cell(value) for name, value in row.items()} for row in rows)
    os.replace(temporary, path.with_suffix(".csv"))


def _cell(value: Any) -> Any:
    return " ".join(map(str, value)) if isinstance(value, (list, tuple)) else value


def _versions() -> dict[str, str]:
    """Return versions of what is installed, and a digest of the sources."""
    digest = hashlib.sha256()
    for folder in SOURCES:
        for source in sorted(folder.glob("*.*")):
            digest.update(source.read_bytes())
    versions = {"cutefce": cutefce.__version__, "sources": digest.hexdigest()[:16]}
    versions["python"] = platform.python_version()
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = "not installed"
    return versions
