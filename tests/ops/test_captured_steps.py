"""Steps in CUDA graphs of the user, and on streams of a GPU: replays follow the data."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import cutefce
from tests.support.reference import random_case
from tests.support.stand_in_gpu import forget
from tests.support.tiers import pairwise

pytestmark = pytest.mark.gpu

SIZES = 512, 256, 30000
SOME = 8 << 20
"""A workspace in which some windows are stored and others computed again."""
WORKSPACES = "min", SOME, "max"

each_workspace = pytest.mark.parametrize("workspace", WORKSPACES)


@pytest.fixture(autouse=True)
def first_calls() -> Iterator[None]:
    forget()
    yield
    forget()


def operands(sizes: tuple[int, int, int] = SIZES) -> tuple[Tensor, Tensor, Tensor]:
    case = random_case(*sizes, dtype=torch.bfloat16, device="cuda")
    return case.h.requires_grad_(), case.w.requires_grad_(), case.y


def step(
    h: Tensor, w: Tensor, y: Tensor, workspace: int | str = "max", reduction: str = "mean"
) -> list[Tensor]:
    """Return the loss, dX and dW, of leaves that share the memory of h and w."""
    h, w = h.detach().requires_grad_(), w.detach().requires_grad_()
    loss = cutefce.linear_cross_entropy(h, w, y, workspace=workspace, reduction=reduction)
    return [loss.detach(), *gradients(loss, h, w)]


def gradients(loss: Tensor, h: Tensor, w: Tensor, **more: Any) -> tuple[Tensor, ...]:
    upstream = torch.linspace(1, 2, loss.numel(), device=loss.device).view(loss.shape)
    return torch.autograd.grad(loss, (h, w), upstream, **more)


def on_cpu(results: list[Tensor]) -> list[Tensor]:
    """Return copies, which no later step or replay overwrites."""
    return [x.cpu() for x in results]


def are_equal(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(map(torch.equal, one, other))


def fewer_targets(y: Tensor, seed: int) -> Tensor:
    generator = torch.Generator(y.device).manual_seed(seed)
    return y.masked_fill(torch.rand(y.shape, generator=generator, device=y.device) < 0.5, -100)


def fill_free_memory() -> None:
    """Write NaN to memory that torch has allocated and freed outside of graphs."""
    held = []
    for size in (1 << 10, 1 << 14, 1 << 18, 1 << 22):
        held += [torch.full((size,), torch.nan, device="cuda") for _ in range(16)]


@pairwise(workspace=WORKSPACES, reduction=["mean", "none"])
def test_a_captured_step_replays_with_other_data(workspace: int | str, reduction: str) -> None:
    """After one eager step, whatever other memory holds meanwhile."""
    h, w, y = operands()
    values = [(h.detach().roll(i, 0), w.detach().roll(i, 0), fewer_targets(y, i)) for i in range(3)]
    want = [on_cpu(step(*each, workspace, reduction)) for each in values]
    forget()
    step(h, w, y, workspace, reduction)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        results = step(h, w, y, workspace, reduction)
    for each, wanted in zip(values, want, strict=True):
        for x, value in zip((h, w, y), each, strict=True):
            x.data.copy_(value)
        fill_free_memory()
        for _ in range(2):
            graph.replay()
            assert are_equal(on_cpu(results), wanted)
        # an eager step beside the graph
        assert are_equal(on_cpu(step(h, w, y, workspace, reduction)), wanted)
        assert are_equal(on_cpu(results), wanted)


@pytest.mark.parametrize(
    ("workspace", "sizes", "is_spent"),
    [*((x, SIZES, False) for x in WORKSPACES), ("min", (2048, 2048, 32000), True)],
)
def test_a_captured_backward_of_an_eager_forward(
    workspace: int | str, sizes: tuple[int, int, int], is_spent: bool
) -> None:
    """Its replays are right, read what lives, and write to no memory of others.

    Also if a backward overwrites what the forward has saved.
    """
    h, w, y = operands(sizes)
    assert cutefce.plan(h, w, workspace=workspace).program.is_spent == is_spent
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        want = on_cpu(step(h, w, y, workspace))[1:]
        loss = cutefce.linear_cross_entropy(h, w, y, workspace=workspace)
        upstream = torch.ones_like(loss)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            got = torch.autograd.grad(loss, (h, w), upstream, retain_graph=True)
        others = [torch.full((1 << 14,), torch.nan, device="cuda") for _ in range(256)]
        others += [torch.full((1 << bits,), torch.nan, device="cuda") for bits in range(18, 26)]
        for _ in range(2):
            graph.replay()
            torch.cuda.synchronize()
            assert are_equal(on_cpu([*got]), want)
        assert all(x.isnan().all() for x in others)


def test_steps_run_on_the_current_stream() -> None:
    h, w, y = operands()
    want, stream = on_cpu(step(h, w, y)), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(4):
            assert are_equal(on_cpu(step(h, w, y)), want)
        torch.cuda._sleep(1 << 28)
        results = step(h, w, y)
        assert not stream.query(), "the last step did not wait for the stream"
        assert are_equal(on_cpu(results), want)


@each_workspace
def test_a_backward_follows_its_forward_to_another_stream(workspace: int | str) -> None:
    """Autograd runs it on the stream of the forward, and lets the caller's stream wait."""
    h, w, y = operands()
    want, stream = on_cpu(step(h, w, y, workspace)), torch.cuda.Stream()
    for _ in range(4):
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            torch.cuda._sleep(1 << 26)
            loss = cutefce.linear_cross_entropy(h, w, y, workspace=workspace)
            upstream = torch.ones_like(loss)
        torch.cuda.current_stream().wait_stream(stream)
        got = torch.autograd.grad(loss, (h, w), upstream)
        assert are_equal(on_cpu([loss.detach(), *got]), want)
