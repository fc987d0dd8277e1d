"""Specs of the row-wise kernels."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from cutefce.cute_kernels.integers import ceil_div
from cutefce.cute_kernels.spec.kernel import KernelSpec
from cutefce.cute_kernels.variant import IDENTITY, LogitTransform
from cutefce.cute_kernels.workspace import Coefficient

OUT_AND_SUMS = 2
"""Says that packed sums are in the places of the rows of dX that are made of them."""


PackedStep = Literal["pack", "finish", "scale", "round"]


@dataclass(frozen=True)
class SelectRowsSpec(KernelSpec):
    """The order of rows in which those that count come first, and their number."""

    MODULE = "rowwise.select_rows"


@dataclass(frozen=True)
class MoveRowsSpec(KernelSpec):
    """Rows that count to their places, and zeros for the others."""

    MODULE = "rowwise.move_rows"
    dtype: str | None = None
    """Dtype of rows that are multiplied by a scale; None if they are copied, 16 bits at a time."""
    orders: bool = True
    """Whether there is an order of rows; otherwise all rows count, and keep their places."""


@dataclass(frozen=True)
class TargetLogitSpec(KernelSpec):
    """The targets' logits; also zeroes the semaphores of the kernels that follow."""

    MODULE = "rowwise.target_logit"
    dtype: str
    transform: LogitTransform = IDENTITY
    class_row: bool = False
    """Whether it also writes the products of the hidden states and a class row."""

    WARPS: ClassVar[int] = 8
    """Warps of a thread block; one or more have a row."""

    def max_zeros(self, tokens: int) -> int:
        """Return the number of int32 zeros that its threads can write, one each."""
        return ceil_div(tokens, self.WARPS) * 32 * self.WARPS


@dataclass(frozen=True)
class SoftLogitsSpec(KernelSpec):
    """The logits of the soft targets of each token."""

    MODULE = "soft_targets.soft_logits"
    dtype: str


@dataclass(frozen=True)
class PutSoftSpec(KernelSpec):
    """Entries of soft targets in the place of stored exponentials."""

    MODULE = "soft_targets.put_soft"
    dtype: str
    scales: bool = False
    """Whether exponentials and entries are multiplied by factors of tokens."""


@dataclass(frozen=True)
class ReducePartialsSpec(KernelSpec):
    """Partial sums to row statistics and the loss; flags row blocks that need repair."""

    MODULE = "rowwise.reduce_partials"
    rows: int
    """Rows of a row block of what repairs."""


@dataclass(frozen=True)
class ScaleAddRowsSpec(KernelSpec):
    """out_i = row_scale_i x_i + gather_scale_i table_{index_i}: dX's last step.

    With `rank_one`, factor_i row is added.
    """

    MODULE = "rowwise.scale_add_rows"
    out: str
    """Dtype of the result."""
    x: str
    """Dtype of x."""
    table: str
    """Dtype of the table."""
    rank_one: bool = False
    """Whether to add a matrix of rank one."""


@dataclass(frozen=True)
class PackedSumsSpec(KernelSpec):
    """Sums that are packed in 24 or 20 bits, or what is made of such sums.

    pack          a chunk's sums of dX
    finish        dX
    scale         sums of dX times factors of rows, which remain packed
    round         dW, sums times a factor, in their memory
    """

    MODULE = "rowwise.packed_sums"
    dtype: str
    low_bits: int
    """Bits of a sum beside the upper 16."""
    step: PackedStep
    rank_one: bool = False
    """Whether to add a matrix of rank one to dX."""


@dataclass(frozen=True)
class RowCoefficientsSpec(KernelSpec):
    """Factors of the rows of dX and of h in dW; also zeroes semaphores."""

    MODULE = "rowwise.row_coefficients"
    in_reference: bool = False
    """Whether references contain the factors, so that exponentials are probabilities."""
    narrow: bool = False
    """Whether values are float16, which holds no factors below 2^-24."""

    THREADS: ClassVar[int] = 1024
    """Tokens of a thread block, which may read those of all."""

    @property
    def planes(self) -> int:
        """Rows of its result, see `workspace.Coefficient`."""
        if self.in_reference:
            return len(Coefficient)
        return Coefficient.REFERENCE if self.narrow else Coefficient.DW_SCALE


@dataclass(frozen=True)
class SortTargetsSpec(KernelSpec):
    """The tokens of every class, and their coefficients, one class after the other."""

    MODULE = "rowwise.sort_targets"
