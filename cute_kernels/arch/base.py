"""The interface of an architecture: limits, configurations to choose from, and the defaults."""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from cutefce.cute_kernels.config import GemmConfig, KernelConfigs

TILE_K = 64
"""Inner dimension of one stage: 128 bytes of a 16-bit dtype, the widest swizzle of TMA."""
BARRIER_BYTES = 1024
"""Shared memory before the first tile, including its alignment."""


def epi_tile_columns(tile_n: int, item_bytes: int) -> int:
    """Return the columns that a warp stores at a time: at most a swizzle of 128 bytes."""
    return math.gcd(tile_n, 128 // item_bytes)


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
    def default(self, tokens: int) -> GemmConfig:
        """Return the default configuration of `project_exp` for `tokens` rows."""

    @abstractmethod
    def default_configs(
        self, tokens: int, hidden: int, num_sms: int, model: str = ""
    ) -> KernelConfigs:
        """Return the default configurations of all kernels on a GPU model, as torch names it."""

    @abstractmethod
    def stage_bytes(self, config: GemmConfig) -> int:
        """Return the shared memory of one stage."""
