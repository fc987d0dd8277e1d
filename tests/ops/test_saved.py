"""What a forward keeps for its backward lives as long as the graph, and can be computed again."""

import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import (
    allow_mutation_on_saved_tensors,
    save_on_cpu,
    saved_tensors_hooks,
)
from torch.utils.checkpoint import checkpoint

import cutefce
from cutefce.cute_kernels.config import PortableTiles
from cutefce.ops import torch_compat
from cutefce.ops.operators import saved
from cutefce.ops.program import run
from tests.support.backends import Backend, on_backends
from tests.support.layouts import LAYOUTS, Layout, pinned
from tests.support.options import options_case, soft_case
from tests.support.reference import are_same, random_case
from tests.support.tiers import pairwise


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    assert_nothing_is_left()
    yield
    assert_nothing_is_left()


def assert_nothing_is_left() -> None:
    if saved._saved:
        gc.collect()
    assert not saved._saved


def leaves(dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor, Tensor]:
    case = random_case(150, 48, 333, dtype=dtype, device=device)
    return case.h.requires_grad_(), case.w.requires_grad_(), case.y


def loss_of(layout: Layout, h: Tensor, w: Tensor, y: Tensor) -> Tensor:
    with pinned(layout):
        return cutefce.linear_cross_entropy(h, w, y, reduction="sum")


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("captures", [(1, None, 1), (None, 1, None)], ids=str)
def test_a_backward_outside_of_the_forwards_capture_overwrites_nothing_of_it(
    captures: tuple[int | None, ...],
    layout: Layout,
    small_tiles: PortableTiles,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A replay of either graph would find, or overwrite, what the other has written.

    Nor does one after it, in the forward's capture.  What is read again lives as long as the graph.
    """
    h, w, y = leaves(torch.bfloat16, "cpu")
    want = torch.autograd.grad(loss_of(layout, h, w, y), (h, w))
    monkeypatch.setattr(run, "capture_id", lambda: captures[0])
    loss = loss_of(layout, h, w, y)
    ((_, results),) = saved._saved.values()
    memory = results.memory
    before = {home: x.view(torch.uint8).clone() for home, x in memory.by_home.items()}
    for capture in captures[1:]:
        monkeypatch.setattr(run, "capture_id", lambda capture=capture: capture)
        got = torch.autograd.grad(loss, (h, w), retain_graph=True)
        assert all(map(torch.equal, got, want))
        made = memory.by_home
        assert all(torch.equal(x.view(torch.uint8), before[home]) for home, x in made.items())
        owned = {x.untyped_storage().data_ptr() for x in made.values() if x.numel()}
        assert not owned & {x.untyped_storage().data_ptr() for x in got}
    del results


def test_without_bindings_no_two_captures_are_taken_for_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    first, second = torch_compat.capture_id(), torch_compat.capture_id()
    assert first is not None and first != second
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert torch_compat.capture_id() is None


@pytest.mark.gpu
@pytest.mark.parametrize("workspace", ["min", "max"])
def test_replays_of_a_captured_forward_leave_gradients_alone(workspace: str) -> None:
    case = random_case(300, 256, 1000, dtype=torch.bfloat16, device="cuda")
    h, w = case.h.requires_grad_(), case.w.requires_grad_()

    def forward() -> Tensor:
        return cutefce.linear_cross_entropy(h, w, case.y, workspace=workspace)

    want = torch.autograd.grad(forward(), (h, w))
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        loss = forward()
    graph.replay()
    got = torch.autograd.grad(loss, (h, w))
    first = [x.clone() for x in got]
    case.y.copy_(case.y.roll(1))
    graph.replay()
    torch.cuda.synchronize()
    assert all(map(torch.equal, got, first)) and all(map(torch.equal, got, want))


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_a_graph_that_is_dropped_frees_it(
    layout: Layout, small_tiles: PortableTiles, device: str
) -> None:
    h, w, y = leaves(torch.float32, device)
    loss = loss_of(layout, h, w, y)
    assert len(saved._saved) == 1
    del loss
    assert not saved._saved  # at once, without a garbage collection
    loss_of(layout, h, w, y).backward()
    assert not saved._saved


CHANGED = "target", "linear_bias", "temperature", "target_indices", "target_probs"


@on_backends(few_backends=True, layout=LAYOUTS, name=CHANGED)
def test_what_is_given_may_change_where_it_is_saved(
    layout: Layout, name: str, backend: Backend
) -> None:
    """A backward gets copies then; what the forward saved may lie in the memory that was changed.

    So it is where a compiler writes over arguments that it computes again.
    """
    make = soft_case if name.startswith("target_") else options_case
    how: dict[str, Any] = {"dtype": backend.dtype, "device": backend.device}
    more = [3] if make is soft_case else []
    x = make(["linear_bias", "temperature (N,)"], *more, 150, 48, 333, ignored=0, **how)

    def gradients(change: bool) -> tuple[Tensor, ...]:
        leaves = x.leaves
        given = x.with_leaves(leaves) | {"target": x.case.y}
        if make is soft_case:
            del given["target"]
        with allow_mutation_on_saved_tensors(), pinned(layout):
            given[name] = given[name].clone()
            loss = cutefce.linear_cross_entropy(*leaves[:2], **given, reduction=layout.reduction)
            if change:
                with torch.no_grad():
                    given[name].zero_()
            upstream = torch.ones_like(loss)
            return torch.autograd.grad(loss, leaves[:2], upstream)

    assert all(map(torch.equal, gradients(True), gradients(False)))


def copied() -> AbstractContextManager[None]:
    return saved_tensors_hooks(lambda x: x.clone(), lambda x: x)


HOOKS: dict[str, Callable[[], Any]] = {"copied": copied, "on the CPU": save_on_cpu}


@pairwise(layout=LAYOUTS, hooks=HOOKS)
def test_saved_tensors_may_be_moved(
    layout: Layout, hooks: Callable[[], Any], small_tiles: PortableTiles, device: str
) -> None:
    h, w, y = leaves(torch.float32, device)
    results = []
    for context in (nullcontext, hooks):
        with pinned(layout):
            with context():
                loss = cutefce.linear_cross_entropy(h, w, y)
            results.append(torch.autograd.grad(loss, (h, w)))
    for a, b in zip(*results, strict=True):
        assert are_same(a, b)


@pairwise(workspace=["min", 1 << 16, "max"], use_reentrant=[False, True])
def test_checkpoints_keep_nothing(
    workspace: int | str, use_reentrant: bool, small_tiles: PortableTiles, device: str
) -> None:
    h, w, y = leaves(torch.float32, device)

    def loss(h: Tensor, w: Tensor) -> Tensor:
        return cutefce.linear_cross_entropy(h, w, y, workspace=workspace)

    expected = torch.autograd.grad(loss(h, w), (h, w))
    again = checkpoint(loss, h, w, use_reentrant=use_reentrant)
    assert not saved._saved
    again.backward()
    for x, gradient in zip((h, w), expected, strict=True):
        assert x.grad is not None and are_same(x.grad, gradient)
