"""Blackwell: limits and default configurations."""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

from cutefce.cute_kernels.arch.base import TILE_K, Arch, Rule
from cutefce.cute_kernels.config import GemmConfig, KernelConfigs

TWO_CTA = GemmConfig(128, 256, cluster=2, stages=6, pingpong=False, two_cta=True)
MULTICAST = GemmConfig(128, 256, cluster=2, stages=4, pingpong=False)
SINGLE_CTA = GemmConfig(128, 256, cluster=1, stages=4, pingpong=False)
"""Configurations of `project_exp`."""


@dataclass(frozen=True)
class Sm100(Arch):
    """Blackwell, compute capability 10.0 by default."""

    name: str = "sm_100a"
    capability: tuple[int, int] = (10, 0)
    family: str = "sm100"
    forms_weight_gradient: bool = False
    tmem_columns: int = 512
    """Columns of tensor memory, each 128 lanes of 32 bits."""
    poly_exp2_per_16: int = 4
    """Of every 16 exponentials, the number worth computing by a polynomial; 0 if none is."""

    ACC_STAGES = 2
    """Accumulators in tensor memory: MMAs fill one while the epilogue reads the other."""
    EPI_TILE_COLUMNS = 64
    """Columns that a warp reads and stores at a time: a swizzle of 128 bytes."""
    EPI_STAGES = 2
    """Epilogue tiles of a warp in shared memory that may be in flight."""

    def prebuilt_configs(self) -> tuple[GemmConfig, ...]:
        plain = TWO_CTA, MULTICAST, SINGLE_CTA
        if not self.poly_exp2_per_16:
            return plain
        return *plain, dataclasses.replace(TWO_CTA, poly_exp2_per_16=self.poly_exp2_per_16)

    def default(self, tokens: int) -> GemmConfig:
        return SINGLE_CTA if tokens <= SINGLE_CTA.rows else TWO_CTA

    def default_configs(
        self, tokens: int, hidden: int, num_sms: int, model: str = ""
    ) -> KernelConfigs:
        return KernelConfigs(self.default(tokens), None, None)

    def used_tmem_columns(self, config: GemmConfig) -> int:
        """Return the columns of tensor memory to allocate: a power of 2."""
        return 1 << (self.ACC_STAGES * config.tile_n - 1).bit_length()

    def stage_bytes(self, config: GemmConfig) -> int:
        ctas_per_b_tile = 2 if config.two_cta else 1
        return (config.tile_m + config.tile_n // ctas_per_b_tile) * TILE_K * 2

    def epi_tile_bytes(self, config: GemmConfig) -> int:
        return self.EPI_STAGES * config.tile_m * self.EPI_TILE_COLUMNS * 2

    def rules(self, config: GemmConfig) -> Iterator[Rule]:
        tile_m, tile_n, columns = config.tile_m, config.tile_n, self.EPI_TILE_COLUMNS
        poly = config.poly_exp2_per_16
        yield "pingpong", config.pingpong, not config.pingpong, "False (Hopper only)"
        yield "swaps", config.swaps, not config.swaps, "False (Hopper only)"
        # with 128 rows, each row is a lane of tensor memory and hence a thread
        yield "tile_m", tile_m, tile_m == 128, "128 (tcgen05)"
        yield "tile_n", tile_n, tile_n % columns == 0, f"a multiple of {columns}"
        fits = self.used_tmem_columns(config) <= self.tmem_columns
        yield "tile_n", tile_n, fits, f"two tiles in {self.tmem_columns} columns of tensor memory"
        cluster_fits = config.cluster == 2 or not config.two_cta
        yield "cluster", config.cluster, cluster_fits, "2 for two_cta"
        yield "poly_exp2_per_16", poly, poly <= 16, "at most 16"
        yield "stages", config.stages, config.stages >= 2, "at least 2"
