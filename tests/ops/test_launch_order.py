"""What the host launches for a step, and in which order, on models of the kernels."""

import functools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import cutefce
from cutefce.cute_kernels.arch import arch_named
from cutefce.cute_kernels.config import PortableTiles
from cutefce.cute_kernels.spec.gemm import GradGemmSpec
from cutefce.cute_kernels.spec.kernel import KernelSpec
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


Noted = list[KernelSpec]
"""What was launched."""


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
def test_every_step_launches_the_kernels_of_the_first(
    workspace: int | str, selects: bool, launched: Callable[..., Noted]
) -> None:
    """In its order, so that a CUDA graph may be captured after one eager step."""
    noted, given = launched(selects=selects), operands()

    def loss(*given: Tensor) -> Tensor:
        found: Tensor = cutefce.linear_cross_entropy(*given, workspace=workspace)
        return found

    def launches(function: Callable[..., Tensor]) -> tuple[Noted, Noted]:
        noted.clear()
        found = function(*given)
        forward = [*noted]
        found.backward()
        return forward, noted[len(forward) :]

    (forward, backward), *others = [launches(loss) for _ in range(4)]
    assert forward and backward and others == [(forward, backward)] * 3
    checkpointed = functools.partial(checkpoint, loss, use_reentrant=False)
    assert launches(checkpointed) == (forward, forward + backward)
    torch.compiler.reset()
    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    assert launches(compiled) == launches(compiled) == (forward, backward)
