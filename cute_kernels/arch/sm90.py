"""Hopper: limits and default configurations."""

from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar

from cutefce.cute_kernels.arch.base import TILE_K, Arch
from cutefce.cute_kernels.config import GemmConfig, KernelConfigs
from cutefce.cute_kernels.integers import ceil_div, round_up
from cutefce.cute_kernels.schedule.order import (
    MAX_K_SPLITS,
    MIN_K_TILES_PER_SPLIT,
    choose_k_splits,
    num_waves,
)

WIDE_CLUSTER2 = GemmConfig(128, 192, cluster=2, stages=5, pingpong=True)
WIDE = GemmConfig(128, 192, cluster=1, stages=5, pingpong=True)
TALL = GemmConfig(192, 128, cluster=1, stages=5, pingpong=True)
FEW_ROWS = GemmConfig(64, 160, cluster=1, stages=7, pingpong=True)
"""Configurations of `project_exp`."""
PROJECT_EXP = WIDE_CLUSTER2, WIDE, TALL
"""Those of more tokens than `FEW_ROWS` has rows; the first wins a tie."""

GRAD_128 = GemmConfig(128, 128, cluster=2, stages=6, pingpong=True)
GRAD_192 = GemmConfig(128, 192, cluster=2, stages=5, pingpong=True)
GRAD_256 = GemmConfig(128, 256, cluster=2, stages=4, pingpong=False)
"""Configurations of the gradient GEMMs, by columns of a tile."""
PACKED_128 = GemmConfig(128, 128, cluster=2, stages=5, pingpong=True)
PACKED_192 = GemmConfig(128, 192, cluster=2, stages=4, pingpong=True)
"""Those of sums that are loaded and stored, which are in shared memory beside the stages."""


@dataclass(frozen=True)
class GemmTimes:
    """Relative times a column of the gradients' GEMMs, measured by tuning and `bench peers`.

    Wide tiles move less data, which saves power; ping-pong hides epilogues, which weigh more in
    short GEMMs.  The first configuration wins a tie.
    """

    grad_hidden: dict[GemmConfig, float]
    grad_hidden_short: dict[GemmConfig, float]
    """Over fewer columns than `KernelConfigs.SHORT`."""
    grad_weight: dict[GemmConfig, float]
    grad_weight_short: dict[GemmConfig, float]
    """Of at most `SHORT_TOKENS` tokens, whose products take less time than writing dW."""
    grad_weight_long: dict[GemmConfig, float]
    """Of at least `long_tokens` tokens."""
    long_tokens: int
    packed_sums: dict[GemmConfig, float]
    """Of at least 1024 products each."""

    SHORT_TOKENS: ClassVar[int] = 512

    def of_grad_weight(self, tokens: int) -> dict[GemmConfig, float]:
        """Return the times of dW of `tokens` tokens."""
        if tokens <= self.SHORT_TOKENS:
            return self.grad_weight_short
        return self.grad_weight_long if tokens >= self.long_tokens else self.grad_weight


H200_TIMES = GemmTimes(
    grad_hidden={GRAD_256: 1.0, GRAD_192: 1.015, GRAD_128: 1.03},
    grad_hidden_short={GRAD_128: 1.0, GRAD_192: 1.0},
    grad_weight={GRAD_128: 1.0, GRAD_192: 0.988},
    grad_weight_short={GRAD_128: 1.0, GRAD_192: 0.9},
    grad_weight_long={GRAD_128: 1.0, GRAD_192: 0.96},
    long_tokens=16384,
    packed_sums={PACKED_128: 1.0, PACKED_192: 0.96},
)
H100_TIMES = GemmTimes(
    grad_hidden={GRAD_256: 1.0, GRAD_192: 0.99, GRAD_128: 1.15},
    grad_hidden_short={GRAD_128: 1.0, GRAD_192: 0.92},
    grad_weight={GRAD_128: 1.0, GRAD_192: 0.9},
    grad_weight_short={GRAD_128: 1.0, GRAD_192: 0.9},
    grad_weight_long={GRAD_128: 1.0, GRAD_192: 0.865},
    long_tokens=4096,
    packed_sums={PACKED_128: 1.0, PACKED_192: 0.9},
)
"""Of 768 to 8192 tokens and 1024 to 4096 hidden features, on one of 80 GB; dW in whole steps."""
H100_MODELS = "H100", "H800"
"""In the names of GPU models that are taken for an H100."""
SINGLE_CTA_TIME = 1.03
"""Time a row of `project_exp` without multicast, relative to clusters of 2; measured likewise."""
MIN_GRAD_HIDDEN_UTILIZATION = 0.8
"""Fraction of dX's waves that must be useful work; below it cuBLAS, with other tiles, is faster."""


def fastest(times: dict[GemmConfig, float], columns: int) -> GemmConfig:
    """Return the configuration with the least of `times` over whole tiles of `columns`."""
    return min(times, key=lambda config: times[config] * round_up(columns, config.tile_n))


@dataclass(frozen=True)
class Sm90(Arch):
    """Hopper, compute capability 9.0."""

    name: str = "sm_90a"
    capability: tuple[int, int] = (9, 0)
    family: str = "sm90"

    listed = MappingProxyType(
        {
            "project_exp": (*PROJECT_EXP, FEW_ROWS),
            "grad_hidden": (GRAD_128, GRAD_192, GRAD_256),
            "grad_hidden_short": (GRAD_128, GRAD_192, GRAD_256),
            "grad_weight": (GRAD_128, GRAD_192),
            "packed_sums": (PACKED_128, PACKED_192),
            "exps": (WIDE_CLUSTER2, WIDE),
        }
    )
    """Taller tiles of `exps` would spill registers beside entries."""
    logits_config = WIDE_CLUSTER2

    def default(self, tokens: int) -> GemmConfig:
        """Return the default configuration of `project_exp` for `tokens` rows."""
        if tokens <= FEW_ROWS.rows:
            return FEW_ROWS
        return min(PROJECT_EXP, key=lambda config: _time(config, tokens))

    def default_configs(
        self, tokens: int, hidden: int, num_sms: int, model: str = ""
    ) -> KernelConfigs:
        project_exp = self.default(tokens)
        times = H100_TIMES if any(name in model for name in H100_MODELS) else H200_TIMES
        wide, short = fastest(times.grad_hidden, hidden), fastest(times.grad_hidden_short, hidden)
        grad_weight = fastest(times.of_grad_weight(tokens), hidden)
        packed = fastest(times.packed_sums, hidden)
        exps = min(self.listed["exps"], key=lambda config: _time(config, tokens))
        more = {"packed_sums": packed, "exps": exps}
        if _utilization(wide, tokens, hidden, num_sms) < MIN_GRAD_HIDDEN_UTILIZATION:
            return KernelConfigs(project_exp, None, grad_weight, **more)
        return KernelConfigs(project_exp, wide, grad_weight, short, **more)

    def accumulators(self, config: GemmConfig) -> int:
        """Return the float32 accumulators of a thread."""
        return config.tile_m * config.tile_n // (128 if config.pingpong else 256)

    def registers(self, config: GemmConfig) -> tuple[int, int]:
        """Return the registers of a producer and of a consumer thread.

        One producer and two consumer warpgroups have 504 registers a thread in total.
        """
        return (40, 232) if self.accumulators(config) <= 192 else (24, 240)

    def stage_bytes(self, config: GemmConfig) -> int:
        """Return the shared memory of one stage."""
        return (config.tile_m + config.tile_n) * TILE_K * 2


def _time(config: GemmConfig, tokens: int) -> float:
    """Return the relative time of `project_exp` for `tokens` rows."""
    return round_up(tokens, config.rows) * (1.0 if config.cluster == 2 else SINGLE_CTA_TIME)


def _utilization(config: GemmConfig, tokens: int, hidden: int, num_sms: int) -> float:
    """Return the fraction of a dX GEMM's time, in whole waves, that computes elements of dX."""
    clusters = num_sms // config.cluster
    work_tiles = ceil_div(tokens, config.rows) * ceil_div(hidden, config.tile_n)
    k_splits = choose_k_splits(work_tiles, clusters, MAX_K_SPLITS * MIN_K_TILES_PER_SPLIT)
    waves = num_waves(work_tiles, clusters, k_splits)
    return tokens * hidden / (waves * clusters * config.rows * config.tile_n)
