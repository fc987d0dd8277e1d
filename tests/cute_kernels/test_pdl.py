"""Kernels launched with PDL wait for the previous kernel before they access memory.

Checks the PTX of every kind of kernel, compiled without a GPU.  A role of a kernel starts where its
registers are redistributed.
"""

import re
from collections.abc import Iterator
from dataclasses import replace

import pytest

pytest.importorskip("cutlass")

from cutefce.cute_kernels.arch import ARCHS
from cutefce.cute_kernels.arch.sm90 import Sm90
from cutefce.cute_kernels.kernel_set import kernel_set
from cutefce.cute_kernels.problem import LOW_BITS
from cutefce.cute_kernels.sampling_set import sort_entries
from cutefce.cute_kernels.spec.divergence import divergence_rows, logits_kernel
from cutefce.cute_kernels.spec.gemm import ProjectExpSpec
from cutefce.cute_kernels.spec.kernel import KernelSpec
from cutefce.cute_kernels.spec.rowwise import (
    MoveRowsSpec,
    PackedSumsSpec,
    PutSoftSpec,
    RowCoefficientsSpec,
    ScaleAddRowsSpec,
    SelectRowsSpec,
    SoftLogitsSpec,
    SortTargetsSpec,
)
from cutefce.cute_kernels.spec.sampling import ListSamplesSpec, PrepareSamplesSpec, SparseRowsSpec
from cutefce.cute_kernels.variant import KernelVariant, LogitTransform
from tests.emulation.compiled import compiled
from tests.emulation.configs import COOPERATIVE, PINGPONG, kernels_of
from tests.emulation.core import parse
from tests.support.tiers import rest_slow

SETS = {
    arch.name: kernel_set(arch, "bfloat16", arch.default_configs(8192, 4096, 132)) for arch in ARCHS
}
KERNELS = SETS[Sm90().name]
CAPPED = kernel_set(
    Sm90(),
    "bfloat16",
    Sm90().default_configs(8192, 4096, 132),
    KernelVariant(LogitTransform(row_scale=True, bias=True, softcap=True)),
)
SMALL = kernels_of(PINGPONG)
KINDS: dict[str, KernelSpec | None] = {
    "small sums": SMALL.row_sums,
    "small repair_exps": SMALL.repair_exps,
    "small grad_hidden": kernels_of(COOPERATIVE).grad_hidden,
    "select_rows": SelectRowsSpec("sm_90a"),
    "move_rows": MoveRowsSpec("sm_90a"),
    "sort_targets": SortTargetsSpec("sm_90a"),
    "target_logit": KERNELS.target_logit,
    "reduce_partials": SMALL.reduce_partials,
    "finish_dx": ScaleAddRowsSpec("sm_90a", "bfloat16", "float32", "bfloat16"),
}
"""Those of every plain step, which the emulator compiles too; `MORE` are slow to compile."""
MORE: dict[str, KernelSpec | None] = {
    f"{name} {kind}": kernel
    for name, kernels in SETS.items()
    for kind, kernel in vars(kernels).items()
    if isinstance(kernel, KernelSpec)
    and (kernels is KERNELS or not isinstance(kernel, ProjectExpSpec))
}
"""Blackwell's project_exp does not use PDL."""
for name in SETS:
    packed = PackedSumsSpec(name, "bfloat16", LOW_BITS[0], "pack")
    MORE |= {
        f"{name} move_rows": MoveRowsSpec(name),
        f"{name} gather_scaled_rows": MoveRowsSpec(name, "bfloat16"),
        f"{name} scale_rows": MoveRowsSpec(name, "bfloat16", orders=False),
        f"{name} row_coefficients": RowCoefficientsSpec(name),
        f"{name} probability_coefficients": RowCoefficientsSpec(name, in_reference=True),
        f"{name} finish_dx": ScaleAddRowsSpec(name, "bfloat16", "float32", "bfloat16"),
        f"{name} packed": packed,
        f"{name} finish_packed": replace(packed, step="finish"),
        f"{name} scale_packed_rows": replace(packed, step="scale"),
        f"{name} select_rows": SelectRowsSpec(name),
    }
MORE |= {
    "soft_logits": SoftLogitsSpec("sm_90a", "bfloat16"),
    "put_soft": PutSoftSpec("sm_90a", "bfloat16"),
    "scale_soft": PutSoftSpec("sm_90a", "bfloat16", scales=True),
    "capped sums and exps": CAPPED.row_sums,
    "capped target_logit": CAPPED.target_logit,
    "sampled sums": KERNELS.sampled_sums,
    "prepare_samples": PrepareSamplesSpec("sm_90a", "first"),
    "sort_samples": sort_entries("sm_90a", 500, softcap=False),
    "sparse_rows": SparseRowsSpec("sm_90a", "bfloat16", "hidden", blocks=3),
    "divergence of rows": divergence_rows("sm_90a", "jsd", True, True),
    "divergence of rows, read once": divergence_rows("sm_90a", "kl", False, True, True),
    "logits": logits_kernel(Sm90(), "bfloat16"),
}
ROLE = r"setmaxnreg\.\w+"
WAIT, LET = "griddepcontrol.wait", "griddepcontrol.launch_dependents"
BRANCH = re.compile(r"(@\S+ )?bra\S* (?P<label>\S+);")
ACCESS = re.compile(r"\b(ld|st|red|atom)\.[\w.:]*global\b|\bcp\.(reduce\.)?async\.bulk\.tensor\b")


def unguarded(ptx: str, every_role: bool = False) -> Iterator[str]:
    """Yield memory accesses before a wait: in the prologue, or in a role.

    Roles need no wait of their own after that of the prologue, unless `every_role` has one, where
    the prologue waits only for the number of rows.
    """
    prologue, *roles = re.split(ROLE, ptx)
    for part in [prologue] if WAIT in prologue and not every_role else [prologue, *roles]:
        for line in part.split(WAIT)[0].splitlines():
            if ACCESS.search(line):
                yield line.strip()


def reached_without_waiting(ptx: str) -> list[str]:
    """Return memory accesses on any way through a warpgroup that multiplies, up to its wait.

    A warpgroup may have no tile: then it leaves out the loop over its tiles, and waits in it.
    """
    (entry,) = re.findall(r"\.entry (\w+)\(", ptx)
    lines, labels = parse(ptx, entry)
    (start,) = (at for at, line in enumerate(lines) if line.startswith("setmaxnreg.inc"))
    ahead, seen, found = [start], set[int](), []
    while ahead:
        at = ahead.pop()
        if at in seen or at == len(lines) or WAIT in lines[at]:
            continue
        seen.add(at)
        if ACCESS.search(lines[at]):
            found.append(lines[at])
        branch = BRANCH.match(lines[at])
        if branch:
            ahead.append(labels[branch["label"]])
        if not lines[at].startswith(("ret", "bra")):
            ahead.append(at + 1)
    return found


@pytest.mark.parametrize("kernel", rest_slow(KINDS | MORE, default=len(KINDS)))
def test_no_access_before_the_wait(kernel: KernelSpec | None) -> None:
    assert kernel is not None
    ptx = compiled(kernel).ptx
    assert not list(unguarded(ptx, isinstance(kernel, ProjectExpSpec)))
    assert LET in ptx
    if isinstance(kernel, ProjectExpSpec):
        assert not reached_without_waiting(ptx)
    if not isinstance(kernel, ProjectExpSpec):
        assert ptx.count(WAIT) == 1
        assert ptx.index(WAIT) < ptx.index(LET), "waits before the next kernel starts"
        without = ptx.replace(WAIT, "")
        assert list(unguarded(without)), "detects a missing wait"


@pytest.mark.slow
def test_each_of_several_kernels_waits() -> None:
    ptx = compiled(ListSamplesSpec("sm_90a")).ptx
    _, *entries = ptx.split(".entry")
    assert len(entries) == 5
    for entry in entries:
        assert not list(unguarded(entry))
        assert entry.count(WAIT) == 1 and entry.index(WAIT) < entry.index(LET)


def test_each_role_waits() -> None:
    ptx = compiled(SMALL.row_sums).ptx
    _, *roles = re.split(ROLE, ptx)
    for role in roles:
        without = ptx.replace(role, role.replace(WAIT, ""))
        assert list(unguarded(without, every_role=True)), "detects a missing wait"
    before, after = ptx.rsplit(WAIT, 1)
    assert reached_without_waiting(before + after), "detects one that is missing behind a loop"
