"""Specs of the kernels of divergences."""

from dataclasses import dataclass
from itertools import product
from typing import ClassVar

from cutefce.cute_kernels.arch.base import Arch
from cutefce.cute_kernels.spec.gemm import LogitsSpec


@dataclass(frozen=True)
class DivergenceRowsSpec:
    """Rows of two models' logits to their log-sum-exps, divergences and factors.

    Of a JSD the sides a and b are student and teacher; of a KL divergence, a is the side whose
    probabilities it averages over.
    """

    arch: str
    mixture: bool
    """Whether the divergences are those from the mixture of both."""
    factors_a: str | None
    factors_b: str | None
    """Dtypes of the factors of a and b; None if they are not written."""
    threads: int
    """Threads of a block."""
    held: int
    """Vectors of each thread and side that are held in shared memory."""

    BLOCKS: ClassVar[int] = 8
    """Thread blocks of a cluster, which has a row."""
    EXCHANGE: ClassVar[int] = 2 * 4 * BLOCKS
    """Numbers that the blocks of a cluster exchange."""


def divergence_rows(
    arch: str, mixture: bool, factors_a: str | None, factors_b: str | None
) -> DivergenceRowsSpec:
    """Return the kernel of a form.

    An SM has two blocks, which wait for memory, or four of a JSD, which computes longer.
    """
    threads, held = (256, 5) if mixture else (512, 6)
    return DivergenceRowsSpec(arch, mixture, factors_a, factors_b, threads, held)


def divergence_kernels(arch: Arch, dtype: str) -> list[DivergenceRowsSpec | LogitsSpec]:
    """Return those of every form, with factors of `dtype` of no side, of one, and of both.

    That of logits is the last one, if there is one.
    """
    forms = product((False, True), (None, dtype), (None, dtype))
    logits = logits_kernel(arch, dtype)
    return [*(divergence_rows(arch.name, *form) for form in forms), *([logits] if logits else [])]


def logits_kernel(arch: Arch, dtype: str) -> LogitsSpec | None:
    """Return the kernel of logits in float32; None for cuBLAS."""
    config = arch.logits_config
    return None if config is None else LogitsSpec(arch.name, dtype, config)
