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
from cutefce.cute_kernels.parts import SOFT_TARGETS
from cutefce.cute_kernels.sampling_set import SORT_SIZES, sampling_kernels
from cutefce.cute_kernels.spec import GradGemmSpec, KernelSpec, ProjectExpSpec
from cutefce.cute_kernels.spec.divergence import divergence_kernels

GEMMS = ProjectExpSpec, GradGemmSpec


def default_kernels(arch: Arch) -> dict[str, KernelSpec]:
    """Return kernels of bfloat16 that calls without a tuned table launch, by their names.

    Of the GEMMs all, of the others one of each kind: `make wheel` requires of all to be clean.
    """
    tokens = ahead.MANY_TOKENS
    configs = ahead.with_gradients(arch, arch.default(tokens))[0]
    kernels = kernel_set(arch, "bfloat16", configs)
    found: list[KernelSpec] = [kernels.row_sums, *kernels.all(), *kernels.of_part(SOFT_TARGETS)]
    found += sampling_kernels(kernels, tokens, SORT_SIZES[0])
    found += divergence_kernels(arch, "bfloat16")
    first = {type(kernel): kernel for kernel in reversed(found)}
    return {str(x): x for x in found if isinstance(x, GEMMS) or x is first[type(x)]}


KERNELS = default_kernels(Sm90()) | default_kernels(Sm100())


@pytest.mark.slow
@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)
def test_it_compiles_clean(kernel: KernelSpec, folder: Path) -> None:
    assert compiled_clean(compile_ahead(kernel))
    assert len(list(folder.rglob("*.so"))) == 1
