"""Specs of host functions that launch several kernels."""

from dataclasses import dataclass, replace
from typing import Any

from cutefce.cute_kernels.config import GemmConfig
from cutefce.cute_kernels.spec.gemm import GradGemmSpec, ProjectExpSpec
from cutefce.cute_kernels.spec.rowwise import (
    GatherRowsSpec,
    KeptSumsSpec,
    ReducePartialsSpec,
    RowCoefficientsSpec,
    ScaleAddRowsSpec,
    ScaleKeptSpec,
    SelectRowsSpec,
    SortTargetsSpec,
    TargetLogitSpec,
)
from cutefce.cute_kernels.variant import IDENTITY, LogitTransform
from cutefce.cute_kernels.workspace import (
    SPLIT_K_COUNTERS,
    forward_semaphore_count,
    low_bytes,
)


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
    """Whether it stores exponentials, of windows, and the order of rows, for a backward."""

    @property
    def target_logit(self) -> TargetLogitSpec:
        """The targets' logits."""
        return TargetLogitSpec(self.arch, self.dtype, self.transform)

    @property
    def project_exp(self) -> ProjectExpSpec:
        """The row sums of all columns or of a window, whose exponentials it may store."""
        kind = self.arch, self.dtype, self.config
        return ProjectExpSpec(*kind, sums=True, store=self.stores, transform=self.transform)

    @property
    def reduce_partials(self) -> ReducePartialsSpec:
        """The statistics: of all tokens, or for a backward in the order of rows."""
        scatter = self.selects and not self.stores
        return ReducePartialsSpec(self.arch, self.config.rows, scatter=scatter)

    @property
    def repair_exps(self) -> ProjectExpSpec:
        """The last kernel of each window, if it stores exponentials."""
        return replace(self.project_exp, sums=False, only_flagged=True)

    @property
    def select_rows(self) -> SelectRowsSpec:
        """The first kernel, if it selects."""
        return SelectRowsSpec(self.arch)

    @property
    def gather_rows(self) -> GatherRowsSpec:
        """The second kernel, if it selects."""
        return GatherRowsSpec(self.arch, self.dtype)

    def workspace_size(self, tokens: int, hidden: int, vocab_splits: int, windows: int = 1) -> int:
        """Return the size of the workspace between its kernels, in elements of 4 bytes.

        `vocab_splits` are those of all windows that it stores.
        """
        size: int = tokens * (1 + vocab_splits * self.config.partials_per_row)
        return size + int(self.selection_size(tokens, hidden)) + self.zeros(tokens, windows)

    def zeros(self, tokens: int, windows: int) -> int:
        """Return the number of semaphores, which `target_logit` sets to 0."""
        return windows * int(self.semaphore_pitch(tokens))

    def semaphore_pitch(self, tokens: Any) -> Any:
        """Return the semaphores of a window, whole lines: takes Python or device integers."""
        return whole_lines(forward_semaphore_count(tokens, self.config.rows))

    def selection_size(self, tokens: Any, hidden: Any) -> Any:
        """Return the part of it that the rows that count take: 16-bit h, two int64 a row, a count.

        Their order is not in the workspace if it is stored.  Takes Python or device integers.
        """
        if not self.selects:
            return 0
        return tokens * hidden // 2 + (0 if self.stores else 4 * tokens + 2)


@dataclass(frozen=True)
class FusedBackwardSpec:
    """A backward over windows, with exponentials stored or computed again, in one host function.

    Sums of dX over all columns may be given.
    """

    arch: str
    dtype: str
    config: GemmConfig
    """That of dW."""
    hidden_config: GemmConfig
    """That of dX's sums, over many columns."""
    short_config: GemmConfig
    """The same over few."""
    exps_config: GemmConfig
    """That of exponentials computed again."""
    selects: bool = False
    """Whether the rows that count come first, in an order that the forward has stored."""
    hidden_bits: int | None = None
    """Bits of each of dX's sums beside 16; None for float32."""

    @property
    def row_coefficients(self) -> RowCoefficientsSpec:
        """The first kernel, if exponentials that are computed again are those of the forward."""
        return RowCoefficientsSpec(self.arch)

    @property
    def probability_coefficients(self) -> RowCoefficientsSpec:
        """The first kernel, if they are probabilities."""
        return RowCoefficientsSpec(self.arch, in_reference=True)

    @property
    def scale_rows(self) -> GatherRowsSpec | ScaleAddRowsSpec:
        """The second: hidden states times their factors in dW."""
        if self.selects:
            return replace(self.gather_rows, scales=True)
        return ScaleAddRowsSpec(self.arch, self.dtype, self.dtype)

    @property
    def gather_rows(self) -> GatherRowsSpec:
        """The rows that count, if it selects and computes exponentials again.

        It runs third, or before the first window of probabilities.
        """
        return GatherRowsSpec(self.arch, self.dtype)

    @property
    def sort_targets(self) -> SortTargetsSpec:
        """The next."""
        return SortTargetsSpec(self.arch)

    @property
    def exps(self) -> ProjectExpSpec:
        """The first of a window whose exponentials are computed again."""
        return ProjectExpSpec(self.arch, self.dtype, self.exps_config, sums=False, store=True)

    @property
    def grad_hidden(self) -> GradGemmSpec:
        """The second of a window of many columns, or of any if sums are kept: dX's sums."""
        kind = self.arch, self.dtype, self.hidden_config
        return GradGemmSpec(*kind, "hidden", final=False, low_bits=self.hidden_bits)

    @property
    def grad_hidden_short(self) -> GradGemmSpec:
        """The second of a window of few."""
        return replace(self.grad_hidden, config=self.short_config)

    @property
    def scale_sums(self) -> ScaleAddRowsSpec | ScaleKeptSpec:
        """What multiplies dX's sums before the first window of probabilities."""
        if self.hidden_bits is None:
            return ScaleAddRowsSpec(self.arch, "float32", "float32")
        return ScaleKeptSpec(self.arch, self.dtype, self.hidden_bits, by_rows=True)

    @property
    def grad_weight(self) -> GradGemmSpec:
        """The last of a window: its rows of dW."""
        return GradGemmSpec(self.arch, self.dtype, self.config, "weight", final=True)

    @property
    def finish_dx(self) -> ScaleAddRowsSpec | KeptSumsSpec:
        """The last: dX."""
        if self.hidden_bits is None:
            return ScaleAddRowsSpec(self.arch, self.dtype, "float32", self.dtype)
        return KeptSumsSpec(self.arch, self.dtype, self.hidden_bits, finishes=True)

    def workspace_size(
        self,
        sizes: tuple[int, int, int],
        windows: int,
        num_sms: int,
        buffer_columns: int,
        gathers: bool,
    ) -> int:
        """Return the size of the workspace between its kernels, in elements of 4 bytes.

        It holds dX's sums; the rows that count, if it selects and `gathers` them beside scaled
        ones; a buffer for `buffer_columns` of 16-bit exponentials; the semaphores of `windows`; the
        tokens by target, the coefficients of each and one in that order; where the tokens of each
        target begin; and the factor of dW.  `sizes` are (N, D, V).
        """
        tokens, hidden, vocab = sizes
        size = int(self.sums_size(tokens, hidden))
        size += int(self.gathered_size(tokens, hidden, int(gathers)))
        *_, semaphores = self.semaphore_places(tokens, num_sms)
        size += tokens * buffer_columns // 2 + windows * int(semaphores)
        return size + (3 + self.probability_coefficients.planes) * tokens + vocab + 2

    def sums_size(self, tokens: Any, hidden: Any) -> Any:
        """Return the part that dX's sums take: takes Python or device integers.

        Of kept ones, the upper halves come before the low bits.
        """
        if self.hidden_bits is None:
            return tokens * hidden
        return tokens * hidden // 2 + tokens * low_bytes(hidden, self.hidden_bits) // 4

    def gathered_size(self, tokens: Any, hidden: Any, gathers: Any) -> Any:
        """Return the part that the rows that count take: takes Python or device integers."""
        return tokens * hidden // 2 * gathers if self.selects else 0

    def semaphore_places(self, tokens: Any, num_sms: Any) -> tuple[Any, Any, Any]:
        """Return where a window's semaphores for dX and dW begin, behind those for exponentials.

        The third number is their count.  Takes Python or device integers.
        """
        of_exps = whole_lines(forward_semaphore_count(tokens, self.exps_config.rows))
        of_dx = whole_lines(SPLIT_K_COUNTERS + num_sms * GradGemmSpec.WARPS)
        of_dw = whole_lines(1)
        return of_exps, of_exps + of_dx, of_exps + of_dx + of_dw


LINE = 32
"""Elements of 4 bytes in a line of memory."""


def whole_lines(count: Any) -> Any:
    """Return `count` rounded up to whole lines: takes Python or device integers."""
    return (count + LINE - 1) // LINE * LINE
