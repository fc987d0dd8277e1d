"""The interface of an architecture: limits, configurations and defaults; and the model of a GPU."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from cutefce.cute_kernels.config import GemmConfig, KernelConfigs

TILE_K = 64
"""Inner dimension of one stage: 128 bytes of a 16-bit dtype, the widest swizzle of TMA."""
BARRIER_BYTES = 1024
"""Shared memory before the first tile, including its alignment."""


@dataclass(frozen=True)
class Arch(ABC):
    """An architecture's answers to the questions that hosts, tuner and kernels ask."""

    listed: ClassVar[Mapping[str, tuple[GemmConfig, ...]]]
    """All configurations of the kernels that it has, by field of `KernelConfigs`: what is compiled
    ahead, verified and chosen from.  Repairs have the first of `exps`."""
    logits_config: ClassVar[GemmConfig | None] = None
    """Configuration of the GEMM of logits in float32; None for cuBLAS."""
    smem_bytes: ClassVar[int] = 227 << 10
    dtypes: ClassVar[tuple[str, ...]] = ("bfloat16", "float16")

    name: str
    capability: tuple[int, int]
    family: str
    """Folder of the kernels for this architecture."""

    @abstractmethod
    def default_configs(
        self, tokens: int, hidden: int, num_sms: int, model: str = ""
    ) -> KernelConfigs:
        """Return the default configurations of all kernels on a GPU model, as torch names it."""


@dataclass(frozen=True)
class Gpu:
    """A GPU model with kernels, which configurations and verification results depend on."""

    arch: Arch
    name: str
    """The model as torch names it, "NVIDIA H200"."""
    num_sms: int
    """Streaming multiprocessors."""

    def default_configs(self, tokens: int, hidden: int) -> KernelConfigs:
        """Return the configurations of all kernels if nothing was tuned."""
        return self.arch.default_configs(tokens, hidden, self.num_sms, self.name)
