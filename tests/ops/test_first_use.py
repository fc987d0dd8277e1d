"""First calls: tuning sees their problems alone; without a compiler they run in plain torch."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import cutefce
from cutefce.autotune_cache import lookup
from cutefce.autotune_cache.tuning import first_use
from cutefce.cute_kernels.jit.cache import CompilerError
from cutefce.cute_kernels.problem import Problem
from cutefce.cute_kernels.spec import KernelSpec
from tests.support.layouts import Layout, pinned
from tests.support.reference import ours, random_case
from tests.support.stand_in_gpu import served_by_kernels
from tests.support.tiers import rest_slow


@pytest.fixture
def tuned(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Problem]]:
    """Serve a CPU by models of the kernels; return the problems that are tuned."""
    problems: list[Problem] = []
    monkeypatch.setenv(lookup.AUTOTUNE_VARIABLE, "1")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(
        first_use, "tune_on_first_use", lambda gpu, device, problem: problems.append(problem)
    )
    with served_by_kernels("cpu"):
        yield problems


@pytest.mark.parametrize("workspace", rest_slow(["min", 0, 1 << 20, "max"]))
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
    with pinned(Layout(in_chunks=True, window=1024, kept=3072, chunk=512)):
        cutefce.linear_cross_entropy(h, w, case.y).backward()
    assert {(p.tokens, p.hidden, p.vocab) for p in tuned} == {(1100, 16, 3000)}


@pytest.mark.parametrize("options", [{}, {"softcap": 3.0}, {"gradient": "sampled"}], ids=str)
def test_a_compiler_that_fails_leaves_plain_torch(options: dict[str, Any]) -> None:
    tried: list[KernelSpec] = []

    def fail(kernel: KernelSpec) -> Callable[..., None]:
        tried.append(kernel)
        raise CompilerError(kernel, ValueError("no such target"))

    case = random_case(300, 16, 1000, dtype=torch.bfloat16)
    with served_by_kernels("cpu", fail):
        for _ in range(2):
            losses = ours(case, **options).loss
        assert len(tried) == 1
        backend = cutefce.backend_for(case.h, case.w)
    assert torch.equal(losses, ours(case, **options).loss)
    assert backend.name == "torch"
    assert backend.reason.endswith("the kernels' compiler failed: ValueError: no such target")


def test_a_buffer_is_not_added_to_twice_without_a_compiler() -> None:
    def fail(kernel: KernelSpec) -> Callable[..., None]:
        raise CompilerError(kernel, ValueError("no such target"))

    case = random_case(300, 16, 1000, dtype=torch.bfloat16)
    h, w, buffer = case.h.requires_grad_(), case.w.requires_grad_(), torch.zeros_like(case.w)
    with served_by_kernels("cpu", fail), pytest.raises(CompilerError):
        cutefce.linear_cross_entropy(h, w, case.y, accumulate_into=buffer, grad_output=1.0)
