"""Tuned tables: the configuration that won for each problem on one GPU model.

A table is a JSON file with one entry a line (spread over several here):

    {"schema": 4, "device": "NVIDIA H200", "num_sms": 132, "arch": "sm_90a",
     "versions": {"kernels": "0123456789abcdef", "nvidia-cutlass-dsl": "4.8.1", ...},
     "entries": [
      {"kernel": "project_exp", "dtype": "bfloat16", "hidden": 4096, "vocab": 131072,
       "tokens": 8192, "config": {"tile_m": 128, ...}, "ms": 12.5, "default_ms": 13.0}]}

`tokens` is a bucket: a power of 2 or three quarters of one, which covers all token counts above the
next smaller bucket.  A `config` is one of `candidates`; null selects the cuBLAS GEMM.
All kernels for the dtypes of the entries passed verification with the kernel sources and the
compiler of `versions`.  With others, an entry is still the best guess of what is fast, but no proof
that the kernels are right.  `cutefce tune` measures the times; `cutefce verify --table` renews the
versions.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from cutefce.cute_kernels.arch.base import Arch, Gpu
from cutefce.cute_kernels.config import GemmConfig
from cutefce.cute_kernels.problem import Problem

TUNED = "project_exp", "grad_hidden", "grad_weight"
"""Fields of `KernelConfigs` that are tuned."""
DSL_PACKAGE = "nvidia-cutlass-dsl"
"""Package of the kernels' compiler."""
BUILD = "kernels", DSL_PACKAGE
"""Versions that the proof of a table depends on."""

Candidate = GemmConfig | None
"""A configuration, or None for the cuBLAS GEMM."""


def candidates(arch: Arch, kernel: str) -> tuple[Candidate, ...]:
    """Return what may win for a tuned kernel: what the architecture lists, and verification covers.

    There are none for a kernel that the architecture does not have.
    """
    configs = arch.listed.get(kernel, ())
    return (None, *configs) if configs and kernel == "grad_hidden" else configs


@dataclass(frozen=True, order=True)
class Key:
    """One tuned kernel and problem."""

    kernel: str
    dtype: str
    hidden: int
    vocab: int
    tokens: int


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


@dataclass(frozen=True)
class Table:
    """The contents of one file."""

    gpu: Gpu
    versions: Mapping[str, str]
    """Versions with which the kernels were verified, those of `BUILD` among them."""
    entries: Mapping[Key, Entry] = field(default_factory=dict)
    left_out: int = field(default=0, compare=False)
    """How many entries a file has whose configuration is none of `candidates`."""

    @property
    def build(self) -> dict[str, str | None]:
        """The kernel sources and the compiler that it proves; None where merged tables differ."""
        return {name: self.versions.get(name) for name in BUILD}

    @property
    def dtypes(self) -> list[str]:
        """Dtypes of the entries."""
        return sorted({key.dtype for key in self.entries})


def bucket(tokens: int) -> int:
    """Return the smallest power of 2, or three quarters of one, that is at least `tokens`."""
    power = 1 << max(tokens - 1, 0).bit_length()
    return power * 3 // 4 if 0 < tokens <= power * 3 // 4 else power


def merge(tables: Sequence[Table]) -> Table:
    """Merge tables of one kind of GPU, in any order.

    Of two entries for a key the faster one wins.  Versions that differ are left out, and with them
    the proof of the kernels.
    """
    entries: dict[Key, Entry] = {}
    for table in tables:
        for key, entry in table.entries.items():
            entries[key] = min(entry, entries.get(key, entry), key=lambda e: (e.ms, repr(e)))
    common = set.intersection(*(set(table.versions.items()) for table in tables))
    return Table(tables[0].gpu, dict(sorted(common)), entries)
