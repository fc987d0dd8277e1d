"""Tuned tables: the configuration that won for each problem on one GPU model.

A table is a JSON file with one entry a line (spread over several here):

    {"schema": 3, "device": "NVIDIA H200", "num_sms": 132, "arch": "sm_90a",
     "versions": {"kernels": "0123456789abcdef", ...},
     "entries": [
      {"kernel": "project_exp", "dtype": "bfloat16", "hidden": 4096, "vocab": 131072,
       "tokens": 8192, "config": {"tile_m": 128, ...}, "ms": 12.5, "default_ms": 13.0,
       "cublas_ms": 12.9, "verified": true, "kernels": "0123456789abcdef", "dsl": "4.8.1"}],
     "rejected": [
      {"kernel": ..., "dtype": ..., "config": {...}, "reason": "no answer within 30 s"}]}

`tokens` is a bucket: a power of 2 or three quarters of one, which covers all token counts above the
next smaller bucket.  A `config` of null selects the cuBLAS GEMM, for kernels that it can replace.
`kernels` is the fingerprint of the kernel sources and `dsl` the version of the compiler with which
an entry was last verified.
With others, the entry is still the best guess of what is fast, but no proof that it is right.
`cutefce tune` measures the times; `cutefce verify --table` renews `kernels` and `dsl` and keeps the
times of the tuning run.
"""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from cutefce.cute_kernels.config import GemmConfig
from cutefce.cute_kernels.gpu import Gpu
from cutefce.cute_kernels.problem import Problem

MAX_DISTANCE = 1.0
"""Doublings of a size, or of several together, up to which an entry serves another problem."""
MIN_GAIN = 0.01
"""Smallest relative saving that counts as one; less is noise."""

TUNED = "project_exp", "grad_hidden", "grad_weight"
"""Fields of `KernelConfigs` that are tuned."""
DSL_PACKAGE = "nvidia-cutlass-dsl"
"""Package of the kernels' compiler."""
BUILD = "kernels", DSL_PACKAGE
"""Versions that every table has: those that its rejections depend on."""

Candidate = GemmConfig | None
"""A configuration, or None for the cuBLAS GEMM."""


@dataclass(frozen=True, order=True)
class Key:
    """One tuned kernel and problem."""

    kernel: str
    dtype: str
    hidden: int
    vocab: int
    tokens: int

    @property
    def sizes(self) -> tuple[int, int, int]:
        """(hidden, vocab, tokens)."""
        return self.hidden, self.vocab, self.tokens

    def distance(self, other: "Key") -> float:
        """Return the doublings between the sizes of two keys; inf for other kernels or dtypes."""
        if (self.kernel, self.dtype) != (other.kernel, other.dtype):
            return math.inf
        pairs = zip(self.sizes, other.sizes, strict=True)
        return sum(abs(math.log2(a / b)) for a, b in pairs)

    def rejects(self, config: "Candidate") -> "Rejected":
        """Return what a rejection of `config` is found by."""
        return self.kernel, self.dtype, config


def key_of(kernel: str, problem: Problem) -> Key:
    """Return the key of `problem` in a table."""
    return Key(kernel, problem.dtype, problem.hidden, problem.vocab, bucket(problem.tokens))


@dataclass(frozen=True)
class Entry:
    """The winner for one key."""

    config: Candidate
    ms: float
    default_ms: float
    """Time of the architecture's default, in the same run."""
    cublas_ms: float
    """Time of the same GEMMs by cuBLAS, in the same run."""
    verified: bool
    """Whether the results were compared with those of the portable path."""
    kernels: str
    """Fingerprint of the kernel sources that were verified."""
    dsl: str
    """Version of the compiler that compiled them."""

    @property
    def beats_default(self) -> bool:
        """Whether it was faster than the default."""
        return self.ms < (1 - MIN_GAIN) * self.default_ms


Entries = Mapping[Key, Entry]
Rejected = tuple[str, str, Candidate]
"""Kernel, dtype and a candidate that cannot win."""
Rejections = Mapping[Rejected, str]
"""With the reasons."""


@dataclass(frozen=True)
class Table:
    """The contents of one file."""

    gpu: Gpu
    versions: Mapping[str, str]
    """Versions at the last change, among them those of `BUILD`, which rejections depend on."""
    entries: Entries = field(default_factory=dict)
    rejected: Rejections = field(default_factory=dict)

    def nearest(self, key: Key) -> tuple[float, Entry | None]:
        """Return distance and entry of the nearest verified key; (inf, None) if none is near."""
        found = [(key.distance(k), e) for k, e in self.entries.items() if e.verified]
        near = [pair for pair in found if pair[0] <= MAX_DISTANCE]
        return min(near, key=lambda pair: pair[0], default=(math.inf, None))

    def check_matches(self, gpu: Gpu) -> None:
        """Raise ValueError if the table was made on another kind of GPU."""
        self.check_arch(gpu)
        for name, got, expected in (
            ("device", self.gpu.name, gpu.name),
            ("num_sms", self.gpu.num_sms, gpu.num_sms),
        ):
            if got != expected:
                raise ValueError(f"{name}: got {got!r}, expected {expected!r}")

    def check_arch(self, gpu: Gpu) -> None:
        """Raise ValueError if the table was made on a GPU that executes other code."""
        got, expected = self.gpu.arch.name, gpu.arch.name
        if got != expected:
            raise ValueError(f"arch: got {got!r}, expected {expected!r}")

    def of_kernels(self, kernels: str) -> "Table":
        """Return the table without the entries of other kernel sources."""
        entries = {key: entry for key, entry in self.entries.items() if entry.kernels == kernels}
        return dataclasses.replace(self, entries=entries)

    def has_build_of(self, other: "Table") -> bool:
        """Whether both tables were last changed with the same kernel sources and compiler."""
        return all(self.versions[name] == other.versions[name] for name in BUILD)

    def check_build(self, other: "Table") -> None:
        """Raise ValueError unless both tables have the same kernel sources and compiler."""
        for name in BUILD:
            got, expected = self.versions[name], other.versions[name]
            if got != expected:
                raise ValueError(
                    f"{name}: got {got!r}, expected {expected!r}; first renew the table, "
                    "with: cutefce verify --table"
                )

    def updated_with(self, other: "Table") -> "Table":
        """Return a table with the contents of both; `other` replaces entries and versions.

        Rejected candidates lose their entries.  Rejections of other kernels or compilers than those
        of `other` are dropped.
        """
        rejected = {**(self.rejected if self.has_build_of(other) else {}), **other.rejected}
        both = dataclasses.replace(other, entries={**self.entries, **other.entries})
        return dataclasses.replace(both.without_rejected(rejected), rejected=rejected)

    def without_rejected(self, rejected: Rejections) -> "Table":
        """Return the table without the entries of rejected candidates."""
        entries = {
            key: entry
            for key, entry in self.entries.items()
            if key.rejects(entry.config) not in rejected
        }
        return dataclasses.replace(self, entries=entries)


def bucket(tokens: int) -> int:
    """Return the smallest power of 2, or three quarters of one, that is at least `tokens`."""
    power = 1 << max(tokens - 1, 0).bit_length()
    return power * 3 // 4 if 0 < tokens <= power * 3 // 4 else power


def merge(tables: Mapping[str, Table]) -> Table:
    """Merge tables, by name, of one kind of GPU, kernel sources and compiler, in any order.

    All rejections are kept, and no entry of a candidate that one of them rejects.
    Of two entries for a key the one of these kernel sources wins, then the verified one, then the
    faster one.

    Raises:
        ValueError: if a table is of another kind of GPU, or was last changed with other kernel
            sources or another compiler; names the table.
    """
    first = next(iter(tables.values()))
    for name, table in tables.items():
        try:
            table.check_matches(first.gpu)
            table.check_build(first)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error

    def rank(entry: Entry) -> tuple[bool, bool, float, str]:
        return entry.kernels != first.versions["kernels"], not entry.verified, entry.ms, repr(entry)

    every = (pair for table in tables.values() for pair in table.rejected.items())
    rejected = dict(sorted(every, key=repr))
    entries: dict[Key, Entry] = {}
    for table in tables.values():
        for key, entry in table.without_rejected(rejected).entries.items():
            entries[key] = min(entry, entries.get(key, entry), key=rank)
    common = set.intersection(*(set(table.versions.items()) for table in tables.values()))
    return Table(first.gpu, dict(sorted(common)), entries, rejected)
