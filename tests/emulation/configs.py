"""Configurations of the GEMM kernels that the emulator runs: small ones, and Blackwell's own."""

import functools

from cutefce.cute_kernels.arch import arch_named
from cutefce.cute_kernels.arch.sm90 import PACKED_128
from cutefce.cute_kernels.config import GemmConfig, KernelConfigs
from cutefce.cute_kernels.kernel_set import KernelSet, kernel_set
from cutefce.cute_kernels.variant import PLAIN, KernelVariant

HOPPER, BLACKWELL = arch_named("sm_90a"), arch_named("sm_100a")

PINGPONG = GemmConfig(64, 64, cluster=1, stages=2, pingpong=True)
TALL = GemmConfig(128, 64, cluster=2, stages=3, pingpong=True)
COOPERATIVE = GemmConfig(128, 64, cluster=1, stages=3, pingpong=False)
SHARED = GemmConfig(128, 80, cluster=2, stages=2, pingpong=False)
SHARED_ALONE = GemmConfig(128, 80, cluster=1, stages=3, pingpong=False)
GRADIENTS = (COOPERATIVE, PINGPONG, TALL, SHARED)
"""Configurations of Hopper's gradients."""

TWO_CTA, SINGLE_CTA = BLACKWELL.listed["project_exp"]


@functools.cache
def kernels_of(
    config: GemmConfig, variant: KernelVariant = PLAIN, dtype: str = "bfloat16"
) -> KernelSet:
    """Return the kernels of one of these configurations, on its architecture."""
    if config in BLACKWELL.listed["project_exp"]:
        return kernel_set(BLACKWELL, dtype, KernelConfigs(config, None, None), variant)
    configs = KernelConfigs(config, config, config, packed_sums=PACKED_128)
    return kernel_set(HOPPER, dtype, configs, variant)
