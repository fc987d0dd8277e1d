"""Result files: JSON Lines, and the same rows as CSV.

The first line of a .jsonl file is a header with device, date and versions; each other line is a
row.
"""

import csv
import dataclasses
import gc
import hashlib
import json
import math
import os
import platform
import re
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

import click
import torch

import cutefce

Row = dict[str, Any]
RESULTS = Path(__file__).parents[1] / "results"
"""The committed results: a folder per GPU model."""
PACKAGES = (
    "torch",
    "triton",
    "nvidia-cutlass-dsl",
    "apache-tvm-ffi",
    "quack-kernels",
    "liger-kernel",
    "cut-cross-entropy",
    "transformers",
)
SOURCES = (
    *(
        Path(cutefce.__file__).parent / name
        for name in ("integrations", "ops", "cute_kernels", "autotune_cache")
    ),
    *(Path(__file__).parents[1] / name for name in ("harness", "experiments")),
)
"""Folders whose sources decide what a measurement gives."""


@dataclass(frozen=True)
class Measurement:
    """One task of an experiment, which `--resume` skips if its rows are recorded."""

    key: Row
    """Columns that all rows of this measurement share, and rows of no other have."""
    run: Callable[[], Iterable[Any]]
    """Returns the rows, which are dataclasses."""


def device_name() -> str:
    """Return the name of the GPU model, or "cpu"."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


def folder_name() -> str:
    """Return the name of the results folder of this machine's GPU model."""
    return re.sub(r"\W+", "_", device_name().lower())


def collect(
    path: Path,
    measurements: Sequence[Measurement],
    resume: bool,
    end: float = math.inf,
    **more: Any,
) -> list[Row]:
    """Run the measurements in order, writing the .jsonl file `path` after each; return all rows.

    `more` is added to the header.  With `resume`, measurements that `path` has are not repeated,
    if it was written by the same versions and sources.  One that runs out of memory has no rows.

    Raises:
        click.ClickException: if one is left at `end`, by `time.monotonic`.
    """
    today = datetime.now(timezone.utc).date().isoformat()
    header = {"date": today, "device": device_name(), "versions": _versions(), **more}
    rows: list[Row] = []
    if resume and path.exists():
        old_header, old_rows = read(path)
        rows = old_rows if {**old_header, "date": today} == header else []
    for number, measurement in enumerate(measurements, 1):
        key = measurement.key
        label = f"{path.stem} {number}/{len(measurements)} "
        label += ", ".join(f"{name} {value}" for name, value in key.items())
        if any(key.items() <= row.items() for row in rows):
            click.echo(f"{label}: already recorded")
            continue
        if time.monotonic() > end:
            raise click.ClickException(f"{label}: the time is over; --resume continues here")
        begin = time.perf_counter()
        try:
            rows += [dataclasses.asdict(row) for row in measurement.run()]
            write(path, header, rows)
        except torch.OutOfMemoryError:
            click.echo(f"{label}: out of memory")
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()  # child processes need the memory
        click.echo(f"{label}: {time.perf_counter() - begin:.0f} s")
    return rows


def read(path: Path) -> tuple[Row, list[Row]]:
    """Return header and rows of a .jsonl file."""
    header, *rows = map(json.loads, path.read_text().splitlines())
    return header, rows


def newest(folder: Path, experiment: str, **columns: Any) -> tuple[Row, list[Row]]:
    """Return header and rows of the newest file of an experiment that has rows with these columns.

    A shape that was given on the command line has a file of its own; of two files of one date the
    one of all shapes counts.

    Raises:
        LookupError: if no file has such rows.
    """
    paths = [folder / f"{experiment}.jsonl", *sorted(folder.glob(f"{experiment}_[0-9]*.jsonl"))]
    found = []
    for header, rows in map(read, filter(Path.exists, paths)):
        some = [row for row in rows if columns.items() <= row.items()]
        if some:
            found.append((header, some))
    if not found:
        raise LookupError(f"{folder.name}: no rows of {experiment} with {columns}")
    return max(found, key=lambda one: str(one[0]["date"]))


def write(path: Path, header: Row, rows: list[Row]) -> None:
    """Write a .jsonl file and the .csv beside it, each atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".new")
    temporary.write_text("".join(json.dumps(line) + "\n" for line in (header, *rows)))
    os.replace(temporary, path)
    with temporary.open("w", newline="") as file:
        table = csv.DictWriter(file, rows[0])
        table.writeheader()
        table.writerows({name: _cell(value) for name, value in row.items()} for row in rows)
    os.replace(temporary, path.with_suffix(".csv"))


def sources_digest(folders: Iterable[Path] = SOURCES) -> str:
    """Return a digest of all Python and JSON files below the folders."""
    digest = hashlib.sha256()
    for folder in folders:
        files = (path for path in folder.rglob("*") if path.suffix in (".py", ".json"))
        for path in sorted(files):
            digest.update(path.relative_to(folder).as_posix().encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _cell(value: Any) -> Any:
    return " ".join(map(str, value)) if isinstance(value, (list, tuple)) else value


def _versions() -> dict[str, str]:
    versions = {"cutefce": cutefce.__version__, "sources": sources_digest()}
    versions["python"] = platform.python_version()
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = "not installed"
    return versions
