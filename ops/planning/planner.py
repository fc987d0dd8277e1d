"""From a problem and a memory budget to a plan, with the memory and time it is predicted to take.

Pure Python.  With N tokens, D hidden, V vocab,
K columns kept, L aliased (`dw_aliasing`) and G gradients (0 to 2), the model of time is

    windows                2·N·D·((1 + G)·V + (V - K - L)) FLOP; dX's sums are read and written
                           once a window, recomputed logits once; narrow windows alias more
                           columns, but there are more of them
    gradients in forward   2·N·D·(1 + G)·V FLOP; dW's sums are read and written once a chunk,
                           and the gradients once more in the backward
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from cutefce.cute_kernels.config import WindowConfig
from cutefce.cute_kernels.integers import ceil_div, round_up
from cutefce.cute_kernels.problem import Problem, can_keep
from cutefce.ops.planning.dw_aliasing import max_aliased_windows
from cutefce.ops.planning.memory_model import chunk_token_bytes, chunked_bytes, windows_bytes

MINIMUM = 0
"""The budget "min": the smallest plan."""
MAXIMUM = 1 << 62
"""The budget "max": the fastest plan."""
DEFAULT = 5 << 29
"""2.5 GiB: all exponentials of 8192 tokens and 128k classes in bfloat16, about what a compiled
unfused loss takes for the same; larger problems keep a part and recompute the rest."""

MIN_CHUNK = 1024
"""Tokens of a chunk below which reading and writing dW's sums takes most of the time."""
CHUNK_ALIGNMENT = 256
"""Chunks are multiples of this many tokens: a row block of the kernels."""

DEVICE_RATES = {"cpu": (1e11, 2e10, 0.0), "cuda": (7e14, 4e12, 6e-5)}
"""(FLOP/s, bytes/s, seconds a window) by device type; a GPU's are an H200's, where GEMMs of few
columns leave SMs idle at their start and end."""


@dataclass(frozen=True)
class Plan:
    """How one call runs."""

    strategy: str
    """"windows" or "gradients_in_forward"."""
    window: int
    """Vocabulary columns of a window."""
    aliased: int
    """Columns whose exponentials use dW's memory until the backward: the first ones, whole
    windows."""
    kept: int
    """Columns after these whose exponentials have memory until the backward, or while a chunk is
    processed: whole reference blocks."""
    chunk: int
    """Tokens of a chunk; all of them with "windows"."""
    grad_hidden: bool
    """Whether dX is computed."""
    grad_weight: bool
    """Whether dW is computed."""
    vocab: int = 0
    """Vocabulary columns of this rank."""
    workspace_bytes: int = 0
    """Predicted peak memory beyond the inputs and the gradients."""
    seconds: float = 0.0
    """Predicted time of forward and backward; for comparing plans of one problem."""

    @property
    def in_forward(self) -> bool:
        """Whether gradients are formed in the forward."""
        return self.strategy == "gradients_in_forward"

    def __str__(self) -> str:
        name = self.strategy.replace("_", " ")
        vocab = max(self.vocab, 1)
        kept, aliased = min(self.kept / vocab, 1), self.aliased / vocab
        size = f"{kept:.0%} kept" + f", {aliased:.0%} in the memory of dW" * (aliased > 0)
        size = f"chunks of {self.chunk} tokens" if self.in_forward else size
        return (
            f"{name}, {size}, {self.window} columns at a time: "
            f"{self.workspace_bytes / 2**20:.1f} MiB, {self.seconds * 1e3:.1f} ms predicted"
        )


def make_plan(
    problem: Problem,
    configs: Sequence[WindowConfig],
    budget: int,
    scalar_upstream: bool,
    scales_rows: bool = False,
) -> Plan:
    """Return the fastest plan within `budget` bytes, or the smallest one if none is.

    `configs` are for windows of several widths, the widest first.  `scalar_upstream` says that
    every token's loss gets the same upstream gradient, `scales_rows` that the loss itself has
    factors of tokens.
    """
    candidates = [_windows(problem, configs, budget, scalar_upstream and not scales_rows)]
    if scalar_upstream and problem.gradient_bytes and can_keep(problem.dtype):
        candidates.append(_gradients_in_forward(problem, configs[0], budget))
    affordable = [c for c in candidates if c.workspace_bytes <= budget]
    if affordable:
        return min(affordable, key=lambda c: c.seconds)
    return min(candidates, key=lambda c: c.workspace_bytes)


def replan_for_shard(
    plan: Plan,
    p: Problem,
    configs: Sequence[WindowConfig],
    budget: int,
    scalar_upstream: bool,
    scales_rows: bool = False,
) -> Plan:
    """Return `plan`, which was made for the widest shard, for shard `p`, with the same chunks."""
    if not plan.in_forward:
        return _windows(p, configs, budget, scalar_upstream and not scales_rows)
    config = configs[0]
    stored = round_up(p.vocab, config.reference_block)
    return dataclasses.replace(
        plan,
        vocab=p.vocab,
        window=config.window,
        aliased=0,
        kept=stored,
        workspace_bytes=chunked_bytes(p, config, stored, plan.chunk),
        seconds=_chunked_seconds(p, plan.chunk),
    )


def _windows(
    p: Problem, configs: Sequence[WindowConfig], budget: int, scalar_upstream: bool
) -> Plan:
    """Return the fastest plan within the budget.

    If none is, return the fastest of those no larger than the plan with the widest window.

    Aliased exponentials need s_i h_i, which may exceed the budget: no column is aliased then.
    """
    plans: list[Plan] = []
    for alias in (True, False):
        plans += [_windows_of(p, config, budget, scalar_upstream, alias) for config in configs]
        within = [plan for plan in plans if plan.workspace_bytes <= budget]
        if within:
            return min(within, key=lambda plan: plan.seconds)
    smallest = [plan for plan in plans if plan.workspace_bytes <= plans[0].workspace_bytes]
    return min(smallest, key=lambda plan: plan.seconds)


def _windows_of(
    p: Problem, config: WindowConfig, budget: int, scalar_upstream: bool, alias: bool
) -> Plan:
    def bytes_with(aliased: int, kept: int) -> int:
        return windows_bytes(p, config, aliased, kept, scalar_upstream)

    aliased = kept = 0
    if p.gradient_bytes and can_keep(p.dtype):
        column = max(p.tokens, 1) * p.item_bytes
        kept = round_up(p.vocab, config.reference_block)
        if bytes_with(0, kept) > budget:
            aliased = _max_aliased_columns(p, config) if alias else 0
            # each aliased window needs separate GEMMs: alias only columns that exceed the budget
            rest = round_up(p.vocab - aliased, config.reference_block)
            spare = budget - bytes_with(aliased, rest)
            aliased -= max(spare, 0) // (config.window * column) * config.window
            kept = round_up(p.vocab - aliased, config.reference_block)
        if bytes_with(aliased, kept) > budget:
            spare = budget - bytes_with(aliased, config.window) + config.window * column
            most = min(max(spare, 0) // column, p.vocab - aliased - 1)
            kept = most // config.window * config.window
    return Plan(
        strategy="windows",
        window=config.window,
        aliased=aliased,
        kept=kept,
        chunk=p.tokens,
        grad_hidden=p.grad_hidden,
        grad_weight=p.grad_weight,
        vocab=p.vocab,
        workspace_bytes=bytes_with(aliased, kept),
        seconds=_windows_seconds(p, config.window, aliased, kept),
    )


def _max_aliased_columns(p: Problem, config: WindowConfig) -> int:
    if not p.grad_weight:
        return 0
    return config.window * max_aliased_windows(p.tokens, p.hidden, p.vocab, config.window)


def _gradients_in_forward(p: Problem, config: WindowConfig, budget: int) -> Plan:
    stored = round_up(p.vocab, config.reference_block)
    beyond = chunked_bytes(p, config, stored, p.tokens) - budget
    chunk = max(p.tokens, 1)
    if beyond > 0:
        chunk -= ceil_div(beyond, chunk_token_bytes(p, config, stored))
        chunk = max(chunk // CHUNK_ALIGNMENT * CHUNK_ALIGNMENT, min(MIN_CHUNK, p.tokens), 1)
        # the same number of chunks, of about equal size
        even = ceil_div(p.tokens, max(1, ceil_div(p.tokens, chunk)))
        chunk = max(1, min(chunk, round_up(even, CHUNK_ALIGNMENT)))
    return Plan(
        strategy="gradients_in_forward",
        window=config.window,
        aliased=0,
        kept=stored,
        chunk=chunk,
        grad_hidden=p.grad_hidden,
        grad_weight=p.grad_weight,
        vocab=p.vocab,
        workspace_bytes=chunked_bytes(p, config, stored, chunk),
        seconds=_chunked_seconds(p, chunk),
    )


def _windows_seconds(p: Problem, window: int, aliased: int, kept: int) -> float:
    gradients = p.grad_hidden + p.grad_weight
    recomputed = max(p.vocab - aliased - kept, 0) if gradients else 0
    columns = (1 + gradients) * p.vocab + recomputed
    windows = ceil_div(recomputed + aliased, window)
    passes = windows + 1 if p.grad_hidden else 0
    moved = p.tokens * (2 * passes * p.hidden + recomputed) * p.accumulator_bytes
    return _seconds(p, columns, moved, windows)


def _chunked_seconds(p: Problem, chunk: int) -> float:
    columns = (1 + p.grad_hidden + p.grad_weight) * p.vocab
    passes = 2 * ceil_div(p.tokens, chunk) if p.grad_weight else 0
    moved = passes * p.vocab * p.hidden * p.accumulator_bytes + 2 * p.gradient_bytes
    return _seconds(p, columns, moved)


def _seconds(p: Problem, columns: int, moved_bytes: int, windows: int = 0) -> float:
    """Return the time of GEMMs over `columns` vocabulary columns in all, and of moving bytes."""
    flop_rate, byte_rate, window_seconds = DEVICE_RATES.get(p.device, DEVICE_RATES["cuda"])
    gemms = 2 * p.tokens * p.hidden * columns / flop_rate
    return gemms + moved_bytes / byte_rate + windows * window_seconds
