"""The kernels of divergences of two models' logits."""

from itertools import product

from cutefce.cute_kernels.arch.base import Arch
from cutefce.cute_kernels.spec import DivergenceRowsSpec


def divergence_kernels(arch: Arch, dtype: str) -> list[DivergenceRowsSpec]:
    """Return those of every form, with factors of `dtype` of no side, of one, and of both."""
    written = (None, dtype)
    forms = product((False, True), written, written)
    return [DivergenceRowsSpec(arch.name, *form) for form in forms]
