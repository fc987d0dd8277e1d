"""The compiled code for Blackwell keeps the rules."""

import dataclasses
import functools
import subprocess
from importlib import metadata
from pathlib import Path

import pytest

pytest.importorskip("cutlass")

from cutefce.cute_kernels.arch import arch_named
from cutefce.cute_kernels.arch.sm100 import SINGLE_CTA, TWO_CTA, Sm100
from cutefce.cute_kernels.config import KernelConfigs
from cutefce.cute_kernels.kernel_set import kernel_set
from cutefce.cute_kernels.spec.gemm import ProjectExpSpec
from cutefce.cute_kernels.variant import PLAIN, KernelVariant, LogitTransform, RowReductions
from tests.blackwell.machine_code import assembly_violations, violations
from tests.emulation.compiled import compiled
from tests.support.tiers import rest_slow

ARCH = arch_named("sm_100a")


def variants(
    arch: str, dtype: str = "bfloat16", variant: KernelVariant = PLAIN
) -> list[ProjectExpSpec]:
    sets = [
        kernel_set(arch_named(arch), dtype, KernelConfigs(config, None, None), variant)
        for config in arch_named(arch).listed["project_exp"]
    ]
    return [k for s in sets for k in (s.row_sums, s.exps, s.repair_exps)]


ALL_OPTIONS = KernelVariant(
    LogitTransform(row_scale=True, bias=True, softcap=True),
    RowReductions(entropy=True, sum_squares=True, of_others=True),
)
KERNELS = (
    *variants("sm_100a"),
    *variants("sm_103a")[::3],
    *variants("sm_103a", "float16")[:2],
    *variants("sm_100a", variant=ALL_OPTIONS)[::3],
    variants("sm_100a", variant=ALL_OPTIONS)[1],
    variants("sm_100a", variant=KernelVariant(LogitTransform(row_scale=True, bias=True)))[0],
    variants("sm_100a", variant=KernelVariant(reductions=RowReductions(of_others=True)))[0],
    dataclasses.replace(variants("sm_100a")[0], store=False, samples=True),
)
"""All plain kernels of sm_100a, first that which is emulated most.

sm_103a differs in the target, float16 in the operands.
"""


def describe(kernel: ProjectExpSpec) -> str:
    kinds = [name for name in ("sums", "store", "only_flagged", "samples") if getattr(kernel, name)]
    for options in (kernel.transform, kernel.reductions):
        kinds += [name for name, asked in options._asdict().items() if asked]
    return f"{kernel.arch} {kernel.dtype} {kernel.config}: {' '.join(kinds)}"


@functools.cache
def disassembler() -> Path:
    files = metadata.files("nvidia-cuda-nvdisasm") or []
    return next(Path(str(f.locate())) for f in files if f.name == "nvdisasm")


def disassemble(cubin: bytes, folder: Path) -> str:
    path = folder / "kernel.cubin"
    path.write_bytes(cubin)
    return subprocess.run(
        [disassembler(), "-c", path], capture_output=True, text=True, check=True
    ).stdout


@pytest.mark.parametrize("kernel", rest_slow({describe(kernel): kernel for kernel in KERNELS}))
def test_code_keeps_the_rules(kernel: ProjectExpSpec, tmp_path: Path) -> None:
    code = compiled(kernel)
    assert f".target {kernel.arch}" in code.ptx
    assert violations(code.ptx, kernel) == []
    assert assembly_violations(disassemble(code.cubin, tmp_path), kernel) == []


def test_the_two_cta_kernel_is_the_default() -> None:
    assert isinstance(ARCH, Sm100)
    assert (ARCH.default(129), ARCH.default(128)) == (TWO_CTA, SINGLE_CTA)
