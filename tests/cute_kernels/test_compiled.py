"""Each kind of kernel compiles clean for each architecture, in its default configuration."""

import functools
from dataclasses import replace
from pathlib import Path

import pytest

from cutefce.autotune_cache.tuning import runner
from cutefce.autotune_cache.verdicts import PARTS
from cutefce.cute_kernels.arch.base import Arch, Gpu
from cutefce.cute_kernels.arch.sm90 import Sm90
from cutefce.cute_kernels.arch.sm100 import Sm100
from cutefce.cute_kernels.jit.build import store_clean
from cutefce.cute_kernels.spec.divergence import DivergenceRowsSpec
from cutefce.cute_kernels.spec.gemm import GradGemmSpec
from cutefce.cute_kernels.spec.kernel import KernelSpec
from cutefce.cute_kernels.spec.rowwise import ScaleAddRowsSpec

SHARES = 8
"""Tests among which the kernels of an architecture are shared out."""


@functools.cache
def default_kernels(arch: Arch) -> list[KernelSpec]:
    """Return kernels of bfloat16 that calls without a tuned table launch.

    Of the divergences one, of the others all, also with a matrix of rank one: `make wheel` requires
    of all to be clean.
    """
    every = runner.Runner(Gpu(arch, "any", 132))
    found = every.kernels("bfloat16", every.base(), PARTS)
    several = [kernel for kernel in found if isinstance(kernel, DivergenceRowsSpec)][1:]
    rank_one = [
        replace(kernel, rank_one=True)
        for kernel in found
        if isinstance(kernel, ScaleAddRowsSpec)
        or (isinstance(kernel, GradGemmSpec) and kernel.wrt == "weight" and kernel.final)
    ]
    others = (kernel for kernel in found if kernel not in several)
    return list(dict.fromkeys((*others, *rank_one)))  # label smoothing launches some of the latter


@pytest.mark.slow
@pytest.mark.parametrize("share", range(SHARES))
@pytest.mark.parametrize("arch", [Sm90(), Sm100()], ids=lambda arch: str(arch.name))
def test_kernels_compile_clean(arch: Arch, share: int, folder: Path) -> None:
    kernels = default_kernels(arch)[share::SHARES]
    assert kernels
    for kernel in kernels:
        store_clean(kernel)
    assert len(list(folder.rglob("*.so"))) == len(kernels)
