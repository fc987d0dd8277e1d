"""Plans that add dW to a buffer in the forward: memory, time, and chunks of ranks."""

import dataclasses
from typing import Any

import pytest
import torch

import cutefce
from bench.harness.timing import peak_bytes
from cutefce.autotune_cache.defaults import widest_window, window_configs
from cutefce.ops.dtypes import dtype_name
from cutefce.ops.interface.options import LossOptions, Sharding, StepOptions, TensorOptions
from cutefce.ops.operators.plans import plan_for
from cutefce.ops.planning.call_problem import CallProblem
from cutefce.ops.planning.chunks.plans import chunked_plan
from cutefce.ops.planning.chunks.sizes import Chunks
from cutefce.ops.planning.planner import MINIMUM, Plan, make_plan
from cutefce.ops.planning.time_model import DEVICE_RATES
from cutefce.ops.primitives.dispatch import arch_of
from tests.support.reference import exact, loss_of_plan, random_case


def test_plans() -> None:
    h = torch.empty(2048, 256, dtype=torch.bfloat16, requires_grad=True)
    w = torch.empty(32000, 256, dtype=torch.bfloat16, requires_grad=True)
    plans = {}
    for sums in (torch.float32, torch.bfloat16):
        buffer = torch.empty(w.shape, dtype=sums)
        for given in (None, 0.5, torch.tensor([0.5])):
            options: dict[str, Any] = {"accumulate_into": buffer, "grad_output": given}
            plan = cutefce.plan(h, w, workspace="min", **options)
            plans[sums, given is not None] = plan
            assert plan.adds_in_forward == ("caller's buffer" in str(plan))
    assert plans[torch.float32, True].adds_in_forward
    assert not plans[torch.float32, False].adds_in_forward
    # a buffer of 16 bits is not added to by GEMMs
    assert plans[torch.bfloat16, True] == plans[torch.bfloat16, False]


def test_plans_of_kernels_have_no_sums() -> None:
    shape, more = (32768, 4096, 131072), {"wide_grad_weight": True, "accumulates": True}
    ours: dict[str, Any] = {"arch": "sm_90a", **more}
    p = CallProblem(*shape, "bfloat16", "cuda", knows_upstream=True, **ours)
    without = dataclasses.replace(p, knows_upstream=False)
    for budget, ratio in ((300 << 20, 1.2), (1 << 30, 1.05)):
        plan, other = (make_plan(x, window_configs(x), budget, True) for x in (p, without))
        assert plan.adds_in_forward and plan.workspace_bytes <= budget
        products = 6 * p.tokens * p.hidden * p.vocab / DEVICE_RATES["cuda"][0]
        assert plan.seconds <= ratio * products < other.seconds
    chunks = Chunks.even(32768, 1024)
    config = window_configs(p)[0]
    first, second = (chunked_plan(x, config, chunks) for x in (p, without))
    # 24 bits of each of dW's sums, and 4 of dX's beside 16
    saved = 3 * p.vocab * p.hidden + p.tokens * p.hidden // 2
    assert second.workspace_bytes - first.workspace_bytes == saved


def test_ranks_have_the_same_chunks_whatever_their_buffers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One whose buffer GEMMs cannot add to keeps sums, and adds them in the backward."""
    h = torch.empty(2048, 256, dtype=torch.bfloat16, requires_grad=True)
    w = torch.empty(32000, 256, dtype=torch.bfloat16, requires_grad=True)
    monkeypatch.setattr(Sharding, "ranks", lambda _: 2)
    step, sharding = StepOptions(MINIMUM, True, True, False), Sharding("group")
    plans = []
    for sums in (torch.float32, torch.bfloat16):
        tensors = TensorOptions(
            accumulate_into=torch.empty(w.shape, dtype=sums), grad_output=torch.ones(())
        )
        plans.append(plan_for(h, w, step, LossOptions(), tensors, sharding))
    first, second = plans
    assert (first.strategy, first.chunk) == (second.strategy, second.chunk)
    assert first.adds_in_forward and not second.adds_in_forward
    assert first.workspace_bytes < second.workspace_bytes


def test_dx_is_rounded_once_with_nothing_beside(device: str) -> None:
    case = random_case(1100, 48, 333, dtype=torch.bfloat16, device=device)
    want = exact(dataclasses.replace(case, upstream=torch.full_like(case.upstream, 0.37)))
    plan = Plan("gradients_in_forward", 64, 0, 336, 256, True, True)
    known = dataclasses.replace(plan, hidden_bits=0, adds_in_forward=True)
    errors, upstream = [], torch.tensor(0.37, device=device)
    for given, own in ((None, plan), (upstream, known)):
        h, w = (x.clone().requires_grad_() for x in (case.h, case.w))
        tensors = TensorOptions(
            accumulate_into=torch.zeros(333, 48, device=device), grad_output=given
        )
        loss = loss_of_plan(h, w, case.y, own, LossOptions("sum"), tensors=tensors)
        loss.backward(upstream.to(loss.dtype))
        assert h.grad is not None
        errors.append((h.grad.double() - want.dx).norm())
    assert errors[1] <= 1.01 * errors[0]


@pytest.mark.parametrize("known", [False, True], ids=["in the backward", "in the forward"])
@pytest.mark.parametrize("trained", [(True, True), (False, True)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_peak_of_chunks_into_a_buffer_is_predicted(
    dtype: torch.dtype, trained: tuple[bool, bool], known: bool, device: str
) -> None:
    torch.compiler.reset()
    shape, chunk = (3000, 128, 20000), 768
    case = random_case(*shape, dtype=dtype, device=device, ignored=0)
    h, w = (x.requires_grad_(grad) for x, grad in zip((case.h, case.w), trained, strict=True))
    buffer = torch.zeros(*w.shape, device=device)
    upstream = torch.ones((), device=device) if known else None
    tensors = TensorOptions(accumulate_into=buffer, grad_output=upstream)
    name = dtype_name(dtype)
    more: dict[str, Any] = {"wide_grad_weight": True, "accumulates": True, "knows_upstream": known}
    problem = CallProblem(*shape, name, device, *trained, arch_of(h, w), **more)
    config, chunks = widest_window(problem), Chunks.even(problem.tokens, chunk)
    plan = chunked_plan(problem, config, chunks)
    assert plan.adds_in_forward == known

    def step() -> None:
        loss_of_plan(h, w, case.y, plan, LossOptions(), tensors=tensors).backward()
        h.grad = None

    step()
    measured = peak_bytes(step, device) - problem.gradient_bytes
    assert abs(plan.workspace_bytes - measured) <= 0.05 * measured
