"""How a call's exponentials and sums lie in memory, set by a test in place of the planner.

Tests call the public functions inside `pinned(...)`.  What a plan is, only this file knows.
"""

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from cutefce.autotune_cache.defaults import widest_window
from cutefce.cute_kernels.config import PortableTiles
from cutefce.cute_kernels.integers import ceil_div, round_up
from cutefce.cute_kernels.problem import LOW_BITS, Problem
from cutefce.ops.dtypes import dtype_name
from cutefce.ops.interface.options import LossOptions, Sharding, StepOptions, TensorOptions
from cutefce.ops.operators import operands
from cutefce.ops.planning.call_problem import with_call
from cutefce.ops.planning.memory_model import chunked_bytes, windows_bytes
from cutefce.ops.planning.planner import Plan
from cutefce.ops.planning.step_memory import kept_low_bits
from cutefce.ops.primitives.dispatch import arch_of

SMALL_TILES = PortableTiles(window=64, reference_block=16, tile_columns=32, tile_rows=32)
"""Configurations that give small problems many windows, tiles, row blocks and reference blocks."""

COLUMNS = 336
"""All columns of 333 classes in whole reference blocks of small tiles."""


@dataclass(frozen=True)
class Layout:
    """How one call runs; the defaults store nothing."""

    in_chunks: bool = False
    """Whether gradients are formed in the forward, in chunks of tokens."""
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
    adds_in_forward: bool = False
    """Whether the forward adds dW to the buffer of the caller."""

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


def windows_in_chunks(chunk: int, window: int, kept: int | None = None) -> Layout:
    """Return chunks of tokens in windows of columns, for a frozen weight.

    The last window has up to `kept` columns, by default as many as the others.
    """
    return Layout(in_chunks=True, window=window, kept=kept or window, chunk=chunk)


def chunk_of(layout: Layout, tokens: int) -> int:
    """Return the tokens of a chunk of `tokens`."""
    return max(1, min(layout.chunk or tokens, tokens))


def plan_of(
    layout: Layout,
    tokens: int,
    w: Tensor,
    gradients: tuple[bool, bool, bool],
) -> Plan:
    """Return the plan of a call of `tokens` with w (V, D) and the gradients of h, w and a bias."""
    grad_hidden, grad_weight, grad_bias = gradients
    in_chunks = layout.in_chunks and any(gradients)
    return Plan(
        strategy="gradients_in_forward" if in_chunks else "windows",
        window=layout.window,
        aliased=layout.aliased if grad_weight else 0,
        kept=layout.kept if in_chunks or any(gradients) else 0,
        chunk=chunk_of(layout, tokens) if in_chunks else tokens,
        grad_hidden=grad_hidden,
        grad_weight=grad_weight,
        grad_bias=grad_bias,
        vocab=len(w),
        tokens=tokens,
        low_bits=layout.low_bits,
        hidden_bits=layout.hidden_bits,
        adds_in_forward=layout.adds_in_forward,
    )


@contextmanager
def pinned(layout: Layout | None, tiles: PortableTiles = SMALL_TILES) -> Iterator[None]:
    """Run calls in this layout; without one, as they are planned.

    On a GPU it skips a test whose columns in gradients' memory are no blocks of the kernels.
    """
    if layout is None:
        yield
        return

    def plan_for(
        h: Tensor,
        w: Tensor,
        step: StepOptions,
        options: LossOptions,
        tensors: TensorOptions,
        sharding: Sharding,
        counted: int | None = None,
        leaves_out: bool = False,
    ) -> Plan:
        shares = layout.aliased and step.grad_weight
        if shares and tiles is SMALL_TILES and h.is_cuda and h.dtype.itemsize == 2:
            pytest.skip("kernels have wider blocks of columns in the memory of gradients")
        tokens = len(h) * (sharding.ranks() if sharding.sequence_parallel else 1)
        if leaves_out and counted is not None:
            tokens = counted
        gradients = step.grad_hidden, step.grad_weight, step.grad_bias
        return plan_of(layout, tokens, w, gradients)

    with _planned_by(plan_for):
        yield


def pinned_plan(plan: Plan) -> AbstractContextManager[None]:
    """Return a context in which calls run by the plan of another call."""
    return _planned_by(lambda *_, **__: plan)


def _planned_by(plan_for: Callable[..., Plan]) -> AbstractContextManager[Any]:
    return mock.patch.object(operands, "plan_for", plan_for)


@dataclass(frozen=True)
class Predicted:
    """A layout in the tiles of a problem, and the memory that is predicted for it."""

    layout: Layout
    tiles: PortableTiles
    workspace_bytes: int

    def pinned(self) -> Any:
        """Return a context in which calls have this layout."""
        return pinned(self.layout, self.tiles)


def predicted(
    layout: Layout,
    h: Tensor,
    w: Tensor,
    *,
    windows: int = 1,
    wider: int = 1,
    **call: Any,
) -> Predicted:
    """Return the memory of a call with h (N, D) and w (V, D), which train what requires gradients.

    A chunk has all columns at once, or `windows` of them of equal width but for a last one that has
    the memory of `wider` others; `call` are fields of `CallProblem`.
    """
    sizes = h.shape[0], h.shape[1], w.shape[0]
    where = dtype_name(h.dtype), h.device.type
    problem = Problem(*sizes, *where, h.requires_grad, w.requires_grad, arch_of(h, w))
    problem = with_call(problem, **call) if call else problem
    tiles = widest_window(problem)
    if not layout.in_chunks:
        layout = dataclasses.replace(layout, window=tiles.window)
        columns = layout.aliased, layout.kept
        needed = windows_bytes(problem, tiles, *columns, True, layout.hidden_bits)
        return Predicted(layout, tiles, needed)
    every = round_up(len(w), tiles.reference_block)
    width = every // tiles.reference_block // windows * tiles.reference_block
    kept = wider * width if windows > 1 else every
    layout = dataclasses.replace(layout, window=width, kept=kept)
    chunk = chunk_of(layout, len(h))
    low_bits = kept_low_bits(problem, ceil_div(len(h), chunk))
    layout = dataclasses.replace(layout, low_bits=low_bits)
    needed = chunked_bytes(problem, tiles, kept, chunk)
    return Predicted(layout, tiles, needed)


def can_store(dtype: torch.dtype) -> bool:
    """Whether exponentials of this dtype are stored: float16 lacks their range."""
    return dtype != torch.float16
