"""Problem and workspace budget to a plan: how to run, and the memory and time that it takes.

Pure Python; sizes may be symbolic integers of a graph compiler.  With N tokens, D hidden, V vocab,
K columns kept and G gradients wanted (0 to 2), the model of time is

    windows                2·N·D·((1 + G)·V + (V - K - L)) FLOP; dX's sums are read and written
                           once a window, recomputed logits once; L columns are aliased, see `lending`;
                           narrow windows lend more, but are more
    gradients in forward   2·N·D·(1 + G)·V FLOP; dW's sums are read and written once a chunk,
                           and the gradients once more in the backward
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from cutefce.cute_kernels.config import WindowConfig
from cutefce.cute_kernels.problem import Problem, can_keep
from cutefce.ops.planning.dw_aliasing import max_aliased_windows
from cutefce.ops.planning.memory_model import chunk_token_bytes, chunked_bytes, windows_bytes

MINIMUM = 0
"""The budget "min": the smallest plan."""
MAXIMUM = 1 << 62
"""The budget "max": the fastest plan, whatever it takes."""
DEFAULT = 5 << 29
"""2.5 GiB: all exponentials of 8192 tokens and 128k classes in bfloat16, about what a compiled
two-stage loss takes for the same; larger problems keep a part and compute the rest again."""

SMALLEST_CHUNK = 1024
"""Tokens of a chunk, below which reading and writing dW's sums would take most of the time."""
CHUNK_ALIGNMENT = 256
"""Tokens that a chunk is a multiple of: a row block of the kernels."""

DEVICE_RATES = {"cpu": (1e11, 2e10, 0.0), "cuda": (7e14, 4e12, 6e-5)}
"""(FLOP/s, bytes/s, seconds a window) by device type; those of a GPU are an H200's, where products
of few columns leave num_sms idle as they begin and end."""


@dataclass(frozen=True)
class Plan:
    """How one call runs."""

    strategy: str
    """"windows" or "gradients_in_forward"."""
    vocab: int
    """Vocabulary columns in all."""
    window: int
    """Vocabulary columns walked at a time."""
    aliased: int
    """Columns whose exponentials lie in dW until the backward: the first ones, whole windows."""
    kept: int
    """Columns after these whose exponentials stay in memory until the backward, or exist for a
    chunk: whole pieces, so that their rows lie as the hardware wants them."""
    chunk: int
    """Tokens walked at a time; all of them with "windows"."""
    workspace_bytes: int
    """Predicted peak memory beyond the inputs and the gradients."""
    seconds: float
    """Predicted time of forward and backward; meant for comparing plans of one problem."""

    def __str__(self) -> str:
        name = self.strategy.replace("_", " ")
        kept, aliased = min(self.kept / self.vocab, 1), self.aliased / self.vocab
        size = f"{kept:.0%} kept" + f", {aliased:.0%} in the place of dW" * (aliased > 0)
        size = f"chunks of {self.chunk} tokens" if "forward" in name else size
        return (
            f"{name}, {size}, {self.window} columns at a time: "
            f"{self.workspace_bytes / 2**20:.1f} MiB, {self.seconds * 1e3:.1f} ms predicted"
        )


def budget_bytes(workspace: int | str | None) -> int:
    """Return the bytes that `workspace` stands for: bytes, "min", "max" or None, the default."""
    if isinstance(workspace, str):
        named = {"min": MINIMUM, "max": MAXIMUM}
        if workspace not in named:
            raise ValueError(f'workspace: got {workspace!r}, expected bytes, "min", "max" or None')
        return named[workspace]
    if workspace is None:
        return DEFAULT
    if workspace < 0:
        raise ValueError(f"workspace: got {workspace}, expected bytes >= 0")
    return workspace


def make_plan(
    problem: Problem, configs: Sequence[WindowConfig], budget: int, scalar_upstream: bool
) -> Plan:
    """Return the fastest plan within `budget` bytes, or the smallest one if none is.

    `configs` are for windows of several widths, the widest first.  `scalar_upstream` says that
    every row's loss gets the same upstream gradient.
    """
    candidates = [_windows(problem, configs, budget, scalar_upstream)]
    if scalar_upstream and problem.gradient_bytes and can_keep(problem.dtype):
        candidates.append(_gradients_in_forward(problem, configs[0], budget))
    affordable = [c for c in candidates if c.workspace_bytes <= budget]
    if affordable:
        return min(affordable, key=lambda c: c.seconds)
    return min(candidates, key=lambda c: c.workspace_bytes)


def replan_for_shard(
    plan: Plan, p: Problem, configs: Sequence[WindowConfig], budget: int, scalar_upstream: bool
) -> Plan:
    """Return `plan`, which was made for a wider vocabulary, for `p`; chunks stay as they are."""
    if plan.strategy == "windows":
        return _windows(p, configs, budget, scalar_upstream)
    config = configs[0]
    stored = _all_columns(p.vocab, config)
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
    """Return the fastest plan within the budget or, if none is, no larger than the first one's.

    What is lent needs s_i h_i, which may take more than there is: then nothing is.
    """
    plans: list[Plan] = []
    for alias in (True, False):
        plans += [_windows_of(p, config, budget, scalar_upstream, alias) for config in configs]
        within = [plan for plan in plans if plan.workspace_bytes <= budget]
        if within:
            return min(within, key=lambda plan: plan.seconds)
    least = [plan for plan in plans if plan.workspace_bytes <= plans[0].workspace_bytes]
    return min(least, key=lambda plan: plan.seconds)


def _windows_of(
    p: Problem, config: WindowConfig, budget: int, scalar_upstream: bool, alias: bool
) -> Plan:
    def bytes_with(aliased: int, kept: int) -> int:
        return windows_bytes(p, config, aliased, kept, scalar_upstream)

    aliased = kept = 0
    if p.gradient_bytes and can_keep(p.dtype):
        column = max(p.tokens, 1) * p.item_bytes
        kept = _all_columns(p.vocab, config)
        if bytes_with(0, kept) > budget:
            aliased = _max_aliased_columns(p, config) if alias else 0
            # each lent window is products of its own: as few as there is no room for elsewhere
            spare = budget - bytes_with(aliased, _all_columns(p.vocab - aliased, config))
            aliased -= max(spare, 0) // (config.window * column) * config.window
            kept = _all_columns(p.vocab - aliased, config)
        if bytes_with(aliased, kept) > budget:
            spare = budget - bytes_with(aliased, config.window) + config.window * column
            most = min(max(spare, 0) // column, p.vocab - aliased - 1)
            kept = most // config.window * config.window
    return Plan(
        strategy="windows",
        vocab=p.vocab,
        window=config.window,
        aliased=aliased,
        kept=kept,
        chunk=p.tokens,
        workspace_bytes=bytes_with(aliased, kept),
        seconds=_windows_seconds(p, config.window, aliased, kept),
    )


def _max_aliased_columns(p: Problem, config: WindowConfig) -> int:
    if not p.grad_weight:
        return 0
    return config.window * max_aliased_windows(p.tokens, p.hidden, p.vocab, config.window)


def _gradients_in_forward(p: Problem, config: WindowConfig, budget: int) -> Plan:
    stored = _all_columns(p.vocab, config)
    beyond = chunked_bytes(p, config, stored, p.tokens) - budget
    chunk = max(p.tokens, 1)
    if beyond > 0:
        chunk -= -(-beyond // chunk_token_bytes(p, config, stored))
        chunk = max(chunk // CHUNK_ALIGNMENT * CHUNK_ALIGNMENT, min(SMALLEST_CHUNK, p.tokens), 1)
        # as many chunks, but of about the same size
        even = -(-p.tokens // max(1, -(-p.tokens // chunk)))
        chunk = max(1, min(chunk, -(-even // CHUNK_ALIGNMENT) * CHUNK_ALIGNMENT))
    return Plan(
        strategy="gradients_in_forward",
        vocab=p.vocab,
        window=config.window,
        aliased=0,
        kept=stored,
        chunk=chunk,
        workspace_bytes=chunked_bytes(p, config, stored, chunk),
        seconds=_chunked_seconds(p, chunk),
    )


def _all_columns(columns: int, config: WindowConfig) -> int:
    return -(-columns // config.reference_block) * config.reference_block


def _windows_seconds(p: Problem, window: int, aliased: int, kept: int) -> float:
    gradients = p.grad_hidden + p.grad_weight
    recomputed = max(p.vocab - aliased - kept, 0) if gradients else 0
    columns = (1 + gradients) * p.vocab + recomputed
    products = -(-(recomputed + aliased) // window)
    passes = products + 1 if p.grad_hidden else 0
    moved = p.tokens * (2 * passes * p.hidden + recomputed) * p.accumulator_bytes
    return _seconds(p, columns, moved, products)


def _chunked_seconds(p: Problem, chunk: int) -> float:
    columns = (1 + p.grad_hidden + p.grad_weight) * p.vocab
    passes = 2 * -(-p.tokens // chunk) if p.grad_weight else 0
    moved = passes * p.vocab * p.hidden * p.accumulator_bytes + 2 * p.gradient_bytes
    return _seconds(p, columns, moved)


def _seconds(p: Problem, columns: int, moved_bytes: int, windows: int = 0) -> float:
    """Time of products with `columns` columns of the vocabulary in all, and of moving bytes."""
    flop_rate, byte_rate, of_window = DEVICE_RATES.get(p.device, DEVICE_RATES["cuda"])
    products = 2 * p.tokens * p.hidden * columns / flop_rate
    return products + moved_bytes / byte_rate + windows * of_window
