"""Architectures with kernels: limits, configurations and defaults."""

from cutefce.cute_kernels.arch.base import Arch
from cutefce.cute_kernels.arch.sm90 import Sm90
from cutefce.cute_kernels.arch.sm100 import Sm100

ARCHS: tuple[Arch, ...] = (Sm90(), Sm100(), Sm100("sm_103a", (10, 3)))
"""Every architecture with kernels."""


def arch_for(capability: tuple[int, int]) -> Arch | None:
    """Return the architecture of a compute capability; None if it has no kernels."""
    return next((arch for arch in ARCHS if arch.capability == capability), None)


def arch_named(name: str) -> Arch:
    """Return the architecture `name`."""
    for arch in ARCHS:
        if arch.name == name:
            return arch
    raise ValueError(f"arch: got {name!r}, expected one of {', '.join(a.name for a in ARCHS)}")
