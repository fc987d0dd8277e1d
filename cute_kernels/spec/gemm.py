"""Specs of the kernels that multiply matrices."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from cutefce.cute_kernels.config import GemmConfig
from cutefce.cute_kernels.spec.kernel import KernelSpec
from cutefce.cute_kernels.variant import IDENTITY, SUM_ONLY, LogitTransform, RowReductions


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

    WARPS: ClassVar[int] = 8
    """Warps of a thread block that run MMAs."""

    @property
    def packed(self) -> bool:
        """Whether it adds to packed sums, or to float32 ones of dW in the same way."""
        return self.low_bits is not None

    @property
    def has_targets(self) -> bool:
        """Whether it adds the targets' terms."""
        return self.wrt == "weight"

    def semaphore_count(self, clusters: int) -> int:
        """Return the size of its int32 semaphores on `clusters` clusters."""
        return 1 if self.final or self.packed else 1 + clusters * self.config.cluster * self.WARPS
