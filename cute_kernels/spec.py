"""Kernel specs: frozen descriptions of every kernel that can be compiled, which are its JIT keys.

This module does not import the DSL.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from cutefce.cute_kernels.config import GemmConfig
from cutefce.cute_kernels.integers import ceil_div
from cutefce.cute_kernels.variant import (
    IDENTITY,
    SUM_ONLY,
    LogitTransform,
    RowReductions,
)
from cutefce.cute_kernels.workspace import Coefficient, forward_semaphore_count


@dataclass(frozen=True)
class ProjectExpSpec:
    """Exponentials of the logits: their row sums, the exponentials themselves, or both.

    With softcap, what is stored is multiplied by the derivative of tanh; row sums are not.
    """

    arch: str
    dtype: str
    config: GemmConfig
    sums: bool
    """Whether to write row sums."""
    store: bool
    """Whether to store exponentials."""
    only_flagged: bool = False
    """Whether to skip row blocks without a repair flag."""
    transform: LogitTransform = IDENTITY
    reductions: RowReductions = SUM_ONLY


@dataclass(frozen=True)
class SelectRowsSpec:
    """The order of rows in which those that count come first, and their number."""

    arch: str


@dataclass(frozen=True)
class GatherRowsSpec:
    """out_i = x_{order_i} for the rows that count, or scale_i x_{order_i}."""

    arch: str
    dtype: str
    scales: bool = False
    """Whether rows are multiplied by a scale."""


@dataclass(frozen=True)
class ScatterRowsSpec:
    """out_{order_i} = x_i for the rows that count, 0 for the others."""

    arch: str
    dtype: str


@dataclass(frozen=True)
class ClearRowsSpec:
    """Zeros in the place of the rows that do not count."""

    arch: str
    dtype: str


@dataclass(frozen=True)
class TargetLogitSpec:
    """The targets' logits; also zeroes the semaphores of the kernels that follow."""

    arch: str
    dtype: str
    transform: LogitTransform = IDENTITY
    class_row: bool = False
    """Whether it also writes the products of the hidden states and a class row."""

    WARPS: ClassVar[int] = 8
    """Warps of a thread block, one a row."""

    def max_zeros(self, tokens: int) -> int:
        """Return the number of int32 zeros that its threads can write, one each."""
        return ceil_div(tokens, self.WARPS) * 32 * self.WARPS


@dataclass(frozen=True)
class ReducePartialsSpec:
    """Partial sums to row statistics and the loss; flags row blocks that need repair."""

    arch: str
    rows: int
    """Rows of a row block."""
    scatter: bool = False
    """Whether a vector says which token the statistics of each row are of."""
    terms: bool = False
    """Whether losses have terms beside the cross entropy, the same for all tokens."""
    class_row: bool = False
    """Whether these depend on class logits."""


@dataclass(frozen=True)
class FusedForwardSpec:
    """The forward without stored exponentials: its kernels launched by one host function."""

    arch: str
    dtype: str
    config: GemmConfig
    transform: LogitTransform = IDENTITY
    selects: bool = False
    """Whether it gathers the rows that count, and computes no others."""

    @property
    def target_logit(self) -> TargetLogitSpec:
        """The targets' logits."""
        return TargetLogitSpec(self.arch, self.dtype, self.transform)

    @property
    def row_sums(self) -> ProjectExpSpec:
        """The row sums of all columns."""
        kind = self.arch, self.dtype, self.config
        return ProjectExpSpec(*kind, sums=True, store=False, transform=self.transform)

    @property
    def reduce_partials(self) -> ReducePartialsSpec:
        """The last kernel."""
        return ReducePartialsSpec(self.arch, self.config.rows, scatter=self.selects)

    @property
    def select_rows(self) -> SelectRowsSpec:
        """The first kernel, if it selects."""
        return SelectRowsSpec(self.arch)

    @property
    def gather_rows(self) -> GatherRowsSpec:
        """The second kernel, if it selects."""
        return GatherRowsSpec(self.arch, self.dtype)

    def workspace_size(self, tokens: int, hidden: int, vocab_splits: int) -> int:
        """Return the size of the workspace between its kernels, in elements of 4 bytes."""
        semaphores: int = forward_semaphore_count(tokens, self.config.rows)
        size: int = tokens * (1 + vocab_splits * self.config.partials_per_row) + semaphores
        return size + int(self.selection_size(tokens, hidden)) * self.selects

    @staticmethod
    def selection_size(tokens: Any, hidden: Any) -> Any:
        """Return the part of it that the rows that count take: 16-bit h, two int64 a row, a count.

        Takes Python or device integers.
        """
        return tokens * hidden // 2 + 4 * tokens + 2


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
    """A chunk's sums of dX, kept as 16 bits and a byte; or dX, made of these in their memory."""

    arch: str
    dtype: str
    finishes: bool = False
    """Whether it makes dX."""
    rank_one: bool = False
    """Whether to add a matrix of rank one to dX; needs `finishes`."""


@dataclass(frozen=True)
class GradGemmSpec:
    """A gradient GEMM: exponentials times w, or transposed exponentials times hidden states."""

    arch: str
    dtype: str
    config: GemmConfig
    wrt: Literal["hidden", "weight"]
    """The operand that the gradient belongs to."""
    final: bool
    """Whether to add the targets' terms and round; otherwise it accumulates in float32."""
    rank_one: bool = False
    """Whether to add a matrix of rank one before rounding; needs `final`."""

    WARPS: ClassVar[int] = 8
    """Warps of a thread block that run MMAs."""

    def semaphore_count(self, clusters: int) -> int:
        """Return the size of its int32 semaphores on `clusters` clusters."""
        return 1 if self.final else 1 + clusters * self.config.cluster * self.WARPS


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


@dataclass(frozen=True)
class AddTargetsSpec:
    """Adds the targets' terms to the float32 sums of dW."""

    arch: str
    dtype: str


KernelSpec = (
    SelectRowsSpec
    | GatherRowsSpec
    | ScatterRowsSpec
    | ClearRowsSpec
    | ProjectExpSpec
    | GradGemmSpec
    | TargetLogitSpec
    | ReducePartialsSpec
    | FusedForwardSpec
    | ScaleAddRowsSpec
    | KeptSumsSpec
    | RowCoefficientsSpec
    | SortTargetsSpec
    | AddTargetsSpec
)
