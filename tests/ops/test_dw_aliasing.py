"""Exponentials in the place of dW are used before they are overwritten."""

import pytest
import torch

import cutefce
from bench.harness.timing import peak_bytes
from cutefce.cute_kernels.config import PortableTiles
from cutefce.ops.program.plan import Plan
from tests.support.reference import random_case


def least_aliasing(h: torch.Tensor, w: torch.Tensor) -> Plan:
    """Return the smallest plan of a call that aliases columns."""
    plans = (cutefce.plan(h, w, workspace=budget) for budget in range(0, 1 << 22, 1 << 12))
    return next(plan for plan in plans if plan.layout.aliased)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_graphs_get_gradients_of_their_own(dtype: torch.dtype, small_tiles: PortableTiles) -> None:
    """With create_graph=True, and in a compiled step, dW is new, and what was saved stays."""
    case = random_case(40, 64, 333, dtype=dtype)
    h, w = case.h.requires_grad_(), case.w.requires_grad_()
    workspace = least_aliasing(h, w).workspace_bytes

    def step() -> tuple[torch.Tensor, ...]:
        loss = cutefce.linear_cross_entropy(h, w, case.y, workspace=workspace)
        return torch.autograd.grad(loss, (h, w))

    expected = step()
    loss = cutefce.linear_cross_entropy(h, w, case.y, workspace=workspace)
    for create_graph in (True, True, False):
        found = torch.autograd.grad(loss, (h, w), retain_graph=True, create_graph=create_graph)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.slow
def test_memory_that_is_saved(small_tiles: PortableTiles) -> None:
    """Of exponentials as large as dW, those of all windows but few take none."""
    case = random_case(256, 256, 4000)
    h, w = case.h.requires_grad_(), case.w.requires_grad_()
    plan = least_aliasing(h, w)
    assert 0.9 * 4000 < plan.layout.aliased < 4000, "some are computed again"

    def step() -> None:
        loss = cutefce.linear_cross_entropy(h, w, case.y, workspace=plan.workspace_bytes)
        torch.autograd.grad(loss, (h, w))

    step()
    beyond = peak_bytes(step, "cpu") - h.nbytes - w.nbytes
    assert beyond <= 1.1 * plan.workspace_bytes < 0.5 * 256 * 4000 * 4
