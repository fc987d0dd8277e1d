"""Each kind of kernel compiles clean for each architecture, in its default configuration."""

from pathlib import Path

import pytest

from cutefce.autotune_cache import ahead
from cutefce.commands.compile import compiled_clean
from cutefce.cute_kernels.arch.base import Arch
from cutefce.cute_kernels.arch.sm90 import Sm90
from cutefce.cute_kernels.arch.sm100 import Sm100
from cutefce.cute_kernels.jit.cache import compile_ahead
from cutefce.cute_kernels.kernel_set import kernel_set
from cutefce.cute_kernels.sampling_set import SORT_SIZES, sampling_kernels
from cutefce.cute_kernels.spec import KernelSpec
from cutefce.cute_kernels.spec.divergence import divergence_kernels
from tests.support.tiers import rest_slow

FEW_TOKENS = 256
"""Tokens whose configuration is another one than that of many."""


def default_kernels(arch: Arch) -> dict[str, KernelSpec]:
    """Return the kernels of bfloat16 that calls without a tuned table launch, by their names."""
    found: list[KernelSpec] = []
    for tokens in (ahead.MANY_TOKENS, FEW_TOKENS):
        configs = ahead.with_gradients(arch, arch.default(tokens))[0]
        kernels = kernel_set(arch, "bfloat16", configs)
        found += [kernels.row_sums_and_exps, *kernels.all(), *kernels.of_soft_targets]
        found += sampling_kernels(arch, kernels.row_sums, tokens, SORT_SIZES[0])
    found += divergence_kernels(arch, "bfloat16")
    return {str(kernel): kernel for kernel in dict.fromkeys(found)}


@pytest.mark.parametrize("kernel", [
    *rest_slow(default_kernels(Sm90())), *rest_slow(default_kernels(Sm100()))
])  # fmt: skip
def test_it_compiles_clean(kernel: KernelSpec, folder: Path) -> None:
    assert compiled_clean(compile_ahead(kernel))
    assert len(list(folder.rglob("*.so"))) == 1
