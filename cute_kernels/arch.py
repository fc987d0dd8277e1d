"""What an architecture can run: limits, the configurations to choose from, and the default."""

import dataclasses
import itertools
import math
from dataclasses import dataclass

from cutefce.cute_kernels.config import Configs, ProjectExpConfig

STEP = 64
"""Hidden features of one stage: 128 bytes of a 16-bit dtype, the widest swizzle of TMA."""


def slab_columns(tile_n: int, item_bytes: int) -> int:
    """Return the columns that a warp stores at a time: up to a swizzle of 128 bytes."""
    return math.gcd(tile_n, 128 // item_bytes)


@dataclass(frozen=True)
class Sm90:
    """Hopper."""

    name: str = "sm_90a"
    capability: tuple[int, int] = (9, 0)
    smem_bytes: int = 227 << 10
    dtypes: tuple[str, ...] = ("bfloat16", "float16")

    def configs(self) -> tuple[ProjectExpConfig, ...]:
        """Return every configuration that may be chosen where nothing was tuned."""
        return (
            ProjectExpConfig(128, 192, cluster=2, stages=5, pingpong=True),
            ProjectExpConfig(128, 192, cluster=1, stages=5, pingpong=True),
            ProjectExpConfig(64, 256, cluster=1, stages=5, pingpong=True),
            ProjectExpConfig(128, 128, cluster=2, stages=6, pingpong=True),
            ProjectExpConfig(128, 256, cluster=2, stages=4, pingpong=False),
        )

    def default(self, tokens: int) -> ProjectExpConfig:
        """Return the configuration for `tokens` rows where nothing better is known."""
        paired, single, low, *_ = self.configs()
        if tokens <= low.rows:
            return low
        return single if tokens <= single.rows else paired

    def default_configs(self, tokens: int, hidden: int, multiprocessors: int) -> Configs:
        """Return the configurations of all kernels where nothing better is known."""
        gradient = ProjectExpConfig(128, 128, cluster=2, stages=6, pingpong=True)
        clusters = multiprocessors // gradient.cluster
        units = -(-tokens // gradient.rows) * -(-hidden // gradient.tile_n)
        # a tile of dX is not shared out: a plain product, which does that, wins where few are there
        busy = units / (-(-units // clusters) * clusters)
        return Configs(self.default(tokens), gradient if busy >= 0.8 else None, gradient)

    def candidates(self) -> tuple[ProjectExpConfig, ...]:
        """Return every configuration that is worth a trial.

        A kernel has as many stages as fit, or one less: more hide more, whatever the problem.
        """
        found = []
        tiles = itertools.product((64, 128, 192, 256), (128, 160, 192, 256), (1, 2), (True, False))
        for tile_m, tile_n, cluster, pingpong in tiles:
            legal: list[ProjectExpConfig] = []
            for stages in range(2, 17):
                config = ProjectExpConfig(tile_m, tile_n, cluster, stages, pingpong)
                if self.is_legal(config):
                    legal.append(config)
            for config, group in itertools.product(legal[:-3:-1], (8, 4, 16)):
                found.append(dataclasses.replace(config, group=group))
        return tuple(found)

    def accumulators(self, config: ProjectExpConfig) -> int:
        """Return the float32 accumulators of a thread."""
        return config.tile_m * config.tile_n // (128 if config.pingpong else 256)

    def registers(self, config: ProjectExpConfig) -> tuple[int, int]:
        """Return the registers of a producer and of a consumer thread; 504 for three groups."""
        return (40, 232) if self.accumulators(config) <= 192 else (24, 240)

    def used_smem_bytes(self, config: ProjectExpConfig) -> int:
        """Return the shared memory of the kernel that needs the most: one that stores."""
        barriers = 1024
        inputs = config.stages * (config.tile_m + config.tile_n) * STEP * 2
        slab = max(slab_columns(config.tile_n, size) * size for size in (2, 4))
        return barriers + inputs + 2 * 64 * slab

    def is_legal(self, config: ProjectExpConfig) -> bool:
        """Whether the hardware can run a configuration."""
        try:
            self.check(config)
        except ValueError:
            return False
        return True

    def check(self, config: ProjectExpConfig) -> None:
        """Raise ValueError for a configuration that the hardware cannot run."""
        for name, number in dataclasses.asdict(config).items():
            kind = bool if name == "pingpong" else int
            if type(number) is not kind or number < 0:
                raise ValueError(f"{name}: got {number!r}, expected {kind.__name__} of at least 0")
        rows = 64 if config.pingpong else 128
        tile = config.tile_m, config.tile_n
        rules = (
            ("tile_m", config.tile_m, config.tile_m % rows == 0, f"a multiple of {rows} (wgmma)"),
            ("tile_n", config.tile_n, config.tile_n % 16 == 0, "a multiple of 16 (stmatrix)"),
            ("tile_n", config.tile_n, config.tile_n <= 256, "at most 256 (wgmma)"),
            ("tile", tile, min(tile) > 0, "at least one row and column"),
            ("tile", tile, self.accumulators(config) <= 208, "at most 208 accumulators a thread"),
            # larger clusters leave multiprocessors idle: those of a GPC are no multiple of 4
            ("cluster", config.cluster, config.cluster in (1, 2), "1 or 2"),
            ("group", config.group, config.group >= 1, "at least 1"),
            # a stage is given back when the products of the next one have been issued
            ("stages", config.stages, config.stages >= 2, "at least 2"),
            (
                "stages",
                config.stages,
                self.used_smem_bytes(config) <= self.smem_bytes,
                f"at most {self.smem_bytes} bytes of shared memory",
            ),
        )
        for name, value, holds, expected in rules:
            if not holds:
                raise ValueError(f"{name}: got {value}, expected {expected}")


ARCHS = (Sm90(),)
"""Every architecture that has kernels."""


def arch_for(capability: tuple[int, int]) -> Sm90 | None:
    """Return the architecture of a device of this compute capability, None if it has no kernels."""
    return next((arch for arch in ARCHS if arch.capability == capability), None)


def arch_named(name: str) -> Sm90:
    """Return the architecture `name`."""
    for arch in ARCHS:
        if arch.name == name:
            return arch
    raise ValueError(f"arch: got {name!r}, expected one of {', '.join(a.name for a in ARCHS)}")
