"""Tuning on first use sees the problems of calls, and no others."""

from collections.abc import Iterator

import pytest
import torch

import cutefce
from cutefce.autotune_cache import lookup
from cutefce.autotune_cache.tuning import first_use
from cutefce.cute_kernels import process_cache
from cutefce.cute_kernels.arch.sm90 import Sm90
from cutefce.cute_kernels.gpu import Gpu
from cutefce.cute_kernels.problem import Problem
from cutefce.ops.interface.options import LossOptions
from cutefce.ops.planning.planner import Plan
from cutefce.ops.primitives import dispatch
from tests.support.kernel_models import use_models
from tests.support.reference import loss_of_plan, random_case


@pytest.fixture
def tuned(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Problem]]:
    """Serve a CPU by models of the kernels; return the problems that are tuned."""
    pytest.importorskip("cutlass")
    problems: list[Problem] = []
    use_models(monkeypatch)
    monkeypatch.setenv(lookup.AUTOTUNE_VARIABLE, "1")
    monkeypatch.setattr(dispatch, "_device_unsupported_reason", lambda device, dtype: None)
    monkeypatch.setattr(dispatch, "gpu_of", lambda device: Gpu(Sm90(), "a model", 132))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(
        first_use, "tune_on_first_use", lambda gpu, device, problem: problems.append(problem)
    )
    process_cache.reset()
    yield problems
    process_cache.reset()


@pytest.mark.parametrize("workspace", ["min", 0, 1 << 20, "max"])
def test_only_problems_of_calls_are_tuned(workspace: int | str, tuned: list[Problem]) -> None:
    case = random_case(1100, 16, 3000, dtype=torch.bfloat16, ignored=0)
    h, w = case.h.requires_grad_(), case.w.requires_grad_()
    for _ in range(2):
        cutefce.linear_cross_entropy(h, w, case.y, workspace=workspace).backward()
    assert tuned
    assert {(p.tokens, p.hidden, p.vocab) for p in tuned} == {(1100, 16, 3000)}


def test_gradients_in_forward_tune_no_other_problem(tuned: list[Problem]) -> None:
    """Its backward only scales rows, which is no problem of tokens against a vocabulary."""
    case = random_case(1100, 16, 3000, dtype=torch.bfloat16, ignored=0)
    h, w = case.h.requires_grad_(), case.w.requires_grad_()
    plan = Plan("gradients_in_forward", 1024, 0, 3072, 512, True, True)
    loss_of_plan(h, w, case.y, plan, LossOptions()).backward()
    assert {(p.tokens, p.hidden, p.vocab) for p in tuned} == {(1100, 16, 3000)}
