"""Exponentials in the place of dW are used before they are overwritten."""

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

import cutefce
from bench.harness.timing import peak_bytes
from cutefce.cute_kernels.config import PortableTiles
from cutefce.ops.planning.dw_aliasing import max_aliased_windows
from cutefce.ops.planning.planner import Plan
from cutefce.ops.strategies.dw_views import aliased_views, free_tail
from tests.support.reference import random_case

SIZES = st.integers(1, 40), st.integers(1, 40), st.integers(1, 200), st.integers(1, 30)


@given(*SIZES)
def test_nothing_is_overwritten_before_it_was_used(
    tokens: int, hidden: int, vocab: int, window: int
) -> None:
    count = max_aliased_windows(tokens, hidden, vocab, window)
    assume(count > 0)
    dw = torch.zeros(vocab, hidden)
    rooms = aliased_views(dw, tokens, window, count * window)
    assert [first for first, _ in rooms] == list(range(0, count * window, window))
    for first, room in rooms:
        assert room.shape == (tokens, window) and not room.any(), "they do not overlap"
        room.fill_(1 + first)
    for first, room in rooms:
        dw[first : first + window] = -1
        assert (room == 1 + first).all()


@given(*SIZES)
def test_one_more_would_be(tokens: int, hidden: int, vocab: int, window: int) -> None:
    count = 1 + max_aliased_windows(tokens, hidden, vocab, window)
    assume(vocab > window)
    start = vocab * hidden - count * tokens * window
    firsts = [start + j * tokens * window for j in range(count)]
    assert any(at < (j + 1) * window * hidden for j, at in enumerate(firsts))


@given(*SIZES)
def test_the_rest_of_dw_is_room_while_it_lasts(
    tokens: int, hidden: int, vocab: int, window: int
) -> None:
    dw = torch.zeros(vocab, hidden)
    for rows in range(0, vocab + 1, window):
        room = free_tail(dw, rows, tokens, window)
        assert (room is None) == ((vocab - rows) * hidden < tokens * window)
        if room is not None:
            assert room.shape == (tokens, window)
            room.fill_(1)
            assert not dw[:rows].any()
            dw.zero_()


def least_aliasing(h: torch.Tensor, w: torch.Tensor) -> Plan:
    """Return the smallest plan of a call that aliases columns."""
    plans = (cutefce.plan(h, w, workspace=budget) for budget in range(0, 1 << 22, 1 << 10))
    return next(plan for plan in plans if plan.aliased)


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


def test_memory_that_is_saved(small_tiles: PortableTiles) -> None:
    """Of exponentials as large as dW, those of all windows but few take none."""
    case = random_case(256, 256, 4000)
    h, w = case.h.requires_grad_(), case.w.requires_grad_()
    plan = least_aliasing(h, w)
    assert 0.9 * 4000 < plan.aliased < 4000 - small_tiles.window, "some are computed again"

    def step() -> None:
        loss = cutefce.linear_cross_entropy(h, w, case.y, workspace=plan.workspace_bytes)
        torch.autograd.grad(loss, (h, w))

    step()
    beyond = peak_bytes(step, "cpu") - h.nbytes - w.nbytes
    assert beyond <= 1.1 * plan.workspace_bytes < 0.5 * 256 * 4000 * 4
