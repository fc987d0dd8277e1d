"""What an architecture can run: limits, the configurations to choose from, and the default."""

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from cutefce.cute_kernels.config import GemmConfig, KernelConfigs

STEP = 64
"""Hidden features of one stage: 128 bytes of a 16-bit dtype, the widest swizzle of TMA."""
BARRIER_BYTES = 1024
"""Shared memory before the first tile, which is aligned to as much."""

Rule = tuple[str, Any, bool, str]
"""What is looked at, its value, whether it is legal, and what would be."""


def slab_columns(tile_n: int, item_bytes: int) -> int:
    """Return the columns that a warp stores at a time: up to a swizzle of 128 bytes."""
    return math.gcd(tile_n, 128 // item_bytes)


@dataclass(frozen=True)
class Arch(ABC):
    """What all architectures have in common."""

    name: str
    capability: tuple[int, int]
    family: str
    """Which of the kernels' modules are its own."""
    forms_weight_gradient: bool
    """Whether dW has kernels."""
    smem_bytes: int = 227 << 10
    dtypes: tuple[str, ...] = ("bfloat16", "float16")

    @abstractmethod
    def prebuilt_configs(self) -> tuple[GemmConfig, ...]:
        """Return every configuration that may be chosen where nothing was tuned."""

    @abstractmethod
    def default(self, tokens: int) -> GemmConfig:
        """Return the configuration for `tokens` rows where nothing better is known."""

    @abstractmethod
    def default_configs(self, tokens: int, hidden: int, num_sms: int) -> KernelConfigs:
        """Return the configurations of all kernels where nothing better is known."""

    @abstractmethod
    def grad_gemm_configs(self) -> tuple[GemmConfig, ...]:
        """Return every configuration of a gradient's product that those can have."""

    @abstractmethod
    def search_space(self) -> tuple[GemmConfig, ...]:
        """Return every configuration that is worth a trial."""

    @abstractmethod
    def stage_bytes(self, config: GemmConfig) -> int:
        """Return the shared memory of one stage."""

    @abstractmethod
    def slab_bytes(self, config: GemmConfig) -> int:
        """Return the shared memory of the exponentials on their way to memory."""

    @abstractmethod
    def rules(self, config: GemmConfig) -> Iterator[Rule]:
        """Yield what this architecture asks of a configuration."""

    def used_smem_bytes(self, config: GemmConfig) -> int:
        """Return the shared memory of the kernel that stores, the larger one."""
        inputs = config.stages * self.stage_bytes(config)
        return BARRIER_BYTES + inputs + self.slab_bytes(config)

    def is_legal(self, config: GemmConfig) -> bool:
        """Whether the hardware can run a configuration."""
        try:
            self.check(config)
        except ValueError:
            return False
        return True

    def check(self, config: GemmConfig) -> None:
        """Raise ValueError for a configuration that the hardware cannot run."""
        for field in dataclasses.fields(config):
            number, kind = getattr(config, field.name), field.type
            assert isinstance(kind, type)
            is_of_kind = type(number) is kind
            if not is_of_kind or number < 0:
                raise ValueError(
                    f"{field.name}: got {number!r}, expected {kind.__name__} of at least 0"
                )
        tile = config.tile_m, config.tile_n
        common: tuple[Rule, ...] = (
            ("tile", tile, min(tile) > 0, "at least one row and column"),
            ("raster_group", config.raster_group, config.raster_group >= 1, "at least 1"),
            # larger clusters leave num_sms idle: those of a GPC are no multiple of 4
            ("cluster", config.cluster, config.cluster in (1, 2), "1 or 2"),
        )
        memory: Rule = (
            "stages",
            config.stages,
            self.used_smem_bytes(config) <= self.smem_bytes,
            f"at most {self.smem_bytes} bytes of shared memory",
        )
        for name, value, holds, expected in (*common, *self.rules(config), memory):
            if not holds:
                raise ValueError(f"{name}: got {value}, expected {expected}")
