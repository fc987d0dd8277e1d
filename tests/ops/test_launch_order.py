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
from cutefce.cute_kernels.spec import (
    GradGemmSpec,
    KernelSpec,
    MoveRowsSpec,
    PrepareSoftSpec,
    ProjectExpSpec,
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


@pytest.mark.parametrize(
    ("workspace", "trained", "forward", "backward", "again"), STEPS.values(), ids=STEPS
)
def test_launches_of_steps(
    workspace: str | int | Layout,
    trained: str,
    forward: str,
    backward: str,
    again: str,
    monkeypatch: pytest.MonkeyPatch,
    small_tiles: PortableTiles,
) -> None:
    """A second backward computes again only what was not stored, or is overwritten."""
    pytest.importorskip("cutlass")
    launched: list[str] = []

    def recorded(kernel: KernelSpec) -> Callable[..., None]:
        name = type(kernel).__name__.removesuffix("Spec")
        if isinstance(kernel, GradGemmSpec):
            name = f"Grad{kernel.wrt.capitalize()}"

        def launch(*arguments: Any) -> None:
            launched.append(name)
            model_of(kernel)(*arguments)

        return launch

    def launches(run: Callable[[], Any]) -> tuple[Any, str]:
        launched.clear()
        return run(), " ".join(launched)

    serve_calls(monkeypatch, arch_named("sm_90a"), small_tiles, selects=True, replacement=recorded)
    h = torch.randn(150, 64, dtype=torch.bfloat16, requires_grad="h" in trained)
    w = torch.randn(333, 64, dtype=torch.bfloat16, requires_grad="w" in trained)
    y = torch.randint(333, (150,))

    def run() -> Tensor:
        if isinstance(workspace, Layout):
            with pinned(workspace):
                return cutefce.linear_cross_entropy(h, w, y)
        return cutefce.linear_cross_entropy(h, w, y, workspace=workspace)

    loss, names = launches(run)
    assert re.fullmatch(forward, names)
    for expected in (backward, again):
        _, names = launches(lambda: loss.backward(retain_graph=True))
        assert re.fullmatch(expected, names), names


@pytest.mark.parametrize("selects", [False, True], ids=["all rows", "selected rows"])
@pytest.mark.parametrize("workspace", ["min", 40 << 10, "max"])
def test_a_repeat_launches_the_kernels_of_the_first_step(
    workspace: int | str,
    selects: bool,
    monkeypatch: pytest.MonkeyPatch,
    small_tiles: PortableTiles,
) -> None:
    """And no others, so that a CUDA graph may be captured after one eager step."""
    pytest.importorskip("cutlass")
    launched: set[KernelSpec] = set()

    def recorded(kernel: KernelSpec) -> Callable[..., None]:
        def launch(*arguments: Any) -> None:
            launched.add(kernel)
            model_of(kernel)(*arguments)

        return launch

    arch = arch_named("sm_90a")
    serve_calls(monkeypatch, arch, small_tiles, selects=selects, replacement=recorded)
    h = torch.randn(150, 64, dtype=torch.bfloat16, requires_grad=True)
    w = torch.randn(333, 64, dtype=torch.bfloat16, requires_grad=True)
    y = torch.randint(333, (150,))
    steps = []
    for _ in range(2):
        launched.clear()
        cutefce.linear_cross_entropy(h, w, y, workspace=workspace).backward()
        steps.append(set(launched))
    assert steps[0] == steps[1] != set()


@pytest.mark.parametrize("outputs", [False, True], ids=["soft targets", "outputs"])
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_parts_of_soft_targets_are_made_once(
    arch: str,
    outputs: bool,
    monkeypatch: pytest.MonkeyPatch,
    small_tiles: PortableTiles,
) -> None:
    """Before a product that writes their logits, else behind it, where the GPU is busy."""
    pytest.importorskip("cutlass")
    launched: list[Any] = []
    beside: list[bool] = []

    def recorded(kernel: KernelSpec) -> Callable[..., None]:
        def launch(*operands: Any) -> None:
            launched.append(type(kernel))
            beside.append(getattr(kernel, "soft", False))
            model_of(kernel)(*operands)

        return launch

    def parts_of(*arguments: Any) -> Any:
        launched.append("parts")
        return loss_parts.parts_of(*arguments)

    monkeypatch.setattr("cutefce.ops.rows.targets.parts_of", parts_of)
    serve_calls(monkeypatch, arch_named(arch), small_tiles, selects=True, replacement=recorded)
    h = torch.randn(150, 64, dtype=torch.bfloat16, requires_grad=True)
    w = torch.randn(333, 64, dtype=torch.bfloat16, requires_grad=True)
    index, probs = torch.randint(333, (150, 7)), torch.rand(150, 7)
    if outputs:
        named = cutefce.linear_log_probs(h, w, target_indices=index, workspace="max")
        loss = -(named.log_probs * probs).sum()
    else:
        loss = cutefce.linear_cross_entropy(
            h, w, target_indices=index, target_probs=probs, workspace="max"
        )
    loss.backward()
    product = launched.index(ProjectExpSpec)
    before: set[Any] = {SelectRowsSpec, TargetLogitSpec, MoveRowsSpec}
    joins = arch == "sm_90a"
    if joins:
        before |= {"parts"} if outputs else {"parts", PrepareSoftSpec}
    assert set(launched[:product]) == before
    assert launched.count("parts") == 1 and launched.count(SoftLogitsSpec) == 1 - joins
    assert any(beside) == joins
    assert launched.count(PrepareSoftSpec) == (not outputs)
