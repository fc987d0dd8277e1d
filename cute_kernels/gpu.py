"""The GPU model that configurations and verification results depend on."""

from dataclasses import dataclass

from cutefce.cute_kernels.arch.base import Arch


@dataclass(frozen=True)
class Gpu:
    """A GPU model with kernels."""

    arch: Arch
    name: str
    """The model as torch names it, "NVIDIA H200"."""
    num_sms: int
    """Streaming multiprocessors."""
