"""The kernels that are built ahead and verified.

This module does not import the DSL.
"""

from itertools import cycle, product

from cutefce.cute_kernels.arch.base import Arch
from cutefce.cute_kernels.config import GemmConfig, KernelConfigs
from cutefce.cute_kernels.kernel_set import kernel_set
from cutefce.cute_kernels.sampling_set import SORT_SIZES, sampling_kernels
from cutefce.cute_kernels.spec import KernelSpec
from cutefce.cute_kernels.spec.divergence import divergence_kernels
from cutefce.cute_kernels.variant import PREBUILT

MANY_TOKENS = 8192
"""Tokens whose default configuration the prebuilt variants have."""


def all_kernels(arch: Arch) -> list[KernelSpec]:
    """Return the kernels of every configuration that `arch` lists, each once.

    Lookups choose among these; variants have fewer.
    """
    sets = [
        kernel_set(arch, dtype, configs)
        for dtype, config in product(arch.dtypes, arch.prebuilt_configs())
        for configs in with_gradients(arch, config)
    ]
    default = with_gradients(arch, arch.default(MANY_TOKENS))[0]
    variants = [kernel_set(arch, arch.dtypes[0], default, variant) for variant in PREBUILT]
    kernels = [kernel for kernels in (*sets, *variants) for kernel in kernels.all()]
    kernels += [kernels.grad_hidden_scaling for kernels in sets if kernels.grad_hidden_scaling]
    for exact, size in product(sets, SORT_SIZES):
        kernels += sampling_kernels(exact, MANY_TOKENS, size)
    for dtype in arch.dtypes:
        kernels += divergence_kernels(arch, dtype)
    return list(dict.fromkeys(kernels))


def with_gradients(arch: Arch, project_exp: GemmConfig) -> list[KernelConfigs]:
    """Return `project_exp` with every configuration of the gradients' GEMMs, the common ones first.

    Those of which there are fewer are with several of the others.
    """
    hidden = arch.grad_hidden_configs()
    others = arch.grad_weight_configs(), arch.kept_sums_configs(), arch.exps_configs()
    assert all(len(configs) <= len(hidden) and bool(configs) == bool(hidden) for configs in others)
    every = zip(hidden, *map(cycle, others), strict=False)
    found = [
        KernelConfigs(project_exp, config, weight, kept_sums=kept, exps=exps)
        for config, weight, kept, exps in every
    ]
    return found or [KernelConfigs(project_exp, None, None)]
