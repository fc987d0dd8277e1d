"""Measured peak memory of a step is what the planner predicts."""

from typing import Any

import pytest
import torch

import cutefce
from bench.harness.timing import peak_bytes
from cutefce.autotune_cache.defaults import widest_window, window_configs
from cutefce.cute_kernels.problem import Problem
from cutefce.ops.interface.checks import workspace_bytes
from cutefce.ops.interface.options import LossOptions
from cutefce.ops.planning.memory_model import chunked_bytes
from cutefce.ops.planning.planner import Plan, make_plan
from cutefce.ops.primitives.dispatch import arch_of
from tests.support.reference import loss_of_plan, random_case

SHAPES = {
    "tokens and vocabulary of a small model": (512, 128, 16001),
    "a narrow head, more rows than a tile": (1500, 32, 8003),
    "few tokens, a wide vocabulary": (60, 256, 50257),
}
MODES: dict[str, dict[str, Any]] = {
    "both": {},
    "per token": {"reduction": "none"},
    "weight alone": {"grad_hidden": False},
    "hidden alone": {"grad_weight": False},
}


def measure(
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    device: str,
    workspace: int | str | None,
    reduction: str = "mean",
    grad_hidden: bool = True,
    grad_weight: bool = True,
) -> tuple[int, int, Problem]:
    """Return predicted and measured workspace in bytes."""
    # kernels of all the shapes before could be so many that this one's would run unfused
    torch.compiler.reset()
    case = random_case(*shape, dtype=dtype, device=device)
    case.h.requires_grad_(grad_hidden)
    case.w.requires_grad_(grad_weight)
    wanted = [x for x in (case.h, case.w) if x.requires_grad]

    def step() -> None:
        loss = cutefce.linear_cross_entropy(
            case.h, case.w, case.y, reduction=reduction, workspace=workspace
        )
        if wanted:
            torch.autograd.grad(loss.sum(), wanted)

    step()
    name = str(dtype).removeprefix("torch.")
    problem = Problem(*shape, name, device, grad_hidden, grad_weight, arch_of(case.h))
    plan = make_plan(
        problem, window_configs(problem), workspace_bytes(workspace), reduction != "none"
    )
    return plan.workspace_bytes, peak_bytes(step, device) - problem.gradient_bytes, problem


@pytest.mark.parametrize("workspace", ["max", "min", 20 << 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_peak_is_predicted(
    shape: tuple[int, int, int], dtype: torch.dtype, workspace: int | str, device: str
) -> None:
    predicted, measured, _ = measure(shape, dtype, device, workspace)
    assert abs(predicted - measured) <= 0.1 * measured


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
@pytest.mark.parametrize("workspace", ["max", "min"])
def test_peak_is_predicted_for_every_use(workspace: str, mode: dict[str, Any], device: str) -> None:
    # a vocabulary of several windows, so that a window's buffers are small beside the logits
    shape = (512, 128, 16001 if device == "cpu" else 128256)
    predicted, measured, p = measure(shape, torch.float32, device, workspace, **mode)
    assert abs(predicted - measured) <= 0.1 * measured
    if workspace == "min":
        assert measured < p.tokens * p.vocab * p.item_bytes, "room for the logits"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("shape", "chunk"), [((4096, 256, 8192), 1024), ((3000, 128, 20000), 768)])
def test_the_peak_of_chunks_is_predicted(
    shape: tuple[int, int, int], chunk: int, dtype: torch.dtype, device: str
) -> None:
    torch.compiler.reset()
    case = random_case(*shape, dtype=dtype, device=device)
    leaves = case.h.requires_grad_(), case.w.requires_grad_()
    name = str(dtype).removeprefix("torch.")
    problem = Problem(*shape, name, device, arch=arch_of(case.h))
    config = widest_window(problem)
    stored = -(-shape[2] // config.reference_block) * config.reference_block
    plan = "gradients_in_forward", config.window, 0, stored, chunk

    def step() -> None:
        loss = loss_of_plan(*leaves, case.y, Plan(*plan, True, True), LossOptions())
        torch.autograd.grad(loss, leaves)

    step()
    measured = peak_bytes(step, device) - problem.gradient_bytes
    assert abs(chunked_bytes(problem, config, stored, chunk) - measured) <= 0.05 * measured


def test_a_forward_alone_needs_a_tile() -> None:
    shape = (2048, 128, 32001)
    off: dict[str, Any] = {"grad_hidden": False, "grad_weight": False}
    predicted, measured, p = measure(shape, torch.float32, "cpu", "max", **off)
    assert abs(predicted - measured) <= 0.1 * measured
    assert measured < p.tokens * p.vocab * p.item_bytes / 40
