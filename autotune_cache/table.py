"""The tuner's file: which configuration won for which problem, on one GPU model.

    {"schema": 2, "device": "NVIDIA H200", "multiprocessors": 132, "arch": "sm_90a",
     "versions": {...}, "entries": [{"kernel": "project_exp", "dtype": "bfloat16", "hidden": 4096,
     "vocab": 131072, "tokens": 8192, "config": {...}, "milliseconds": 12.5,
     "baseline_milliseconds": 13.0, "product_milliseconds": 12.9, "verified": true,
     "kernels": "0123456789abcdef"}, ...], "rejected": [{"kernel": ..., "config": {...},
     "reason": "no answer within 30 s", "everywhere": true}, ...]}

`tokens` is a bucket, a power of 2 or three quarters of one: it stands for all numbers of tokens
above the next smaller bucket.  A config of null is the plain product of cuBLAS, for kernels that it
can stand in for.  That of "window" is a number: how many columns of the vocabulary are walked at a
time.
"""

import dataclasses
import json
import math
import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import filelock

from cutefce.cute_kernels.arch import Arch, arch_named
from cutefce.cute_kernels.config import GemmConfig
from cutefce.cute_kernels.problem import Problem

SCHEMA = 2
FARTHEST = 1.0
"""Doublings of a size, or of several together, beyond which another problem says nothing."""
LEAST_GAIN = 0.01
"""Share of the time that something must save to be better: less is noise."""
LOCK_SECONDS = 60
"""How long to wait for another process that writes the same file."""

WINDOW = "window"
"""What stands in the place of a kernel's name for the columns of a window."""

Choice = GemmConfig | int | None
"""What can win: a configuration, the columns of a window, or None for the plain product."""


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


def key_of(kernel: str, problem: Problem) -> Key:
    """Return what stands for `problem` in a table."""
    return Key(kernel, problem.dtype, problem.hidden, problem.vocab, bucket(problem.tokens))


@dataclass(frozen=True)
class Entry:
    """What won."""

    config: Choice
    milliseconds: float
    baseline_milliseconds: float
    """What the architecture's default took, in the same run."""
    product_milliseconds: float
    """What the plain products of the same work took, in the same run."""
    verified: bool
    """Whether its results were compared with the portable path's."""
    kernels: str
    """Fingerprint of the kernels that were tuned."""

    @property
    def gained(self) -> bool:
        """Whether it is faster than the default was."""
        return self.milliseconds < (1 - LEAST_GAIN) * self.baseline_milliseconds


@dataclass(frozen=True)
class Rejection:
    """Why a configuration cannot win."""

    reason: str
    everywhere: bool
    """Whether it must not serve other problems either; else it lacked memory for this one."""


Entries = Mapping[Key, Entry]
Rejections = Mapping[tuple[Key, Choice], Rejection]


@dataclass(frozen=True)
class Table:
    """One file."""

    device: str
    multiprocessors: int
    arch: str
    versions: Mapping[str, str] = field(default_factory=dict)
    """Of what took part; "kernels" is the fingerprint of the kernels that rejections are of."""
    entries: Entries = field(default_factory=dict)
    rejected: Rejections = field(default_factory=dict)

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

    def joined(self, other: "Table") -> "Table":
        """Return a table with what is in `other` too, and its versions.

        What is rejected everywhere wins nothing any more.  Rejections of other kernels than those
        of `other` are forgotten.
        """
        same = self.versions.get("kernels") == other.versions.get("kernels")
        rejected = {**(self.rejected if same else {}), **other.rejected}
        unfit = {
            (key.kernel, key.dtype, config)
            for (key, config), rejection in rejected.items()
            if rejection.everywhere
        }
        entries = {
            key: entry
            for key, entry in {**self.entries, **other.entries}.items()
            if (key.kernel, key.dtype, entry.config) not in unfit
        }
        return dataclasses.replace(other, entries=entries, rejected=rejected)


def bucket(tokens: int) -> int:
    """Return the power of 2, or three quarters of one, that stands for `tokens`."""
    power = 1 << max(tokens - 1, 0).bit_length()
    return power * 3 // 4 if 0 < tokens <= power * 3 // 4 else power


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
            int(data["multiprocessors"]),
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
            held.serves(found.device, found.multiprocessors, found.arch)
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


def merge(tables: Iterable[Table]) -> Table:
    """Join tables of one kind of GPU: of two entries for a key, the verified or faster one wins."""
    result, *others = tables
    for table in others:
        table.serves(result.device, result.multiprocessors, result.arch)
        better = {
            key: entry
            for key, entry in table.entries.items()
            if key not in result.entries or _rank(entry) < _rank(result.entries[key])
        }
        result = result.joined(dataclasses.replace(table, entries=better))
    return result


def _rank(entry: Entry) -> tuple[bool, float]:
    return not entry.verified, entry.milliseconds
