"""Result files in JSON Lines.

The first line of a .jsonl file is a header with device, date and versions; each other line is a
row.
"""

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
OUT_OF_MEMORY = "out_of_memory"
"""Keys of the measurements that ran out of memory, in a header."""
FILE_OF_A_PART = re.compile(r"_(quick|\d+x\d+x\d+_bfloat16)$")
"""The end of the name of a file with some of an experiment's shapes; rows do not have the dtype."""


@dataclass(frozen=True)
class Measurement:
    """One task of an experiment, which `--resume` skips if its rows are recorded."""

    key: Row
    """Columns of all rows of this measurement, which rows of no other have."""
    run: Callable[[], Iterable[Any]]
    """Returns the other columns of the rows, as dataclasses."""


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
    if it was written by the same versions and sources.  One that runs out of memory has no rows;
    the header has its key.

    Raises:
        click.ClickException: if one is left at `end`, by `time.monotonic`.
    """
    today = datetime.now(timezone.utc).date().isoformat()
    header = {"date": today, "device": device_name(), "versions": _versions(), **more}
    rows: list[Row] = []
    too_large: list[Row] = []
    if resume and path.exists():
        old_header, old_rows = read(path)
        rows = old_rows if conditions(old_header) == conditions(header) else []
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
            rows += [{**key, **dataclasses.asdict(row)} for row in measurement.run()]
        except torch.OutOfMemoryError:
            too_large.append(key)
            click.echo(f"{label}: out of memory")
        write(path, {**header, OUT_OF_MEMORY: too_large}, rows)
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()  # child processes need the memory
        click.echo(f"{label}: {time.perf_counter() - begin:.0f} s")
    return rows


def read(path: Path) -> tuple[Row, list[Row]]:
    """Return header and rows of a .jsonl file."""
    header, *rows = map(json.loads, path.read_text().splitlines())
    return header, rows


def conditions(header: Row) -> Row:
    """Return a header without the date and what ran out of memory."""
    return {name: x for name, x in header.items() if name not in ("date", OUT_OF_MEMORY)}


def precedence(path: Path, header: Row) -> tuple[bool, str, bool]:
    """Return the rank of a file: of those with the same measurement the highest counts.

    What `quick` wrote counts if there is nothing else.  A shape that was given on the command line
    has a file of its own; of two files of one date the one of all shapes counts.
    """
    is_part = FILE_OF_A_PART.search(path.stem)
    return not path.stem.endswith("_quick"), str(header["date"]), not is_part


def newest(folder: Path, experiment: str, **columns: Any) -> tuple[Row, list[Row]]:
    """Return header and rows of the newest file of an experiment that has rows with these columns.

    `precedence` says which file counts.

    Raises:
        LookupError: if no file has such rows.
    """
    found = {}
    for path in sorted(folder.glob(f"{experiment}*.jsonl")):
        if path.stem != experiment and FILE_OF_A_PART.sub("", path.stem) != experiment:
            continue
        header, rows = read(path)
        some = [row for row in rows if columns.items() <= row.items()]
        if some:
            found[precedence(path, header)] = header, some
    if not found:
        raise LookupError(f"{folder.name}: no rows of {experiment} with {columns}")
    return found[max(found)]


def write(path: Path, header: Row, rows: list[Row]) -> None:
    """Write a .jsonl file atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".new")
    temporary.write_text("".join(json.dumps(line) + "\n" for line in (header, *rows)))
    os.replace(temporary, path)


def sources_digest(folders: Iterable[Path] = SOURCES) -> str:
    """Return a digest of all Python and JSON files below the folders."""
    digest = hashlib.sha256()
    for folder in folders:
        files = (path for path in folder.rglob("*") if path.suffix in (".py", ".json"))
        for path in sorted(files):
            digest.update(path.relative_to(folder).as_posix().encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _versions() -> dict[str, str]:
    versions = {"cutefce": cutefce.__version__, "sources": sources_digest()}
    versions["python"] = platform.python_version()
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = "not installed"
    return versions
