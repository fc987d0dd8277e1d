"""The GPU model that configurations and verification results depend on."""

from dataclasses import dataclass

from cutefce.cute_kernels.arch.base import Arch
from cutefce.cute_kernels.config import KernelConfigs


@dataclass(frozen=True)
class Gpu:
    """A GPU model with kernels."""

    arch: Arch
    name: str
    """The model as torch names it, "NVIDIA H200"."""
    num_sms: int
    """Streaming multiprocessors."""

    def default_configs(self, tokens: int, hidden: int) -> KernelConfigs:
        """Return the configurations of all kernels if nothing was tuned."""
        return self.arch.default_configs(tokens, hidden, self.num_sms, self.name)
