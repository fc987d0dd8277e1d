"""How a call's exponentials and sums lie in memory, set by a test in place of its plan.

Tests call the public functions inside `pinned(...)`.  What a plan is, only this file knows.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from cutefce.cute_kernels.config import PortableTiles
from cutefce.cute_kernels.integers import round_up
from cutefce.cute_kernels.problem import LOW_BITS
from cutefce.ops.budgets import MAXIMUM
from cutefce.ops.interface.arguments import (
    LossCall,
    LossOptions,
    Sharding,
    StepOptions,
    TensorOptions,
)
from cutefce.ops.operators import operands
from cutefce.ops.operators.plans import loss_problem
from cutefce.ops.program import layout as program_layout
from cutefce.ops.program.plan import Plan, planned
from cutefce.ops.program.problem import LossProblem

SMALL_TILES = PortableTiles(window=64, reference_block=16, tile_columns=32, tile_rows=32)
"""Configurations that give small problems many windows, tiles, row blocks and reference blocks."""

COLUMNS = 336
"""All columns of 333 classes in whole reference blocks of small tiles."""


def several_tiles(device: str) -> tuple[int, int, int]:
    """Return tokens, hidden size and classes of several tiles and a part of one.

    On a GPU they are tiles of kernels, elsewhere small ones.
    """
    return (150, 48, 333) if device == "cuda" else (70, 48, 203)


def tiles_of(request: pytest.FixtureRequest, device: str) -> tuple[int, int, int]:
    """Return `several_tiles`, as many as on a GPU in a slow case: roundings of few differ more."""
    return several_tiles("cuda" if request.node.get_closest_marker("slow") else device)


@dataclass(frozen=True)
class Layout:
    """How one call runs; the defaults store nothing."""

    in_chunks: bool = False
    """Whether the forward has chunks of tokens; it forms their gradients, if any are wanted."""
    aliased: int = 0
    """Columns whose exponentials have the memory of dW: the first ones."""
    kept: int = 0
    """Columns after these whose exponentials have memory of their own."""
    window: int = SMALL_TILES.window
    """Columns of a window."""
    chunk: int | None = None
    """Tokens of a chunk; None for all of them."""
    hidden_bits: int | None = None
    """Bits of each of dX's sums beside 16; None for float32 ones."""
    low_bits: int = LOW_BITS[-1]
    """Bits of each of dW's sums over chunks beside 16."""

    @property
    def stores(self) -> bool:
        """Whether exponentials are stored until the backward, or of all columns in a chunk."""
        return self.aliased + self.kept > 0

    @property
    def reduction(self) -> str:
        """The reduction of a loss that this layout serves, whose tokens have gradients."""
        return "sum" if self.in_chunks else "none"


WINDOWS = {
    "nothing kept": Layout(),
    "some kept": Layout(kept=64),
    "everything kept": Layout(kept=COLUMNS),
    "some aliased": Layout(aliased=64),
    "some aliased, some kept": Layout(aliased=64, kept=128),
    "the rest kept": Layout(aliased=64, kept=272),
}
"""Layouts of any call with 333 classes, in small tiles."""

CHUNKS = {
    "in chunks": Layout(in_chunks=True, kept=COLUMNS, chunk=40),
    "in one chunk": Layout(in_chunks=True, kept=COLUMNS),
}
"""Layouts of calls with one upstream gradient for all tokens."""

LAYOUTS = WINDOWS | CHUNKS


def windows_in_chunks(chunk: int, window: int) -> Layout:
    """Return chunks of tokens in windows of columns, for a frozen weight."""
    return Layout(in_chunks=True, window=window, kept=window, chunk=chunk)


def chunk_of(layout: Layout, tokens: int) -> int:
    """Return the tokens of a chunk of `tokens`."""
    return max(1, min(layout.chunk or tokens, tokens))


def plan_of(layout: Layout, p: LossProblem, device: torch.device) -> Plan:
    """Return the plan of a problem in a layout; beside Triton, tokens that count come first."""
    if p.triton:
        p = p.sorted()
    every = round_up(p.vocab, p.block)
    in_chunks, chunk = layout.in_chunks, chunk_of(layout, p.tokens)
    low = layout.low_bits if in_chunks else layout.hidden_bits or 0
    if not p.accumulates_wider or (p.dx_item != p.item_bytes and not in_chunks):
        low = 0
    if in_chunks:
        window = layout.window if 0 < layout.kept < p.vocab else every
        x = program_layout.Layout(chunk, window, low_bits=low, in_chunks=True)
    else:
        most = program_layout.most_aliased(p, p.block)
        aliased = min(layout.aliased, most)
        kept = layout.kept if p.needs_gradients else 0
        x = program_layout.Layout(max(p.tokens, 1), layout.window, kept, aliased, low)
    return replace(planned(p, x), device=device)


@contextmanager
def pinned(layout: Layout | None) -> Iterator[None]:
    """Run calls in this layout; without one, as they are planned.

    On a GPU it skips a test whose columns in gradients' memory are no blocks of the kernels.
    """
    if layout is None:
        yield
        return

    def plan_for(x: LossCall, counted: int | None = None, leaves_out: bool = False) -> Plan:
        shares = layout.aliased and x.step.grad_weight
        if shares and x.h.is_cuda and x.h.dtype.itemsize == 2:
            pytest.skip("kernels have wider blocks of columns in the memory of gradients")
        problem = loss_problem(x)
        if leaves_out and counted is not None:
            problem = problem.of_tokens(counted)
        return plan_of(layout, problem, x.h.device)

    with _planned_by(plan_for):
        yield


def pinned_plan(plan: Plan) -> AbstractContextManager[None]:
    """Return a context in which calls run by the plan of another call."""
    return _planned_by(lambda *_, **__: plan)


def predicted(layout: Layout, h: Tensor, w: Tensor) -> Plan:
    """Return the plan of a mean loss with h (N, D) and w (V, D), which train what requires it."""
    step = StepOptions(MAXIMUM, h.requires_grad, w.requires_grad, False)
    records = step, LossOptions(), TensorOptions(), Sharding()
    y = torch.empty(len(h), dtype=torch.long, device=h.device)
    return plan_of(layout, loss_problem(LossCall(h, w, y, *records)), h.device)


def _planned_by(plan_for: Callable[..., Plan]) -> AbstractContextManager[Any]:
    return mock.patch.object(operands, "plan_for", plan_for)


def can_store(dtype: torch.dtype) -> bool:
    """Whether exponentials of this dtype are stored: float16 lacks their range."""
    return dtype != torch.float16
