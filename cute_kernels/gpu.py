"""One GPU model that has kernels."""

from dataclasses import dataclass

from cutefce.cute_kernels.arch.base import Arch


@dataclass(frozen=True)
class Gpu:
    """What a configuration and a verdict depend on."""

    arch: Arch
    name: str
    """As torch names the model, "NVIDIA H200"."""
    num_sms: int
    """Streaming multiprocessors."""
