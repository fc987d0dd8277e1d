"""Rows that do not count on a GPU: results, graphs, memory and time."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import cutefce
from bench.harness.accuracy import relative_error
from bench.harness.timing import peak_bytes
from cutefce.cute_kernels.problem import MIN_SELECTED
from tests.support.layouts import pinned, windows_in_chunks
from tests.support.options import OPTIONS, assert_results_as_accurate, options_case
from tests.support.reference import (
    Case,
    Result,
    assert_as_accurate,
    ours,
    random_case,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.compiled_rows,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0),
        reason="needs a GPU that the kernels serve",
    ),
]
TOKENS, HIDDEN, VOCAB = 3 * MIN_SELECTED + 77, 264, 9001
SHARES = [0.0, 0.5, 0.95, 1.0]


def case_of(ignored: float, dtype: torch.dtype = torch.bfloat16) -> Case:
    """Return a case that the kernels serve, with a share of the tokens ignored."""
    case = random_case(TOKENS, HIDDEN, VOCAB, dtype=dtype, ignored=ignored)
    case.y[torch.rand(TOKENS) < ignored] = -100
    return Case(*(x.cuda() for x in dataclasses.astuple(case)))


def step(case: Case, workspace: str | None) -> tuple[Tensor, ...]:
    h, w = case.h.detach().requires_grad_(), case.w.detach().requires_grad_()
    loss = cutefce.linear_cross_entropy(h, w, case.y, workspace=workspace)
    return loss.detach(), *torch.autograd.grad(loss, (h, w))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("ignored", SHARES[:3])
@pytest.mark.parametrize("workspace", ["min", None, "max"])
def test_results_are_accurate(workspace: str | None, ignored: float, dtype: torch.dtype) -> None:
    case = case_of(ignored, dtype)
    assert cutefce.backend_for(case.h, case.w).name == "cute"
    assert_as_accurate(ours(case, workspace=workspace), case)


@pytest.mark.parametrize("ignored", SHARES)
@pytest.mark.parametrize("workspace", ["min", None, "max"])
def test_what_ignored_rows_hold_does_not_matter(workspace: str | None, ignored: float) -> None:
    case = case_of(ignored)
    want = step(case, workspace)
    case.h[case.y == -100] = torch.nan
    for a, b in zip(step(case, workspace), want, strict=True):
        assert torch.equal(a, b)
    with torch.no_grad():
        loss = cutefce.linear_cross_entropy(case.h, case.w, case.y)
    torch.testing.assert_close(loss, want[0])


@pytest.mark.parametrize("name", OPTIONS)
def test_every_option(name: str) -> None:
    """Accurate, and untouched by what ignored rows hold."""
    sizes, kind = (TOKENS, HIDDEN, VOCAB), {"dtype": torch.bfloat16, "device": "cuda"}
    x = options_case([name], *sizes, **kind, ignored=0.6)
    assert_results_as_accurate(x.ours(), x)
    for workspace in ("min", "max"):
        options: dict[str, Any] = {"reduction": "mean", "workspace": workspace}
        want, rows = x.ours(**options), x.case.y == -100
        clean = x.case.h[rows].clone()
        x.case.h[rows] = torch.nan
        for a, b in zip(x.ours(**options), want, strict=True):
            assert torch.equal(a, b)
        x.case.h[rows] = clean


@pytest.mark.parametrize("workspace", ["min", 32 << 20, "max"])
def test_a_frozen_weight(workspace: int | str) -> None:
    case = case_of(0.6)
    want, h = ours(case, workspace=workspace), case.h.detach().requires_grad_()
    losses = cutefce.linear_cross_entropy(h, case.w, case.y, reduction="none", workspace=workspace)
    (dx,) = torch.autograd.grad(losses, h, case.upstream)
    assert_as_accurate(Result(losses.detach(), dx, want.dw), case)


@pytest.mark.parametrize("far", [0, 1, TOKENS], ids=["no far row", "one", "all"])
def test_windows_inside_chunks(far: int) -> None:
    case, results = case_of(0.6), []
    case.h[:far] *= 40
    for columns in (2304, 9216):
        h = case.h.detach().requires_grad_()
        with pinned(windows_in_chunks(chunk=512, window=columns)):
            loss = cutefce.linear_cross_entropy(h, case.w, case.y, reduction="sum")
        first, second = (torch.autograd.grad(loss, h, retain_graph=True)[0] for _ in range(2))
        assert torch.equal(first, second)
        results.append(first)
    assert relative_error(*results) < 2.0**-7


def test_outputs_and_the_gradient_of_entropy() -> None:
    case = case_of(0.6)
    counts = case.y != -100

    def run(h: Tensor, y: Tensor, upstream: Tensor) -> tuple[Tensor, ...]:
        h = h.detach().requires_grad_()
        out = cutefce.linear_log_probs(h, case.w, y, outputs=("entropy", "argmax"))
        assert out.entropy is not None and out.argmax is not None
        total = ((out.log_probs + out.entropy) * upstream).sum()
        return out.log_probs, out.entropy, out.argmax, *torch.autograd.grad(total, h)

    got = run(case.h, case.y, case.upstream)
    want = run(case.h[counts], case.y[counts], case.upstream[counts])
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a[counts], b, rtol=2**-7, atol=1e-5)
        assert not a[~counts].any()


def test_a_forward_alone_returns_losses_in_the_order_of_the_call() -> None:
    case = case_of(0.5)
    with torch.no_grad():
        losses = cutefce.linear_cross_entropy(case.h, case.w, case.y, reduction="none")
    torch.testing.assert_close(losses, ours(case).loss)
    assert not losses[case.y == -100].any()


@pytest.mark.parametrize("workspace", ["min", None, "max"])
def test_a_graph_is_replayed_with_another_mask(workspace: str | None) -> None:
    case, other = case_of(0.2), case_of(0.9)
    other = dataclasses.replace(case, y=torch.where(other.y == -100, -100, case.y.clamp(min=0)))
    want = step(other, workspace)
    step(case, workspace)
    graph, y = torch.cuda.CUDAGraph(), case.y.clone()
    with torch.cuda.graph(graph):
        got = step(dataclasses.replace(case, y=y), workspace)
    y.copy_(other.y)
    graph.replay()
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("ignored", [0.0, 0.8])
@pytest.mark.parametrize("workspace", ["min", None, "max"])
def test_memory_is_predicted(workspace: str | None, ignored: float) -> None:
    case = case_of(ignored)
    h, w = case.h.requires_grad_(), case.w.requires_grad_()
    predicted = cutefce.plan(h, w, workspace=workspace).workspace_bytes

    def run() -> None:
        cutefce.linear_cross_entropy(h, w, case.y, workspace=workspace).backward()
        h.grad = w.grad = None

    run()
    taken = peak_bytes(run, "cuda") - h.nbytes - w.nbytes
    assert abs(predicted - taken) <= max(0.05 * taken, 1 << 20)


def milliseconds(run: Callable[[], object]) -> float:
    """Return the median time of a call."""
    times: list[float] = []
    for _ in range(15):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        torch.cuda.synchronize()
        times.append(float(begin.elapsed_time(end)))
    return sorted(times)[len(times) // 2]


@pytest.mark.parametrize("workspace", ["min", "max"])
def test_ignored_rows_cost_little_time(workspace: str) -> None:
    sizes = 8192, 2048, 131072  # long enough for a host that other tests keep busy
    every = random_case(*sizes, dtype=torch.bfloat16, device="cuda", ignored=0)
    few = dataclasses.replace(every, y=every.y.clone())
    few.y[torch.randperm(sizes[0], device="cuda")[: int(0.9 * sizes[0])]] = -100
    times = [milliseconds(lambda case=case: step(case, workspace)) for case in (every, few)]  # type: ignore[misc]
    assert times[1] < 0.5 * times[0]
