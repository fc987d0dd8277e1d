"""Blackwell: limits and default configurations."""

from dataclasses import dataclass
from types import MappingProxyType

from cutefce.cute_kernels.arch.base import Arch
from cutefce.cute_kernels.config import GemmConfig, KernelConfigs

TWO_CTA = GemmConfig(128, 256, cluster=2, stages=6, pingpong=False)
SINGLE_CTA = GemmConfig(128, 256, cluster=1, stages=4, pingpong=False)
"""Configurations of `project_exp`: a cluster of two thread blocks is a 2-CTA pair."""


@dataclass(frozen=True)
class Sm100(Arch):
    """Blackwell, compute capability 10.0 by default."""

    name: str = "sm_100a"
    capability: tuple[int, int] = (10, 0)
    family: str = "sm100"

    listed = MappingProxyType({"project_exp": (TWO_CTA, SINGLE_CTA)})
    ACC_STAGES = 2
    """Accumulators in tensor memory: MMAs fill one while the epilogue reads the other."""
    EPI_TILE_COLUMNS = 64
    """Columns that a warp reads and stores at a time: a swizzle of 128 bytes."""
    EPI_STAGES = 2
    """Epilogue tiles of a warp in shared memory that may be in flight."""

    def default(self, tokens: int) -> GemmConfig:
        """Return the default configuration of `project_exp` for `tokens` rows."""
        return SINGLE_CTA if tokens <= SINGLE_CTA.rows else TWO_CTA

    def default_configs(
        self, tokens: int, hidden: int, num_sms: int, model: str = ""
    ) -> KernelConfigs:
        return KernelConfigs(self.default(tokens))

    def used_tmem_columns(self, config: GemmConfig) -> int:
        """Return the columns of tensor memory to allocate: a power of 2."""
        return 1 << (self.ACC_STAGES * config.tile_n - 1).bit_length()
