"""The tuner's file: which configuration won for which problem, on one GPU model.

    {"schema": 1, "device": "NVIDIA H200", "multiprocessors": 132, "arch": "sm_90a",
     "versions": {...}, "entries": [{"kernel": "project_exp", "dtype": "bfloat16", "hidden": 4096,
     "vocab": 131072, "tokens": 8192, "config": {...}, "milliseconds": 12.5,
     "baseline_milliseconds": 13.0, "verified": true}, ...]}

`tokens` is a bucket: a power of 2, of all numbers of tokens above half of it.
"""

import dataclasses
import json
import math
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cutefce.cute_kernels.arch import Arch, arch_named
from cutefce.cute_kernels.config import ProjectExpConfig

SCHEMA = 1
FARTHEST = 3.0
"""Doublings of a size, or of several together, beyond which another problem says nothing."""


@dataclass(frozen=True)
class Key:
    """What was tuned."""

    kernel: str
    dtype: str
    hidden: int
    vocab: int
    tokens: int

    def distance(self, other: "Key") -> float:
        """Return how many doublings lie between two keys; inf for other kernels or dtypes."""
        if (self.kernel, self.dtype) != (other.kernel, other.dtype):
            return math.inf
        pairs = zip(self._sizes(), other._sizes(), strict=True)
        return sum(abs(math.log2(a / b)) for a, b in pairs)

    def _sizes(self) -> tuple[int, int, int]:
        return self.hidden, self.vocab, self.tokens


@dataclass(frozen=True)
class Entry:
    """What won."""

    config: ProjectExpConfig
    milliseconds: float
    baseline_milliseconds: float
    """What the architecture's default took, in the same run."""
    verified: bool
    """Whether its results were compared with the portable path's."""


@dataclass(frozen=True)
class Table:
    """One file."""

    device: str
    multiprocessors: int
    arch: str
    versions: dict[str, str] = field(default_factory=dict)
    entries: dict[Key, Entry] = field(default_factory=dict)

    def nearest(self, key: Key) -> tuple[float, Entry | None]:
        """Return distance and entry of the nearest verified key; inf and None if none is near."""
        found = [(key.distance(k), e) for k, e in self.entries.items() if e.verified]
        near = [pair for pair in found if pair[0] <= FARTHEST]
        return min(near, key=lambda pair: pair[0], default=(math.inf, None))

    def serves(self, device: str, multiprocessors: int, arch: str) -> None:
        """Raise ValueError if it was made on another kind of GPU."""
        for name, expected in (
            ("device", device),
            ("multiprocessors", multiprocessors),
            ("arch", arch),
        ):
            got = getattr(self, name)
            if got != expected:
                raise ValueError(f"{name}: got {got!r}, expected {expected!r}")


def bucket(tokens: int) -> int:
    """Return the power of 2 that stands for `tokens`."""
    return 1 << max(tokens - 1, 0).bit_length()


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
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"not JSON: {error}") from error
    if not isinstance(data, dict) or data.get("schema") != SCHEMA:
        got = data.get("schema") if isinstance(data, dict) else data
        raise ValueError(f"schema: got {got!r}, expected {SCHEMA}")
    try:
        arch = arch_named(data["arch"])
        entries = dict(_entry(arch, item) for item in data["entries"])
        return Table(
            str(data["device"]), int(data["multiprocessors"]), arch.name, data["versions"], entries
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"a field is missing or of another kind: {error}") from error


def _entry(arch: Arch, item: dict[str, Any]) -> tuple[Key, Entry]:
    config = ProjectExpConfig(**item["config"])
    arch.check(config)
    key = Key(**{f.name: item[f.name] for f in dataclasses.fields(Key)})
    times = float(item["milliseconds"]), float(item["baseline_milliseconds"])
    if min(key._sizes()) < 1 or min(times) <= 0:
        raise ValueError(f"entry: got {item}, expected sizes and times above 0")
    return key, Entry(config, *times, verified=item["verified"] is True)


def write(path: Path, table: Table) -> None:
    """Write a file, which appears whole or not at all."""
    entries = [
        dataclasses.asdict(key) | dataclasses.asdict(entry) for key, entry in table.entries.items()
    ]
    head = {f.name: getattr(table, f.name) for f in dataclasses.fields(table)}
    text = json.dumps({"schema": SCHEMA, **head, "entries": entries}, indent=1) + "\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    temporary.write_text(text)
    os.replace(temporary, path)


def merge(tables: Iterable[Table]) -> Table:
    """Join tables of one kind of GPU: of two entries for a key, the verified or faster one wins."""
    first, *others = tables
    entries = dict(first.entries)
    for table in others:
        table.serves(first.device, first.multiprocessors, first.arch)
        for key, entry in table.entries.items():
            held = entries.get(key)
            if held is None or _rank(entry) < _rank(held):
                entries[key] = entry
    return dataclasses.replace(first, entries=entries)


def _rank(entry: Entry) -> tuple[bool, float]:
    return not entry.verified, entry.milliseconds
