"""Specs of the kernels of divergences."""

from dataclasses import dataclass, replace
from typing import ClassVar

from cutefce.cute_kernels.arch.base import Arch
from cutefce.cute_kernels.spec.gemm import ProjectExpSpec
from cutefce.cute_kernels.spec.kernel import KernelSpec


@dataclass(frozen=True)
class DivergenceRowsSpec(KernelSpec):
    """Rows of two models' logits to their log-sum-exps, divergences and factors.

    Of a KL divergence, a is the side whose probabilities it averages over; of others the sides a
    and b are student and teacher, or the other way round.
    """

    MODULE = "divergence.rows"
    form: str
    """Which divergence: "kl", "jsd" or "tv".  Total variation is summed whichever it is."""
    factors_a: bool
    factors_b: bool
    """Whether the factors of a and b are written."""
    threads: int
    """Threads of a block."""
    held: int
    """Vectors of each thread and side in shared memory: the first ones, or the stages of a ring."""
    sums_given: bool = False
    """Whether log-sum-exps come as partial sums of the GEMMs of logits."""

    BLOCKS: ClassVar[int] = 8
    """Thread blocks of a cluster, which has a row."""
    EXCHANGE: ClassVar[int] = 2 * 4 * BLOCKS
    """Numbers that the blocks of a cluster exchange."""

    @property
    def streams(self) -> bool:
        """Whether logits are read once, through a ring of stages."""
        return self.sums_given and not (self.factors_a or (self.factors_b and self.form != "kl"))


def divergence_rows(
    arch: str,
    form: str,
    factors_a: bool,
    factors_b: bool,
    sums_given: bool = False,
) -> DivergenceRowsSpec:
    """Return the kernel of a form.

    An SM has two blocks, which wait for memory, or more where it computes longer.
    """
    threads, held = (256, 5) if form == "jsd" else (512, 3 if sums_given else 6)
    spec = DivergenceRowsSpec(arch, form, factors_a, factors_b, threads, held, sums_given)
    return replace(spec, threads=256, held=4) if spec.streams else spec


def logits_kernel(arch: Arch, dtype: str) -> ProjectExpSpec | None:
    """Return the kernel of logits in float32; None for cuBLAS."""
    config = arch.logits_config
    if config is None:
        return None
    return ProjectExpSpec(arch.name, dtype, config, sums=True, store=True, logits=True)
