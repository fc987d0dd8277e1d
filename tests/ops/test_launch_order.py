"""The order in which the host launches what a step takes, on models of the kernels."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import cutefce
from cutefce.cute_kernels.arch import arch_named
from cutefce.cute_kernels.config import PortableTiles
from cutefce.cute_kernels.spec import (
    GatherRowsSpec,
    KernelSpec,
    PrepareSoftSpec,
    ProjectExpSpec,
    SelectRowsSpec,
    SoftLogitsSpec,
    TargetLogitSpec,
)
from cutefce.ops.rows import loss_parts
from tests.support.kernel_models import model_of, serve_calls


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
    before: set[Any] = {SelectRowsSpec, TargetLogitSpec, GatherRowsSpec}
    joins = arch == "sm_90a"
    if joins:
        before |= {"parts"} if outputs else {"parts", PrepareSoftSpec}
    assert set(launched[:product]) == before
    assert launched.count("parts") == 1 and launched.count(SoftLogitsSpec) == 1 - joins
    assert any(beside) == joins
    assert launched.count(PrepareSoftSpec) == (not outputs)
