"""Specs of host functions that launch several kernels."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from cutefce.cute_kernels.config import GemmConfig
from cutefce.cute_kernels.spec.gemm import GradGemmSpec, ProjectExpSpec
from cutefce.cute_kernels.spec.rowwise import (
    GatherRowsSpec,
    ReducePartialsSpec,
    RowCoefficientsSpec,
    ScaleAddRowsSpec,
    SelectRowsSpec,
    SortTargetsSpec,
    TargetLogitSpec,
)
from cutefce.cute_kernels.variant import IDENTITY, LogitTransform
from cutefce.cute_kernels.workspace import forward_semaphore_count


@dataclass(frozen=True)
class FusedForwardSpec:
    """A forward whose kernels are launched by one host function."""

    arch: str
    dtype: str
    config: GemmConfig
    transform: LogitTransform = IDENTITY
    selects: bool = False
    """Whether it gathers the rows that count, and computes no others."""
    stores: bool = False
    """Whether it stores all exponentials, and the order of rows, for a backward."""

    @property
    def target_logit(self) -> TargetLogitSpec:
        """The targets' logits."""
        return TargetLogitSpec(self.arch, self.dtype, self.transform)

    @property
    def project_exp(self) -> ProjectExpSpec:
        """The row sums of all columns, with the exponentials if it stores them."""
        kind = self.arch, self.dtype, self.config
        return ProjectExpSpec(*kind, sums=True, store=self.stores, transform=self.transform)

    @property
    def reduce_partials(self) -> ReducePartialsSpec:
        """The statistics: of all tokens, or for a backward in the order of rows."""
        scatter = self.selects and not self.stores
        return ReducePartialsSpec(self.arch, self.config.rows, scatter=scatter)

    @property
    def repair_exps(self) -> ProjectExpSpec:
        """The last kernel, if it stores exponentials."""
        return replace(self.project_exp, sums=False, only_flagged=True)

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
        return size + int(self.selection_size(tokens, hidden))

    def selection_size(self, tokens: Any, hidden: Any) -> Any:
        """Return the part of it that the rows that count take: 16-bit h, two int64 a row, a count.

        Their order is not in the workspace if it is stored.  Takes Python or device integers.
        """
        if not self.selects:
            return 0
        return tokens * hidden // 2 + (0 if self.stores else 4 * tokens + 2)


@dataclass(frozen=True)
class FusedBackwardSpec:
    """What a backward does with all exponentials stored, and the sums of dX, in one host function.

    It computes the rows' coefficients, dW, and dX of its sums.
    """

    arch: str
    dtype: str
    config: GemmConfig
    """That of dW."""
    selects: bool = False
    """Whether the rows that count come first, in an order that the forward has stored."""

    @property
    def row_coefficients(self) -> RowCoefficientsSpec:
        """The first kernel."""
        return RowCoefficientsSpec(self.arch)

    @property
    def scale_rows(self) -> GatherRowsSpec | ScaleAddRowsSpec:
        """The second: hidden states times their factors in dW."""
        if self.selects:
            return GatherRowsSpec(self.arch, self.dtype, scales=True)
        return ScaleAddRowsSpec(self.arch, self.dtype, self.dtype)

    @property
    def sort_targets(self) -> SortTargetsSpec:
        """The third."""
        return SortTargetsSpec(self.arch)

    @property
    def grad_weight(self) -> GradGemmSpec:
        """The fourth: dW."""
        return GradGemmSpec(self.arch, self.dtype, self.config, "weight", final=True)

    @property
    def finish_dx(self) -> ScaleAddRowsSpec:
        """The last: dX."""
        return ScaleAddRowsSpec(self.arch, self.dtype, "float32", self.dtype)

    LINE: ClassVar[int] = 32
    """Elements of 4 bytes in a line of memory."""

    def workspace_size(self, tokens: int, vocab: int) -> int:
        """Return the size of the workspace between its kernels, in elements of 4 bytes.

        It holds the tokens by target, three coefficients of each and one in that order, where the
        tokens of each target begin, the factor of dW, and a line of semaphores.
        """
        return 6 * tokens + vocab + 2 + self.LINE
