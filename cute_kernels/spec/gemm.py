"""Specs of the kernels that multiply matrices."""

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from cutefce.cute_kernels.config import GemmConfig
from cutefce.cute_kernels.integers import ceil_div
from cutefce.cute_kernels.spec.kernel import KernelSpec
from cutefce.cute_kernels.variant import IDENTITY, SUM_ONLY, LogitTransform, RowReductions

SCALING_RASTER_GROUP = 4
"""Row blocks whose products are computed together where exponentials are scaled behind them: those
of the last group have no products beside them."""


@dataclass(frozen=True)
class ProjectExpSpec(KernelSpec):
    """Exponentials of the logits: their row sums, the exponentials themselves, or both.

    With softcap, what is stored is multiplied by the derivative of tanh; row sums are not.
    """

    MODULE = "{family}.project_exp"
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
    samples: bool = False
    """Whether to sample entries of the softmax; needs `sums`."""
    logits: bool = False
    """Whether to store logits in float32 in the place of exponentials; there are no targets."""


@dataclass(frozen=True)
class GradGemmSpec(KernelSpec):
    """A gradient GEMM: exponentials times w, or transposed exponentials times hidden states."""

    MODULE = "{family}.gradient"
    dtype: str
    config: GemmConfig
    wrt: Literal["hidden", "weight"]
    """The operand that the gradient belongs to."""
    final: bool
    """Whether to round once; otherwise it adds to sums."""
    rank_one: bool = False
    """Whether to add a matrix of rank one to dW."""
    low_bits: int | None = None
    """Bits beside the upper 16 of the sums that it loads, adds to and stores: 4 or 8, or of dW
    `FLOAT32_LOW_BITS`.  None if `final`, and of float32 sums of dX, to which
    TMA adds in memory."""
    scales: bool = False
    """Whether it multiplies exponentials by factors of tokens once all products have read them."""

    WARPS: ClassVar[int] = 8
    """Warps of a thread block that run MMAs."""

    @property
    def kept(self) -> bool:
        """Whether it adds to kept sums."""
        return self.low_bits is not None

    @property
    def has_targets(self) -> bool:
        """Whether it adds the targets' terms."""
        return self.wrt == "weight"

    @property
    def scaling(self) -> "GradGemmSpec":
        """The same that also multiplies exponentials."""
        config = replace(self.config, raster_group=SCALING_RASTER_GROUP)
        return replace(self, config=config, scales=True)

    def semaphore_count(self, clusters: int, rows: int = 0) -> int:
        """Return the size of its int32 semaphores on `clusters` clusters, and for `rows` of dX."""
        count = 1 if self.final or self.kept else 1 + clusters * self.config.cluster * self.WARPS
        return count + ceil_div(rows, self.config.rows) * self.scales
