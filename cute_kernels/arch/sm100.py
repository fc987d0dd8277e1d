"""TODO."""

import dataclasses
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from cutefce.cute_kernels.arch.base import STEP, Arch, Rule
from cutefce.cute_kernels.config import GemmConfig, KernelConfigs


@dataclass(frozen=True)
class Sm100(Arch):
    """Blackwell, of compute capability 10.0 unless said otherwise."""

    name: str = "sm_100a"
    capability: tuple[int, int] = (10, 0)
    family: str = "sm100"
    forms_weight_gradient: bool = False
    tmem_columns: int = 512
    """Columns of tensor memory, of 128 rows of 32 bits."""
    poly_exp2_per_16: int = 4
    """Exponentials of 16 that are worth computing by products: those of the hardware are few."""

    ACCUMULATORS = 2
    """Tiles of logits in tensor memory: one is multiplied while the other one is read."""
    SLAB = 64
    """Columns that a warp reads and stores at a time: a swizzle of 128 bytes."""
    SLABS = 2
    """Slabs of a warp that are on their way to memory."""

    def prebuilt_configs(self) -> tuple[GemmConfig, ...]:
        two_cta = GemmConfig(128, 256, cluster=2, stages=6, pingpong=False, two_cta=True)
        plain = (
            two_cta,
            GemmConfig(128, 256, cluster=2, stages=4, pingpong=False),
            GemmConfig(128, 256, cluster=1, stages=4, pingpong=False),
        )
        if not self.poly_exp2_per_16:
            return plain
        return *plain, dataclasses.replace(two_cta, poly_exp2_per_16=self.poly_exp2_per_16)

    def default(self, tokens: int) -> GemmConfig:
        two_cta, _, single, *_ = self.prebuilt_configs()
        return single if tokens <= single.rows else two_cta

    def default_configs(self, tokens: int, hidden: int, num_sms: int) -> KernelConfigs:
        return KernelConfigs(self.default(tokens), None, None)

    def grad_gemm_configs(self) -> tuple[GemmConfig, ...]:
        return ()  # the gradients' products have no kernels here

    def search_space(self) -> tuple[GemmConfig, ...]:
        groups = itertools.product(self.prebuilt_configs(), (8, 4, 16))
        return tuple(dataclasses.replace(config, raster_group=group) for config, group in groups)

    def used_tmem_columns(self, config: GemmConfig) -> int:
        """Return the columns of tensor memory to allocate: a power of 2."""
        return 1 << (self.ACCUMULATORS * config.tile_n - 1).bit_length()

    def stage_bytes(self, config: GemmConfig) -> int:
        shared_by = 2 if config.two_cta else 1
        return (config.tile_m + config.tile_n // shared_by) * STEP * 2

    def slab_bytes(self, config: GemmConfig) -> int:
        return self.SLABS * config.tile_m * self.SLAB * 2

    def rules(self, config: GemmConfig) -> Iterator[Rule]:
        tile_m, tile_n = config.tile_m, config.tile_n
        yield "pingpong", config.pingpong, not config.pingpong, "False (Hopper alone)"
        # with 128 rows, a row is a lane of tensor memory and thus a thread
        yield "tile_m", tile_m, tile_m == 128, "128 (tcgen05)"
        yield "tile_n", tile_n, tile_n % self.SLAB == 0, f"a multiple of {self.SLAB}"
        fits = self.used_tmem_columns(config) <= self.tmem_columns
        yield "tile_n", tile_n, fits, f"two tiles in {self.tmem_columns} columns of tensor memory"
        pairs = config.cluster == 2 or not config.two_cta
        yield "cluster", config.cluster, pairs, "2, as it is two_cta"
        yield (
            "poly_exp2_per_16",
            config.poly_exp2_per_16,
            config.poly_exp2_per_16 <= 16,
            "at most 16",
        )
        yield "stages", config.stages, config.stages >= 2, "at least 2"
