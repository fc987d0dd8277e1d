"""Steps of a training loop: each has the bits of a first one, whatever happened before it."""

import gc
import random
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial, reduce
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import save_on_cpu

import cutefce
from tests.support.options import LOSSES
from tests.support.stand_in_gpu import forget, select_rows, served_by_kernels
from tests.support.steps import (
    HIDDEN,
    ROWS,
    SIZES,
    TOKENS,
    VOCAB,
    WORKSPACES,
    Results,
    alone,
    gradients,
    have_same_bits,
    operands,
    step,
)
from tests.support.tiers import pairwise, rest_slow

Call = Callable[[], Results]
DTYPES = torch.bfloat16, torch.float16, torch.float32


@pytest.fixture(autouse=True)
def kernels(device: str) -> Iterator[pytest.MonkeyPatch]:
    with served_by_kernels(device) as patch:
        yield patch


@pairwise(
    reduction=["mean", "sum", "none"],
    workspace=WORKSPACES,
    dtype=[torch.bfloat16, torch.float16],
    selects=ROWS,
)
def test_each_step_of_a_loop_has_the_bits_of_the_first(
    reduction: str,
    workspace: int | str,
    dtype: torch.dtype,
    selects: bool,
    device: str,
    kernels: pytest.MonkeyPatch,
) -> None:
    select_rows(kernels, selects)
    h, w, y = operands(device, dtype)
    steps = [step(h, w, y, reduction=reduction, workspace=workspace) for _ in range(5)]
    assert have_same_bits(*steps)


def test_a_bias_gets_the_same_bits_of_many_tokens(device: str) -> None:
    """Terms of one class are added in one order, also by several threads."""
    y = torch.randint(3, (1 << 15,), device=device)
    h, w = torch.randn(len(y), 8, device=device), torch.randn(40, 8, device=device)
    bias = torch.zeros(40, device=device, requires_grad=True)
    loss = cutefce.linear_cross_entropy(h, w, y, linear_bias=bias)
    first, *others = (torch.autograd.grad(loss, bias, retain_graph=True)[0] for _ in range(8))
    assert all(torch.equal(x, first) for x in others)


def unaligned(x: Tensor) -> Tensor:
    """Return a copy of x at an address that no kernel takes."""
    return torch.cat([x.new_zeros(1), x.detach().flatten()])[1:].view(x.shape).requires_grad_()


def with_gaps(x: Tensor, offset: int = 0) -> Tensor:
    """Return a copy of x as sequences that a call has to copy, which begin at an `offset`."""
    memory = x.new_zeros(offset + TOKENS * HIDDEN + 4 * HIDDEN).detach()
    sequences = memory[offset:].view(4, -1, HIDDEN)[:, :-1]
    return sequences.copy_(x.detach().view(4, -1, HIDDEN)).requires_grad_()


def calls_of_any_kinds(device: str) -> dict[str, Call]:
    """Return calls by names: of each loss, dtype, gradient and workspace, and of any operands."""
    h, w, y = operands(device, ignored=0)
    gaps, rows = with_gaps(h), y.view(4, -1)
    calls: dict[str, Call] = {
        "unaligned hidden states": partial(step, unaligned(h), w, y),
        "an unaligned weight": partial(step, h, unaligned(w), y),
        "unaligned sequences that are copied": partial(step, with_gaps(h, offset=1), w, rows),
        "an unaligned weight beside them": partial(step, gaps, unaligned(w), rows),
        "transposed hidden states": partial(step, h.detach().t().contiguous().t(), w, y),
        "more tokens": partial(step, h.detach().repeat(2, 1), w, y.repeat(2)),
        "fewer classes": partial(step, h, w.detach()[:-1], y % (VOCAB - 1)),
    }
    calls |= {f"workspace {x}": partial(step, h, w, y, workspace=x) for x in (*WORKSPACES, 1)}
    for name, make in LOSSES.items():
        for dtype in DTYPES if name == "plain" else DTYPES[:1]:
            x = make(*SIZES, dtype=dtype, device=device)
            calls[f"{name}, {dtype}"] = x.ours
            calls[f"{name}, {dtype}, mean"] = partial(x.ours, reduction="mean")
            calls[f"{name}, {dtype}, a frozen weight"] = partial(x.ours, trained=(True, False))
    return calls


@pytest.mark.slow
def test_calls_of_any_kinds_take_turns(device: str) -> None:
    """Each call has the results that it has alone, in whatever order the calls come."""
    calls = calls_of_any_kinds(device)
    want = {name: alone(call) for name, call in calls.items()}
    forget()
    turns = [*calls] * 2
    random.Random(0).shuffle(turns)
    for name in turns:
        assert have_same_bits(calls[name](), want[name]), name


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_calls_on_two_gpus_take_turns() -> None:
    """Also while the GPU of the call is not the current one."""
    calls: list[Call] = [
        *(partial(step, *operands(f"cuda:{index}")) for index in (0, 1)),
        torch.no_grad()(partial(step, *operands("cuda:1"))),
    ]
    want = [alone(call) for call in calls]
    for current in (1, 0, 1, 0):
        with torch.cuda.device(current):
            for call, results in zip(calls, want, strict=True):
                assert have_same_bits(call(), results)


@pytest.mark.parametrize("changed", range(3), ids=["h", "w", "y"])
def test_an_update_before_the_backward_is_refused(changed: int, device: str) -> None:
    given = operands(device)
    for _ in range(3):
        loss = cutefce.linear_cross_entropy(*given)
        with torch.no_grad():
            given[changed].mul_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


@pairwise(
    workspace=WORKSPACES,
    reduction=["mean", "none"],
    frozen={"trained": False, "frozen": True},
    selects=ROWS,
)
def test_every_backward_of_a_graph_has_the_same_bits(
    workspace: int | str,
    reduction: str,
    frozen: bool,
    selects: bool,
    device: str,
    kernels: pytest.MonkeyPatch,
) -> None:
    """Also after another step, and where what the graph has saved was moved."""
    select_rows(kernels, selects)
    h, w, y = operands(device)
    w.requires_grad_(not frozen)
    more: dict[str, Any] = {"reduction": reduction, "workspace": workspace}
    want = step(h, w, y, **more)
    for _ in range(2):  # of a first step, and of a repeat
        loss = cutefce.linear_cross_entropy(h, w, y, **more)
        for create_graph in (False, True):
            got = gradients(loss, h, w, retain_graph=True, create_graph=create_graph)
            assert have_same_bits((loss, *got), want)
        other = step(h, w, y.roll(1), **more)
        assert have_same_bits((loss, *gradients(loss, h, w)), want)
        assert not have_same_bits(other, want)
        with save_on_cpu():
            loss = cutefce.linear_cross_entropy(h, w, y, **more)
        assert have_same_bits((loss, *gradients(loss, h, w)), want)


@pytest.mark.parametrize("workspace", WORKSPACES)
def test_gradients_accumulate(workspace: int | str, device: str) -> None:
    """And no step writes to what another one has returned."""
    h, w, y = operands(device)
    parts = [y.roll(count) for count in range(4)]
    want = [step(h, w, part, workspace=workspace) for part in parts]
    copies = [tuple(x.clone() for x in results) for results in want]
    for part in parts:
        loss = cutefce.linear_cross_entropy(h, w, part, workspace=workspace)
        loss.backward(torch.full_like(loss, -1.0))
    for x, steps in zip((h, w), zip(*(results[1:] for results in want), strict=True), strict=True):
        assert x.grad is not None and torch.equal(x.grad, reduce(torch.add, steps))
    assert all(map(have_same_bits, want, copies))


@pytest.mark.parametrize("workspace", rest_slow(WORKSPACES))
def test_threads_take_steps_at_the_same_time(workspace: int | str, device: str) -> None:
    h, w, y = operands(device)
    targets = [y.roll(count) for count in range(4)]
    want = [step(h, w, each, workspace=workspace) for each in targets]
    ready = threading.Barrier(len(targets))

    def run(target: Tensor) -> list[Results]:
        ready.wait()
        return [step(h, w, target, workspace=workspace) for _ in range(5)]

    with ThreadPoolExecutor(len(targets)) as threads:
        for results, each in zip(want, threads.map(run, targets), strict=True):
            assert have_same_bits(results, *each)


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("selects", rest_slow(ROWS))
def test_steps_with_samples_have_the_bits_of_their_seed(
    selects: bool, reduction: str, device: str, kernels: pytest.MonkeyPatch
) -> None:
    select_rows(kernels, selects)
    h, w, y = operands(device)
    more: dict[str, Any] = {"reduction": reduction, "gradient": "sampled", "samples": 16}

    def sampled(seed: int) -> Tensor:
        torch.manual_seed(seed)
        loss: Tensor = cutefce.linear_cross_entropy(h, w, y, **more)
        return loss

    results = []
    for seed in (0, 1, 0, 0):
        loss = sampled(seed)
        results.append((loss, *gradients(loss, h, w, retain_graph=True)))
    again = loss, *gradients(loss, h, w)
    with save_on_cpu():
        loss = sampled(0)
    moved = loss, *gradients(loss, h, w)
    other = results.pop(1)
    assert have_same_bits(*results, again, moved)
    # kernels that sample have other tiles, so that their row sums are rounded otherwise
    exact = step(h, w, y, reduction=reduction)[0]
    torch.testing.assert_close(other[0].detach(), exact, rtol=2.0**-20, atol=0)
    assert not torch.equal(other[1], moved[1])


@pytest.mark.parametrize("workspace", rest_slow(WORKSPACES))
def test_no_reference_cycle_keeps_tensors(workspace: int | str, device: str) -> None:
    """Whether the graph is used, dropped, or refused to be used again."""
    gc.collect()
    gc.disable()
    try:
        for use in ("backward", "nothing", "two backwards", "no gradients") * 2:
            given = operands(device)
            with torch.set_grad_enabled(use != "no gradients"):
                loss = cutefce.linear_cross_entropy(*given, workspace=workspace)
            seen = [weakref.ref(x) for x in (*given, loss)]
            if "backward" in use:
                loss.backward()
            if use == "two backwards":
                with pytest.raises(RuntimeError):
                    loss.backward()
            del given, loss
            until = time.monotonic() + 1.0  # a thread of autograd's may hold them a little longer
            while device != "cpu" and any(x() is not None for x in seen):
                assert time.monotonic() < until, use
            assert not [x for x in seen if x() is not None], use
    finally:
        gc.enable()
