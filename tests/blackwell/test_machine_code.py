"""The PTX for Blackwell keeps the rules."""

import dataclasses

import pytest

pytest.importorskip("cutlass")

from cutefce.cute_kernels.arch import arch_named
from cutefce.cute_kernels.arch.sm100 import SINGLE_CTA, TWO_CTA, Sm100
from cutefce.cute_kernels.config import KernelConfigs
from cutefce.cute_kernels.kernel_set import kernel_set
from cutefce.cute_kernels.spec.gemm import ProjectExpSpec
from cutefce.cute_kernels.variant import PLAIN, KernelVariant, LogitTransform, RowReductions
from tests.blackwell.machine_code import violations
from tests.emulation.compiled import compiled
from tests.support.tiers import rest_slow

ARCH = arch_named("sm_100a")


def variants(arch: str, variant: KernelVariant = PLAIN) -> list[ProjectExpSpec]:
    sets = [
        kernel_set(arch_named(arch), "bfloat16", KernelConfigs(config, None, None), variant)
        for config in arch_named(arch).listed["project_exp"]
    ]
    return [k for s in sets for k in (s.row_sums, s.exps, s.repair_exps)]


ALL_OPTIONS = KernelVariant(
    LogitTransform(row_scale=True, bias=True, softcap=True),
    RowReductions(entropy=True, sum_squares=True, of_others=True),
)
KERNELS = (
    *variants("sm_100a"),
    variants("sm_103a")[0],
    *variants("sm_100a", ALL_OPTIONS)[:2],
    dataclasses.replace(variants("sm_100a")[0], store=False, samples=True),
)
"""All plain kernels of sm_100a, first that which is emulated most; sm_103a is another target."""


@pytest.mark.parametrize("kernel", rest_slow(KERNELS))
def test_code_keeps_the_rules(kernel: ProjectExpSpec) -> None:
    code = compiled(kernel)
    assert f".target {kernel.arch}" in code.ptx
    assert violations(code.ptx, kernel) == []


def test_the_two_cta_kernel_is_the_default() -> None:
    assert isinstance(ARCH, Sm100)
    assert (ARCH.default(129), ARCH.default(128)) == (TWO_CTA, SINGLE_CTA)
