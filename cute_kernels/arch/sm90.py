"""TODO."""

import dataclasses
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from cutefce.cute_kernels.arch.base import STEP, Arch, Rule, slab_columns
from cutefce.cute_kernels.config import GemmConfig, KernelConfigs
from cutefce.cute_kernels.schedule.order import (
    MAX_K_SPLITS,
    MIN_STEPS_PER_SPLIT,
    choose_k_splits,
    num_waves,
)


@dataclass(frozen=True)
class Sm90(Arch):
    """Hopper."""

    name: str = "sm_90a"
    capability: tuple[int, int] = (9, 0)
    family: str = "sm90"
    forms_weight_gradient: bool = True

    def prebuilt_configs(self) -> tuple[GemmConfig, ...]:
        return (
            GemmConfig(128, 192, cluster=2, stages=5, pingpong=True),
            GemmConfig(192, 128, cluster=2, stages=5, pingpong=True),
            GemmConfig(128, 192, cluster=1, stages=5, pingpong=True),
            GemmConfig(192, 128, cluster=1, stages=5, pingpong=True),
            GemmConfig(64, 256, cluster=1, stages=5, pingpong=True),
            GemmConfig(128, 256, cluster=2, stages=4, pingpong=False),
        )

    def default(self, tokens: int) -> GemmConfig:
        two_cta, tall_pair, single, tall, low, _ = self.prebuilt_configs()
        if tokens <= low.rows:
            return low

        def cost(config: GemmConfig) -> float:
            """Return the rows that are computed; multicast saves traffic, and that power."""
            return -(-tokens // config.rows) * config.rows * (1.0 if config.cluster == 2 else 1.03)

        return min((two_cta, tall_pair, single, tall), key=cost)

    def default_configs(self, tokens: int, hidden: int, num_sms: int) -> KernelConfigs:
        narrow, middle, wide = self.grad_gemm_configs()

        def best(seconds: dict[GemmConfig, float]) -> GemmConfig:
            """Return the configuration that is fastest for tiles of these relative times."""
            return min(seconds, key=lambda c: seconds[c] * -(-hidden // c.tile_n) * c.tile_n)

        # measured on an H200, in turns with other work and for long: wide tiles move less, which
        # saves power; in turns, warpgroups hide the epilogues, which short products have more of
        of_hidden = best({wide: 1.0, middle: 1.015, narrow: 1.03})
        of_short = best({narrow: 1.0, middle: 1.0})
        of_weight = best({narrow: 1.0, middle: 0.96 if tokens >= 16384 else 0.988})
        clusters = num_sms // of_hidden.cluster
        units = -(-tokens // of_hidden.rows) * -(-hidden // of_hidden.tile_n)
        longest = num_waves(
            units, clusters, choose_k_splits(units, clusters, MAX_K_SPLITS * MIN_STEPS_PER_SPLIT)
        )
        # a plain product, which has tiles of other sizes, wins where few rows fill those of dX
        used = tokens * hidden / (longest * clusters * of_hidden.rows * of_hidden.tile_n)
        if used < 0.8:
            return KernelConfigs(self.default(tokens), None, of_weight)
        return KernelConfigs(self.default(tokens), of_hidden, of_weight, of_short)

    def grad_gemm_configs(self) -> tuple[GemmConfig, ...]:
        return (
            GemmConfig(128, 128, cluster=2, stages=6, pingpong=True),
            GemmConfig(128, 192, cluster=2, stages=5, pingpong=True),
            GemmConfig(128, 256, cluster=2, stages=4, pingpong=False),
        )

    def search_space(self) -> tuple[GemmConfig, ...]:
        # as many stages as fit, or one less: more hide more, whatever the problem
        found = []
        tiles = itertools.product((64, 128, 192, 256), (128, 160, 192, 256), (1, 2), (True, False))
        for tile_m, tile_n, cluster, pingpong in tiles:
            legal: list[GemmConfig] = []
            for stages in range(2, 17):
                config = GemmConfig(tile_m, tile_n, cluster, stages, pingpong)
                if self.is_legal(config):
                    legal.append(config)
            for config, group in itertools.product(legal[:-3:-1], (8, 4, 16)):
                found.append(dataclasses.replace(config, raster_group=group))
        return tuple(found)

    def accumulators(self, config: GemmConfig) -> int:
        """Return the float32 accumulators of a thread."""
        return config.tile_m * config.tile_n // (128 if config.pingpong else 256)

    def registers(self, config: GemmConfig) -> tuple[int, int]:
        """Return the registers of a producer and of a consumer thread; 504 for three groups."""
        return (40, 232) if self.accumulators(config) <= 192 else (24, 240)

    def stage_bytes(self, config: GemmConfig) -> int:
        return (config.tile_m + config.tile_n) * STEP * 2

    def slab_bytes(self, config: GemmConfig) -> int:
        return 2 * 64 * max(slab_columns(config.tile_n, size) * size for size in (2, 4))

    def rules(self, config: GemmConfig) -> Iterator[Rule]:
        tile_m, tile_n, rows = config.tile_m, config.tile_n, 64 if config.pingpong else 128
        yield "tile_m", tile_m, tile_m % rows == 0, f"a multiple of {rows} (wgmma)"
        yield "tile_n", tile_n, tile_n % 16 == 0, "a multiple of 16 (stmatrix)"
        yield "tile_n", tile_n, tile_n <= 256, "at most 256 (wgmma)"
        few = self.accumulators(config) <= 208
        yield "tile", (tile_m, tile_n), few, "at most 208 accumulators a thread"
        yield "two_cta", config.two_cta, not config.two_cta, "False (tcgen05 alone)"
        yield (
            "poly_exp2_per_16",
            config.poly_exp2_per_16,
            not config.poly_exp2_per_16,
            "0 (Blackwell alone)",
        )
        # a stage is given back when the products of the next one have been issued
        yield "stages", config.stages, config.stages >= 2, "at least 2"
