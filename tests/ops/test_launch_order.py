"""What the host launches for a step, and in which order, on models of the kernels."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import cutefce
from cutefce.cute_kernels.arch import arch_named
from cutefce.cute_kernels.config import PortableTiles
from cutefce.cute_kernels.spec.gemm import GradGemmSpec, ProjectExpSpec
from cutefce.cute_kernels.spec.kernel import KernelSpec
from cutefce.cute_kernels.spec.rowwise import (
    MoveRowsSpec,
    SelectRowsSpec,
    SoftLogitsSpec,
    TargetLogitSpec,
)
from cutefce.ops.rows import loss_parts
from tests.support.kernel_models import model_of, serve_calls
from tests.support.layouts import Layout, pinned

FORWARD = "SelectRows MoveRows TargetLogit ProjectExp ReducePartials"
REPAIR = "ProjectExp"
"""Of stored exponentials whose reference was too far from the logits, which the device knows."""
BEFORE_DW = "RowCoefficients SortTargets MoveRows"
STEPS: dict[str, tuple[str | int | Layout, str, str, str, str]] = {
    "a plain step": (
        "max",
        "hw",
        f"{FORWARD} {REPAIR}",
        f"{BEFORE_DW} GradHidden GradWeight ScaleAddRows",
        f"{BEFORE_DW} GradHidden GradWeight ScaleAddRows",
    ),
    "in little memory": (
        0,
        "hw",
        FORWARD,
        f"{BEFORE_DW}( ProjectExp GradHidden GradWeight)+ KeptSums",
        f"{BEFORE_DW}( ProjectExp GradHidden GradWeight)+ KeptSums",
    ),
    "a frozen head": (
        "max",
        "h",
        f"{FORWARD} {REPAIR}",
        "RowCoefficients GradHidden ScaleAddRows",
        "RowCoefficients GradHidden ScaleAddRows",
    ),
    "a frozen head in chunks": (
        Layout(in_chunks=True, kept=336, low_bits=4),
        "h",
        f"{FORWARD} {REPAIR} GradHidden KeptSums",
        "RowCoefficients KeptSums",
        f"{FORWARD} {REPAIR} GradHidden KeptSums RowCoefficients KeptSums",
    ),
    "a frozen head in little memory": (
        0,
        "h",
        FORWARD,
        "RowCoefficients MoveRows( ProjectExp GradHidden)+ KeptSums",
        "RowCoefficients MoveRows( ProjectExp GradHidden)+ KeptSums",
    ),
    "frozen hidden states": (
        "max",
        "w",
        f"{FORWARD} {REPAIR}",
        f"{BEFORE_DW} GradWeight",
        f"{BEFORE_DW} GradWeight",
    ),
}
"""Workspace or layout, what is trained, and the launches of a forward and of two backwards.

Each has a regular expression, in which windows repeat.
"""


Noted = list[Any]
"""What was launched: kernels, and "parts" where those of a loss were made."""


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch, small_tiles: PortableTiles) -> Callable[..., Noted]:
    """Return a function that serves calls by models of kernels, and returns what they launch."""
    pytest.importorskip("cutlass")
    noted: Noted = []

    def recorded(kernel: KernelSpec) -> Callable[..., None]:
        def launch(*arguments: Any) -> None:
            noted.append(kernel)
            model_of(kernel)(*arguments)

        return launch

    def serve(arch: str = "sm_90a", selects: bool = True) -> Noted:
        how: dict[str, Any] = {"selects": selects, "replacement": recorded}
        serve_calls(monkeypatch, arch_named(arch), small_tiles, **how)
        return noted

    return serve


def operands(trained: str = "hw") -> tuple[Tensor, Tensor, Tensor]:
    h = torch.randn(150, 64, dtype=torch.bfloat16, requires_grad="h" in trained)
    w = torch.randn(333, 64, dtype=torch.bfloat16, requires_grad="w" in trained)
    return h, w, torch.randint(333, (150,))


def name_of(kernel: KernelSpec) -> str:
    if isinstance(kernel, GradGemmSpec):
        return f"Grad{kernel.wrt.capitalize()}"
    return type(kernel).__name__.removesuffix("Spec")


@pytest.mark.parametrize(
    ("workspace", "trained", "forward", "backward", "again"), STEPS.values(), ids=STEPS
)
def test_launches_of_steps(
    workspace: str | int | Layout,
    trained: str,
    forward: str,
    backward: str,
    again: str,
    launched: Callable[..., Noted],
) -> None:
    """A second backward computes again only what was not stored, or is overwritten."""
    noted, (h, w, y) = launched(), operands(trained)
    if isinstance(workspace, Layout):
        with pinned(workspace):
            loss = cutefce.linear_cross_entropy(h, w, y)
    else:
        loss = cutefce.linear_cross_entropy(h, w, y, workspace=workspace)
    assert re.fullmatch(forward, " ".join(map(name_of, noted)))
    for expected in (backward, again):
        noted.clear()
        loss.backward(retain_graph=True)
        names = " ".join(map(name_of, noted))
        assert re.fullmatch(expected, names), names


@pytest.mark.parametrize("selects", [False, True], ids=["all rows", "selected rows"])
@pytest.mark.parametrize("workspace", ["min", 40 << 10, "max"])
def test_a_repeat_launches_the_kernels_of_the_first_step(
    workspace: int | str, selects: bool, launched: Callable[..., Noted]
) -> None:
    """And no others, so that a CUDA graph may be captured after one eager step."""
    noted, given = launched(selects=selects), operands()
    steps = []
    for _ in range(2):
        noted.clear()
        cutefce.linear_cross_entropy(*given, workspace=workspace).backward()
        steps.append(set(noted))
    assert steps[0] == steps[1] != set()


@pytest.mark.parametrize("outputs", [False, True], ids=["soft targets", "outputs"])
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_parts_of_soft_targets_are_made_once(
    arch: str, outputs: bool, launched: Callable[..., Noted], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind the product, where the GPU is busy."""
    noted, (h, w, _) = launched(arch), operands()

    def parts_of(*arguments: Any) -> Any:
        noted.append("parts")
        return loss_parts.parts_of(*arguments)

    monkeypatch.setattr("cutefce.ops.rows.targets.parts_of", parts_of)
    index, probs = torch.randint(333, (150, 7)), torch.rand(150, 7)
    if outputs:
        named = cutefce.linear_log_probs(h, w, target_indices=index, workspace="max")
        loss = -(named.log_probs * probs).sum()
    else:
        loss = cutefce.linear_cross_entropy(
            h, w, target_indices=index, target_probs=probs, workspace="max"
        )
    loss.backward()
    kinds = [x if x == "parts" else type(x) for x in noted]
    before = {SelectRowsSpec, TargetLogitSpec, MoveRowsSpec}
    assert set(kinds[: kinds.index(ProjectExpSpec)]) == before
    assert kinds.count("parts") == kinds.count(SoftLogitsSpec) == 1
