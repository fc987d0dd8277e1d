"""The kernels that are built ahead and verified, and those of shipped tables.

This module does not import the DSL.
"""

import dataclasses
from itertools import cycle, product
from typing import Any

from cutefce.autotune_cache import lookup
from cutefce.autotune_cache.table_io import read
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
    """Return the kernels of every prebuilt and verified configuration on `arch`, each once.

    These configurations are the defaults and common winners; those of variants are fewer.
    """
    sets = [
        kernel_set(arch, dtype, configs)
        for dtype, config in product(arch.dtypes, arch.prebuilt_configs())
        for configs in with_gradients(arch, config)
    ]
    default = with_gradients(arch, arch.default(MANY_TOKENS))[0]
    variants = [kernel_set(arch, arch.dtypes[0], default, variant) for variant in PREBUILT]
    kernels = [kernel for kernels in (*sets, *variants) for kernel in kernels.all()]
    kernels += [kernel for kernels in sets for kernel in kernels.of_soft_targets]
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


def shipped_kernels(arch: Arch) -> list[KernelSpec]:
    """Return every kernel that lookups choose on `arch` without a user's table, each once."""
    kernels, default = all_kernels(arch), with_gradients(arch, arch.prebuilt_configs()[0])[0]
    for path in sorted(lookup.SHIPPED_FOLDER.glob("*.json")):
        table = read(path)
        if table.gpu.arch.name != arch.name:
            continue
        for key, entry in table.entries.items():
            if not entry.verified:
                continue
            winner: dict[str, Any] = {key.kernel: entry.config}
            tuned = kernel_set(arch, key.dtype, dataclasses.replace(default, **winner))
            kernels += [*tuned.all(), *tuned.of_soft_targets]
    return list(dict.fromkeys(kernels))
