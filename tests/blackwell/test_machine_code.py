"""The compiled code for Blackwell keeps the rules, and each rule detects faults."""

import dataclasses
import functools
import re
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
from tests.emulation.configs import broken
from tests.support.tiers import rest_slow

ARCH = arch_named("sm_100a")


def variants(
    arch: str, dtype: str = "bfloat16", variant: KernelVariant = PLAIN
) -> list[ProjectExpSpec]:
    sets = [
        kernel_set(arch_named(arch), dtype, KernelConfigs(config, None, None), variant)
        for config in arch_named(arch).prebuilt_configs()
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


def sums_and_exps(config: int) -> ProjectExpSpec:
    """Return a configuration's kernel that returns sums and stores exponentials."""
    return variants("sm_100a")[3 * config]


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


# configuration, pattern, replacement, and the rule that must detect the fault
FAULTS = {
    "a barrier expects one arrival too many": (
        0, r"(mbarrier\.init\S+\s+\[%r1\+112\]), %r\d+", r"\1, 9", "barriers"),
    "a barrier is not initialized": (0, r"mbarrier\.init\S+\s+\[%r1\+8\].*", "", "barriers"),
    "barriers are not fenced": (0, r"fence\.mbarrier_init\S+", "", "setup"),
    "tensor memory is used before the peer has allocated": (
        0, r"barrier\.cluster\.wait;(?=[^$]*ld\.shared)", "", "setup"),
    "the address of tensor memory is read before it is allocated": (
        1, r"bar\.sync\s+0;(?=[^$]*ld\.shared)", "", "setup"),
    "half of the tensor memory is allocated": (
        0, r"(tcgen05\.alloc\S+\s+\[%r\d+\]), %r\d+", r"\1, 256", "tensor_memory"),
    "tensor memory is not freed": (0, r"tcgen05\.dealloc.*", "", "tensor_memory"),
    "the permit to allocate is not relinquished": (
        0, r"tcgen05\.relinquish.*", "", "tensor_memory"),
    "tensor memory is freed while it is read": (
        0, r"barrier\.cluster\.arrive;(?![\s\S]*cluster\.arrive)", "", "tensor_memory"),
    "a pair allocates for one block": (
        0, r"tcgen05\.alloc\.cta_group::2", "tcgen05.alloc.cta_group::1", "tensor_memory"),
    "half of the bytes are expected": (0, r"(mov\.b32\s+%r\d+), 65536;", r"\1, 32768;", "loads"),
    "h is multicast": (
        1, r"(shared::)cta(\.global\.tile\.mbarrier::complete_tx::bytes)",
        r"\1cluster\2.multicast::cluster", "loads"),
    "a pair's second block counts for itself": (0, r"-16777224", "-8", "loads"),
    "a stage is filled without waiting": (
        0, r"mbarrier\.try_wait(?=[\s\S]*expect_tx)[^\n]*", "", "loads"),
    "a pair uses the single-CTA MMA": (
        0, r"cta_group::2\.kind", "cta_group::1.kind", "operands"),
    "operands of another dtype": (0, r"272630928", "272629776", "operands"),
    "operands of another size": (0, r"272630928", "272499856", "operands"),
    "matrices of another swizzle": (
        0, "4611756662049538048", "6917599671263232000", "operands"),
    "a quarter of a stage is skipped": (
        0, r"(add\.s32\s+%r\d+, %r\d+), 2;", r"\1, 4;", "operands"),
    "a tile accumulates onto the previous one": (
        0, r"(mov\.pred\s+%p\d+), 0;", r"\1, -1;", "operands"),
    "K tiles overwrite each other": (
        0, r"(mov\.pred\s+%p\d+), -1;", r"\1, 0;", "operands"),
    "a stage is released before its MMAs": (
        0, r"((?:tcgen05\.mma[^\n]*\n[\s\S]*?){4})(tcgen05\.commit[^\n]*\n)", r"\2\1", "products"),
    "a commit reaches one block of a pair": (
        0, r"(tcgen05\.commit[^\n]*), %rs\d+;", r"\1, 1;", "products"),
    "a commit arrives at another barrier": (
        0, r"(tcgen05\.commit\S+\s+\[%r\d+)\+48\]", r"\1]", "products"),
    "MMAs start on an accumulator without a fence": (
        0, r"tcgen05\.fence::after_thread_sync;(?=[^$]*shl\.b32\s+%r\d+, %r\d+, 8;\s+add\.s32\s+"
        r"%r\d+, %r\d+, %r\d+;\s+@%p\d+ bra)", "", "products"),
    "logits are not waited for": (0, r"tcgen05\.wait::ld\S*", "", "reads"),
    "a logit is used before it is loaded": (
        0, r"(\{(%r\d+)(?:, %r\d+)+\}, \[[^\n]*\n)(?=[\s\S]{0,9000}tcgen05\.wait::ld)",
        r"\1add.s32 %r1, \2, 1;\n", "reads"),
    "diverged lanes read tensor memory": (
        0, r"bar\.warp\.sync\s+-1;(?=[^$@]*tcgen05\.ld)", "", "reads"),
    "diverged lanes allocate": (
        0, r"bar\.warp\.sync\s+-1;(?=[^$@]*tcgen05\.alloc)", "", "tensor_memory"),
    "logits are read without a fence": (
        0, r"tcgen05\.fence::after_thread_sync;(?=[^@]*tcgen05\.ld\.)", "", "reads"),
    "an accumulator is released without a fence": (
        0, r"tcgen05\.fence::before_thread_sync;(?=\s+elect)", "", "reads"),
    "every lane releases an accumulator": (
        0, r"elect\.sync[^\n]*\n[^\n]*\n[^\n]*\n(?=[^$]*mbarrier\.arrive\.shared)", "", "reads"),
    "an accumulator is released twice": (
        0, r"(mbarrier\.arrive\.shared[^\n]*\n)", r"\1\1", "reads"),
    "an accumulator is released before it is read": (
        0, r"(tcgen05\.ld\.[\s\S]*?)(mbarrier\.arrive\.shared[^\n]*\n)", r"\2\1", "reads"),
    "a pair's second block releases its own accumulator": (
        0, r"(mapa\S+\s+%r\d+, %r\d+), %r\d+;", r"\1, %cluster_ctarank;", "reads"),
    "loads of another shape": (0, r"32x32b\.x64", "16x256b.x64", "reads"),
    "an epilogue tile is written while it is stored": (
        0, r"cp\.async\.bulk\.wait_group\.read\s+1;", "", "stores"),
    "an epilogue tile is stored without a proxy fence": (
        0, r"fence\.proxy\.async\S+", "", "stores"),
    "an epilogue tile is stored before all lanes wrote": (
        0, r"(fence\.proxy\.async\S+\s+)bar\.warp\.sync\s+-1;", r"\1", "stores"),
    "a store is in no group": (0, r"cp\.async\.bulk\.commit_group;", "", "stores"),
    "a block ends before its stores": (
        0, r"cp\.async\.bulk\.wait_group\.read\s+0;", "", "stores"),
    "an exponential is missing": (
        0, r"ex2\.approx\.ftz\.f32[^\n]*", "", "exponentials"),
    "registers are spilled": (0, r"(tcgen05\.dealloc)", r"st.local.b32 [%r1], %r2;\n\1",
                              "registers"),
}  # fmt: skip


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(fault, marks=[pytest.mark.slow] if config else [])
        for fault, (config, *_) in FAULTS.items()
    ],
)
def test_a_fault_is_detected(fault: str) -> None:
    config, pattern, replacement, rule = FAULTS[fault]
    kernel = sums_and_exps(config)
    assert rule in violations(broken(kernel, pattern, replacement), kernel)


SASS_FAULTS = [
    (0, "UTCHMMA.2CTA", "UTCHMMA"),
    (0, "LDTM.x64", "LDTM.x32"),
    (0, "UTMASTG.2D", "STL"),
    (0, "UTMALDG.2D.2CTA", "UTMALDG.2D"),
    (0, "UTCBAR.2CTA.MULTICAST", "UTCBAR.2CTA"),
]


@pytest.mark.parametrize("fault", rest_slow(SASS_FAULTS))
def test_a_fault_in_the_machine_code_is_detected(
    fault: tuple[int, str, str], tmp_path: Path
) -> None:
    config, found, wrong = fault
    kernel = sums_and_exps(config)
    sass = disassemble(compiled(kernel).cubin, tmp_path)
    changed = re.sub(rf"{re.escape(found)}\b(?!\.)", wrong, sass, count=1)
    assert set(assembly_violations(changed, kernel)) == {found, wrong}


def test_the_two_cta_kernel_is_the_default() -> None:
    assert isinstance(ARCH, Sm100)
    assert (ARCH.default(129), ARCH.default(128)) == (TWO_CTA, SINGLE_CTA)
