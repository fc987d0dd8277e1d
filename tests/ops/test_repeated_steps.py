"""Steps of a training loop: each has the bits of a first one, whatever happened before it."""

import functools
import gc
import random
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import save_on_cpu

import cutefce
from tests.support.options import OPTIONS, options_case, soft_case
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


def unaligned(x: Tensor) -> Tensor:
    """Return a copy of x at an address that no kernel takes."""
    return torch.cat([x.new_zeros(1), x.detach().flatten()])[1:].view(x.shape).requires_grad_()


def wide(x: Tensor) -> Tensor:
    """Return a copy of x with gaps between its rows."""
    return x.detach().repeat(1, 2)[:, : x.shape[1]].requires_grad_()


def with_gaps(x: Tensor, offset: int = 0) -> Tensor:
    """Return a copy of x as sequences that a call has to copy, which begin at an `offset`."""
    memory = x.new_zeros(offset + TOKENS * HIDDEN + 4 * HIDDEN).detach()
    sequences = memory[offset:].view(4, -1, HIDDEN)[:, :-1]
    return sequences.copy_(x.detach().view(4, -1, HIDDEN)).requires_grad_()


def transposed(x: Tensor) -> Tensor:
    """Return a copy of x that is contiguous by columns."""
    return x.detach().t().contiguous().t().requires_grad_()


Make = Callable[[Tensor, Tensor, Tensor], Call]


def of(**options: Any) -> Make:
    """Make a step with options."""
    return lambda h, w, y: lambda: step(h, w, y, **options)


def with_others(change: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, ...]]) -> Make:
    """Make a step with operands that differ from the plain step's."""

    def make(h: Tensor, w: Tensor, y: Tensor) -> Call:
        h, w, y = change(h, w, y)
        return lambda: step(h, w, y)

    return make


def with_option(name: str) -> Make:
    """Make a step with one of `OPTIONS`."""
    return lambda h, w, y: options_case([name], *SIZES, dtype=h.dtype, device=h.device.type).ours


def with_soft_targets(h: Tensor, w: Tensor, y: Tensor) -> Call:
    return soft_case([], 5, *SIZES, dtype=h.dtype, device=h.device.type).ours


def with_the_seed_of_samples(h: Tensor, w: Tensor, y: Tensor) -> Call:
    def run() -> Results:
        torch.manual_seed(0)
        return step(h, w, y, gradient="sampled", samples=16)

    return run


def into_a_buffer(h: Tensor, w: Tensor, y: Tensor) -> Call:
    def run() -> Results:
        buffer = torch.zeros_like(w, dtype=torch.float32)
        loss = cutefce.linear_cross_entropy(h, w, y, accumulate_into=buffer)
        return loss.detach(), *torch.autograd.grad(loss, h), buffer

    return run


def without_gradients(h: Tensor, w: Tensor, y: Tensor) -> Call:
    return torch.no_grad()(lambda: (cutefce.linear_cross_entropy(h, w, y),))


def in_inference_mode(h: Tensor, w: Tensor, y: Tensor) -> Call:
    return torch.inference_mode()(lambda: (cutefce.linear_cross_entropy(h, w, y),))


def cast_by_autocast(h: Tensor, w: Tensor, y: Tensor) -> Call:
    def run() -> Results:
        with torch.autocast(h.device.type, torch.float16):
            return step(h, w, y)

    return run


def by_the_operator(h: Tensor, w: Tensor, y: Tensor) -> Call:
    def run() -> Results:
        loss = torch.ops.cutefce.loss(h, w, y)
        return loss.detach(), *gradients(loss, h, w)

    return run


def of_log_probs(h: Tensor, w: Tensor, y: Tensor) -> Call:
    def run() -> Results:
        found = cutefce.linear_log_probs(h, w, y, outputs=("lse", "entropy"))
        assert found.entropy is not None
        total = found.log_probs.sum() + found.entropy.sum()
        return found.log_probs.detach(), *torch.autograd.grad(total, (h, w))

    return run


def of_a_divergence(h: Tensor, w: Tensor, y: Tensor) -> Call:
    teacher = h.detach().flip(0), w.detach()[1:].flip(0)

    def run() -> Results:
        loss = cutefce.linear_divergence(h, w[1:], *teacher)
        return loss.detach(), *torch.autograd.grad(loss, (h, w))

    return run


CALLS: dict[str, Make] = {
    "plain": of(),
    "the operator": by_the_operator,
    "sum": of(reduction="sum"),
    "none": of(reduction="none"),
    **{f"workspace {x}": of(workspace=x) for x in (*WORKSPACES, 1)},
    **{f"{x} is ignored": of(ignore_index=x) for x in (0, 7)},
    "float16": with_others(
        lambda h, w, y: (*(x.detach().half().requires_grad_() for x in (h, w)), y)
    ),
    "no kernel has 12 columns": with_others(
        lambda h, w, y: (*(x.detach()[:, :12].float().requires_grad_() for x in (h, w)), y)
    ),
    "a float32 weight": with_others(lambda h, w, y: (h, w.detach().float().requires_grad_(), y)),
    "more tokens": with_others(
        lambda h, w, y: (h.detach().repeat(2, 1).requires_grad_(), w, y.repeat(2))
    ),
    "fewer classes": with_others(
        lambda h, w, y: (h, w.detach()[:-1].requires_grad_(), y % (VOCAB - 1))
    ),
    "sequences": with_others(
        lambda h, w, y: (h.detach().view(4, -1, HIDDEN).requires_grad_(), w, y.view(4, -1))
    ),
    "wide hidden states": with_others(lambda h, w, y: (wide(h), w, y)),
    "a wide weight": with_others(lambda h, w, y: (h, wide(w), y)),
    "unaligned hidden states": with_others(lambda h, w, y: (unaligned(h), w, y)),
    "an unaligned weight": with_others(lambda h, w, y: (h, unaligned(w), y)),
    "both unaligned": with_others(lambda h, w, y: (unaligned(h), unaligned(w), y)),
    "unaligned sequences that are copied": with_others(
        lambda h, w, y: (with_gaps(h, offset=1), w, y.view(4, -1))
    ),
    "an unaligned weight beside sequences that are copied": with_others(
        lambda h, w, y: (with_gaps(h), unaligned(w), y.view(4, -1))
    ),
    "transposed hidden states": with_others(lambda h, w, y: (transposed(h), w, y)),
    "narrow targets": with_others(lambda h, w, y: (h, w, y.int())),
    "spread targets": with_others(lambda h, w, y: (h, w, y.repeat_interleave(2)[::2])),
    "frozen hidden states": with_others(lambda h, w, y: (h.detach(), w, y)),
    "a frozen weight": with_others(lambda h, w, y: (h, w.detach(), y)),
    "no gradients": without_gradients,
    "inference mode": in_inference_mode,
    "autocast": cast_by_autocast,
    **{f"option {name}": with_option(name) for name in OPTIONS},
    "soft targets": with_soft_targets,
    "samples": with_the_seed_of_samples,
    "a buffer": into_a_buffer,
    "log-probabilities": of_log_probs,
    "a divergence": of_a_divergence,
}
"""Calls that differ from the plain one in a single thing."""


def test_calls_of_any_kinds_take_turns(device: str) -> None:
    """Each call has the results that it has alone, in whatever order the calls come."""
    calls = {name: make(*operands(device, ignored=0)) for name, make in CALLS.items()}
    want = {name: alone(call) for name, call in calls.items()}
    forget()
    turns = [*calls] * 3
    random.Random(0).shuffle(turns)
    for name in turns:
        assert have_same_bits(calls[name](), want[name]), name


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_calls_on_two_gpus_take_turns() -> None:
    """Also while the GPU of the call is not the current one."""
    calls: list[Call] = [
        *(functools.partial(step, *operands(f"cuda:{index}")) for index in (0, 1)),
        without_gradients(*operands("cuda:1")),
    ]
    want = [alone(call) for call in calls]
    for current in (1, 0, 1, 0):
        with torch.cuda.device(current):
            for call, results in zip(calls, want, strict=True):
                assert have_same_bits(call(), results)


@pytest.mark.parametrize(
    "updated",
    ["input", "linear_weight", "target", "linear_bias", "weight", "token_weights", "temperature"],
)
def test_steps_follow_updates_in_place(updated: str, device: str) -> None:
    named = {name: name for name in OPTIONS} | {"temperature": "temperature (N,)"}
    options = [named[updated]] if updated in named else []
    x = options_case(options, *SIZES, dtype=torch.bfloat16, device=device)
    leaves = x.leaves
    given = {"input": leaves[0], "linear_weight": leaves[1], "target": x.case.y}
    given |= x.with_leaves(leaves)
    values = [given[updated].detach().roll(count, 0) for count in range(5)]
    want = []
    for value in values:
        other = value.clone().requires_grad_(given[updated].requires_grad)
        want.append(alone(lambda: step(**given | {updated: other})))  # noqa: B023
    forget()
    for value, results in zip(values, want, strict=True):
        given[updated].data.copy_(value)
        assert have_same_bits(step(**given), results)


@pytest.mark.parametrize("changed", range(3), ids=["h", "w", "y"])
def test_an_update_before_the_backward_is_refused(changed: int, device: str) -> None:
    given = operands(device)
    for _ in range(3):
        loss = cutefce.linear_cross_entropy(*given)
        with torch.no_grad():
            given[changed].mul_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


@pytest.mark.parametrize("workspace", WORKSPACES)
def test_what_is_trained_may_change_between_steps(workspace: int | str, device: str) -> None:
    h, w, y = operands(device)
    want: dict[tuple[bool, bool], Results] = {}

    def train(grad_h: bool, grad_w: bool) -> Results:
        return step(h.requires_grad_(grad_h), w.requires_grad_(grad_w), y, workspace=workspace)

    kinds = [(True, True), (True, False), (False, True), (False, False)]
    want = {kind: alone(lambda: train(*kind)) for kind in kinds}  # noqa: B023
    forget()
    for kind in kinds * 3:
        assert have_same_bits(train(*kind), want[kind])
    assert all(torch.equal(results[0], want[True, True][0]) for results in want.values())


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
        assert x.grad is not None and torch.equal(x.grad, functools.reduce(torch.add, steps))
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


WRONG: dict[str, Callable[[Tensor], dict[str, Any]]] = {
    "target: got shape": lambda y: {"target": y[1:]},
    "workspace: got True": lambda y: {"workspace": True},
    "workspace: got 1.0": lambda y: {"workspace": 1.0},
    "shards: got": lambda y: {"shards": [VOCAB]},
}


@pytest.mark.parametrize(("said", "wrong"), WRONG.items(), ids=WRONG)
def test_wrong_calls_are_found_after_right_ones(said: str, wrong: Any, device: str) -> None:
    """Also those that differ from a right one in a value that compares equal."""
    h, w, y = operands(device)
    given: dict[str, Any] = {"input": h, "linear_weight": w, "target": y, "workspace": 1}
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            want = cutefce.linear_cross_entropy(**given)
            with pytest.raises((TypeError, ValueError), match=said):
                cutefce.linear_cross_entropy(**given | wrong(y))
            assert torch.equal(cutefce.linear_cross_entropy(**given), want)
