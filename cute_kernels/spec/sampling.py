"""Specs of the kernels of sampled gradients."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from cutefce.cute_kernels.spec.kernel import KernelSpec

ROW_FACTOR, COLUMN_FACTOR = 0x9E3779B1, 0x85EBCA77
"""Odd factors of the numbers of a row and a column in the hash of an entry."""
MIX_FACTORS = 0x7FEB352D, 0x846CA68B
"""Those of its mixing function."""
HASH_BITS = 32


@dataclass(frozen=True)
class PrepareSamplesSpec(KernelSpec):
    """Thresholds, hashes and counters of the rows whose entries are sampled."""

    MODULE = "sampling.prepare_samples"
    step: Literal["estimate", "first", "again"]
    """Estimates of lse; what they give; or that of rows which are sampled again, with their lse."""


@dataclass(frozen=True)
class SortSamplesSpec(KernelSpec):
    """Sampled entries in the order of columns, with their values."""

    MODULE = "sampling.sort_samples"
    size: int
    """The most entries of a row; a power of 2."""
    softcap: bool = False
    """Whether values are times the derivative of tanh."""


@dataclass(frozen=True)
class ListSamplesSpec(KernelSpec):
    """The sampled entries of every class, and its targets, in the order of tokens."""

    MODULE = "sampling.list_samples"
    short: int = 256
    """The longest list that a warp orders: it compares every two entries."""
    table_rows: int = 8192
    """Rows of a table in shared memory, which orders longer lists; a multiple of 256."""


@dataclass(frozen=True)
class SparseRowsSpec(KernelSpec):
    """Sums of rows of a matrix, times the values of entries: dX or dW of sampled entries."""

    MODULE = "sampling.sparse_rows"
    dtype: str
    wrt: Literal["hidden", "weight"]
    """The operand that the gradient belongs to."""
    vectors: int = 1
    """Vectors of 8 elements of a lane; those of a warp are computed over all rows at a time."""
    loads: int = 4
    """Vectors of a lane that are loaded while as many are added; a multiple of `vectors`."""
    blocks: int = 1
    """Thread blocks of a multiprocessor that registers are limited for, if more than one."""

    long: int = 512
    """Entries beyond which all warps of a thread block share a sum."""
    out: str | None = None
    """Dtype of the result, None for `dtype`."""
    adds: bool = False
    """Whether to add to what is there; then rows without entries are not touched."""
    bias: bool = False
    """Whether to sum the values of classes, too: the gradient of a bias."""

    WARPS: ClassVar[int] = 8
    """Warps of a thread block."""

    @property
    def lists_per_warp(self) -> int:
        """Sums that a warp computes one after the other."""
        return 1 if self.wrt == "hidden" else 8
