"""What an architecture can run: limits, the configurations to choose from, and the default."""

import dataclasses
import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from cutefce.cute_kernels.config import Configs, GemmConfig
from cutefce.cute_kernels.tile_order import LEAST_STEPS, MOST_CUTS, choose_cuts, rounds

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
    def configs(self) -> tuple[GemmConfig, ...]:
        """Return every configuration that may be chosen where nothing was tuned."""

    @abstractmethod
    def default(self, tokens: int) -> GemmConfig:
        """Return the configuration for `tokens` rows where nothing better is known."""

    @abstractmethod
    def default_configs(self, tokens: int, hidden: int, multiprocessors: int) -> Configs:
        """Return the configurations of all kernels where nothing better is known."""

    @abstractmethod
    def gradient_configs(self) -> tuple[GemmConfig, ...]:
        """Return every configuration of a gradient's product that those can have."""

    @abstractmethod
    def candidates(self) -> tuple[GemmConfig, ...]:
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
            ("group", config.group, config.group >= 1, "at least 1"),
            # larger clusters leave multiprocessors idle: those of a GPC are no multiple of 4
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


@dataclass(frozen=True)
class Sm90(Arch):
    """Hopper."""

    name: str = "sm_90a"
    capability: tuple[int, int] = (9, 0)
    family: str = "sm90"
    forms_weight_gradient: bool = True

    def configs(self) -> tuple[GemmConfig, ...]:
        return (
            GemmConfig(128, 192, cluster=2, stages=5, pingpong=True),
            GemmConfig(192, 128, cluster=2, stages=5, pingpong=True),
            GemmConfig(128, 192, cluster=1, stages=5, pingpong=True),
            GemmConfig(192, 128, cluster=1, stages=5, pingpong=True),
            GemmConfig(64, 256, cluster=1, stages=5, pingpong=True),
            GemmConfig(128, 256, cluster=2, stages=4, pingpong=False),
        )

    def default(self, tokens: int) -> GemmConfig:
        paired, tall_pair, single, tall, low, _ = self.configs()
        if tokens <= low.rows:
            return low

        def cost(config: GemmConfig) -> float:
            """Return the rows that are computed; multicast saves traffic, and that power."""
            return -(-tokens // config.rows) * config.rows * (1.0 if config.cluster == 2 else 1.03)

        return min((paired, tall_pair, single, tall), key=cost)

    def default_configs(self, tokens: int, hidden: int, multiprocessors: int) -> Configs:
        narrow, middle, wide = self.gradient_configs()

        def best(seconds: dict[GemmConfig, float]) -> GemmConfig:
            """Return the configuration that is fastest for tiles of these relative times."""
            return min(seconds, key=lambda c: seconds[c] * -(-hidden // c.tile_n) * c.tile_n)

        # measured on an H200, in turns with other work and for long: wide tiles move less, which
        # saves power; in turns, warpgroups hide the epilogues, which short products have more of
        of_hidden = best({wide: 1.0, middle: 1.015, narrow: 1.03})
        of_short = best({narrow: 1.0, middle: 1.0})
        of_weight = best({narrow: 1.0, middle: 0.96 if tokens >= 16384 else 0.988})
        clusters = multiprocessors // of_hidden.cluster
        units = -(-tokens // of_hidden.rows) * -(-hidden // of_hidden.tile_n)
        longest = rounds(units, clusters, choose_cuts(units, clusters, MOST_CUTS * LEAST_STEPS))
        # a plain product, which has tiles of other sizes, wins where few rows fill those of dX
        used = tokens * hidden / (longest * clusters * of_hidden.rows * of_hidden.tile_n)
        if used < 0.8:
            return Configs(self.default(tokens), None, of_weight)
        return Configs(self.default(tokens), of_hidden, of_weight, of_short)

    def gradient_configs(self) -> tuple[GemmConfig, ...]:
        return (
            GemmConfig(128, 128, cluster=2, stages=6, pingpong=True),
            GemmConfig(128, 192, cluster=2, stages=5, pingpong=True),
            GemmConfig(128, 256, cluster=2, stages=4, pingpong=False),
        )

    def candidates(self) -> tuple[GemmConfig, ...]:
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
                found.append(dataclasses.replace(config, group=group))
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
        yield "paired", config.paired, not config.paired, "False (tcgen05 alone)"
        yield "emulated", config.emulated, not config.emulated, "0 (Blackwell alone)"
        # a stage is given back when the products of the next one have been issued
        yield "stages", config.stages, config.stages >= 2, "at least 2"


@dataclass(frozen=True)
class Sm100(Arch):
    """Blackwell, of compute capability 10.0 unless said otherwise."""

    name: str = "sm_100a"
    capability: tuple[int, int] = (10, 0)
    family: str = "sm100"
    forms_weight_gradient: bool = False
    tmem_columns: int = 512
    """Columns of tensor memory, of 128 rows of 32 bits."""
    emulated: int = 4
    """Exponentials of 16 that are worth computing by products: those of the hardware are few."""

    ACCUMULATORS = 2
    """Tiles of logits in tensor memory: one is multiplied while the other one is read."""
    SLAB = 64
    """Columns that a warp reads and stores at a time: a swizzle of 128 bytes."""
    SLABS = 2
    """Slabs of a warp that are on their way to memory."""

    def configs(self) -> tuple[GemmConfig, ...]:
        paired = GemmConfig(128, 256, cluster=2, stages=6, pingpong=False, paired=True)
        plain = (
            paired,
            GemmConfig(128, 256, cluster=2, stages=4, pingpong=False),
            GemmConfig(128, 256, cluster=1, stages=4, pingpong=False),
        )
        if not self.emulated:
            return plain
        return *plain, dataclasses.replace(paired, emulated=self.emulated)

    def default(self, tokens: int) -> GemmConfig:
        paired, _, single, *_ = self.configs()
        return single if tokens <= single.rows else paired

    def default_configs(self, tokens: int, hidden: int, multiprocessors: int) -> Configs:
        return Configs(self.default(tokens), None, None)

    def gradient_configs(self) -> tuple[GemmConfig, ...]:
        return ()  # the gradients' products have no kernels here

    def candidates(self) -> tuple[GemmConfig, ...]:
        groups = itertools.product(self.configs(), (8, 4, 16))
        return tuple(dataclasses.replace(config, group=group) for config, group in groups)

    def used_tmem_columns(self, config: GemmConfig) -> int:
        """Return the columns of tensor memory to allocate: a power of 2."""
        return 1 << (self.ACCUMULATORS * config.tile_n - 1).bit_length()

    def stage_bytes(self, config: GemmConfig) -> int:
        shared_by = 2 if config.paired else 1
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
        pairs = config.cluster == 2 or not config.paired
        yield "cluster", config.cluster, pairs, "2, as it is paired"
        yield "emulated", config.emulated, config.emulated <= 16, "at most 16"
        yield "stages", config.stages, config.stages >= 2, "at least 2"


ARCHS: tuple[Arch, ...] = (Sm90(), Sm100(), Sm100("sm_103a", (10, 3), emulated=0))
"""Every architecture that has kernels; the exponentials of sm_103a are twice as many a cycle."""


def arch_for(capability: tuple[int, int]) -> Arch | None:
    """Return the architecture of a device of this compute capability, None if it has no kernels."""
    return next((arch for arch in ARCHS if arch.capability == capability), None)


def arch_named(name: str) -> Arch:
    """Return the architecture `name`."""
    for arch in ARCHS:
        if arch.name == name:
            return arch
    raise ValueError(f"arch: got {name!r}, expected one of {', '.join(a.name for a in ARCHS)}")
