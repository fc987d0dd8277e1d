"""The tuner's file: which configuration won for which problem, on one GPU model.

    {"schema": 2, "device": "NVIDIA H200", "num_sms": 132, "arch": "sm_90a",
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
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from cutefce.cute_kernels.config import GemmConfig
from cutefce.cute_kernels.problem import Problem

FARTHEST = 1.0
"""Doublings of a size, or of several together, beyond which another problem says nothing."""
LEAST_GAIN = 0.01
"""Share of the time that something must save to be better: less is noise."""

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
    num_sms: int
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

    def serves(self, device: str, num_sms: int, arch: str) -> None:
        """Raise ValueError if it was made on another kind of GPU."""
        for name, expected in (
            ("device", device),
            ("num_sms", num_sms),
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


def merge(tables: Iterable[Table]) -> Table:
    """Join tables of one kind of GPU: of two entries for a key, the verified or faster one wins."""
    result, *others = tables
    for table in others:
        table.serves(result.device, result.num_sms, result.arch)
        better = {
            key: entry
            for key, entry in table.entries.items()
            if key not in result.entries or _rank(entry) < _rank(result.entries[key])
        }
        result = result.joined(dataclasses.replace(table, entries=better))
    return result


def _rank(entry: Entry) -> tuple[bool, float]:
    return not entry.verified, entry.milliseconds
