"""Specs of the row-wise kernels."""

from dataclasses import dataclass
from typing import ClassVar

from cutefce.cute_kernels.integers import ceil_div
from cutefce.cute_kernels.workspace import Coefficient

OUT_AND_SUMS = 2
"""Says that kept sums are in the places of the rows of dX that are made of them."""


@dataclass(frozen=True)
class SelectRowsSpec:
    """The order of rows in which those that count come first, and their number."""

    arch: str


@dataclass(frozen=True)
class GatherRowsSpec:
    """out_i = x_{order_i} for the rows that count, or scale_i x_{order_i}."""

    arch: str
    dtype: str | None = None
    """Dtype of rows that are multiplied by a scale; None if they are copied, 16 bits at a time."""


@dataclass(frozen=True)
class ScatterRowsSpec:
    """out_{order_i} = x_i for the rows that count, 0 for the others; 16 bits at a time."""

    arch: str


@dataclass(frozen=True)
class ClearRowsSpec:
    """Zeros in the place of the rows that do not count; 16 bits at a time."""

    arch: str


@dataclass(frozen=True)
class TargetLogitSpec:
    """The targets' logits; also zeroes the semaphores of the kernels that follow."""

    arch: str
    dtype: str
    transforms: bool = False
    """Whether it transforms them; the launch says how."""
    class_row: bool = False
    """Whether it also writes the products of the hidden states and a class row."""

    WARPS: ClassVar[int] = 8
    """Warps of a thread block; one or more have a row."""

    def max_zeros(self, tokens: int) -> int:
        """Return the number of int32 zeros that its threads can write, one each."""
        return ceil_div(tokens, self.WARPS) * 32 * self.WARPS


@dataclass(frozen=True)
class SoftLeadsSpec:
    """The class of the largest probability of each token's soft targets."""

    arch: str


@dataclass(frozen=True)
class PrepareSoftSpec:
    """The soft targets of each token but its lead, ascending, with their coefficients."""

    arch: str

    MAX_CLASSES: ClassVar[int] = 256
    """The most classes of a token."""


@dataclass(frozen=True)
class SoftLogitsSpec:
    """The logits of the soft targets of each token."""

    arch: str
    dtype: str


@dataclass(frozen=True)
class PutSoftSpec:
    """Entries of soft targets in the place of stored exponentials."""

    arch: str
    dtype: str


@dataclass(frozen=True)
class ScaleSoftSpec:
    """Exponentials times factors of tokens, with entries of soft targets."""

    arch: str
    dtype: str


@dataclass(frozen=True)
class ReducePartialsSpec:
    """Partial sums to row statistics and the loss; flags row blocks that need repair."""

    arch: str
    rows: int
    """Rows of a row block of what repairs."""
    terms: bool = False
    """Whether losses have terms beside the cross entropy, the same for all tokens."""
    class_row: bool = False
    """Whether these depend on class logits."""


@dataclass(frozen=True)
class ScaleAddRowsSpec:
    """out_i = row_scale_i x_i + gather_scale_i table_{index_i}: s ⊙ h, and dX's last step.

    With `rank_one`, factor_i row is added.
    """

    arch: str
    out: str
    """Dtype of the result."""
    x: str
    """Dtype of x."""
    table: str | None = None
    """Dtype of the table; None without the second term."""
    rank_one: bool = False
    """Whether to add a matrix of rank one; needs a table."""


@dataclass(frozen=True)
class KeptSumsSpec:
    """A chunk's sums of dX, kept in 24 or 20 bits; or dX, made of such sums."""

    arch: str
    dtype: str
    low_bits: int
    """Bits of a sum beside the upper 16."""
    finishes: bool = False
    """Whether it makes dX."""
    rank_one: bool = False
    """Whether to add a matrix of rank one to dX; needs `finishes`."""


@dataclass(frozen=True)
class ScaleKeptSpec:
    """Kept sums times a factor, in their memory: dW, rounded; or sums of dX, which remain kept."""

    arch: str
    dtype: str
    low_bits: int
    """Bits of a sum beside the upper 16."""
    by_rows: bool = False
    """Whether each row has a factor of its own, and what it gives is kept in as many bits."""


@dataclass(frozen=True)
class RowCoefficientsSpec:
    """Factors of the rows of dX and of h in dW; also zeroes semaphores."""

    arch: str
    in_reference: bool = False
    """Whether references contain the factors, so that exponentials are probabilities."""
    narrow: bool = False
    """Whether values are float16, which holds no factors below 2^-24."""
    terms: bool = False
    """Whether losses have terms beside the cross entropy, the same for all tokens."""

    THREADS: ClassVar[int] = 1024
    """Tokens of a thread block, which may read those of all."""

    @property
    def planes(self) -> int:
        """Rows of its result, see `workspace.Coefficient`."""
        if self.in_reference:
            return len(Coefficient)
        return Coefficient.REFERENCE if self.narrow else Coefficient.DW_SCALE


@dataclass(frozen=True)
class SortTargetsSpec:
    """The tokens of every class, and their coefficients, one class after the other."""

    arch: str
