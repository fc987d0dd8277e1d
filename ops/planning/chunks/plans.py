"""Plans of gradients in forward: chunks of equal size, and windows inside chunks."""

from collections.abc import Iterator
from itertools import product

from cutefce.cute_kernels.config import WindowConfig
from cutefce.cute_kernels.integers import ceil_div, round_up
from cutefce.cute_kernels.problem import Problem
from cutefce.ops.planning.call_problem import adds_in_forward
from cutefce.ops.planning.chunks.windows import window_widths
from cutefce.ops.planning.memory_model import chunked_bytes
from cutefce.ops.planning.plan import Family, Plan
from cutefce.ops.planning.step_memory import has_weight_kernels, kept_low_bits
from cutefce.ops.planning.time_model import chunked_seconds, whole_waves

MIN_CHUNK = 512
"""Tokens of a chunk below which reading the weight and dW's sums, and launches, take too long."""
MIN_CHUNK_WINDOW = 8192
"""Columns of a window inside a chunk below which launches and dX's sums take too much time."""
CHUNK_ALIGNMENT = 256
"""Chunks are multiples of this many tokens, a row block of the kernels."""


def chunked_plans(p: Problem, config: WindowConfig) -> Iterator[Family]:
    """Yield plans of chunks of about equal size, each one alone: a short chunk may have wide tiles.

    Beyond eight chunks, some numbers of chunks are left out.
    """
    count, most = 1, ceil_div(p.tokens, MIN_CHUNK)
    while count <= max(most, 1):
        even = round_up(ceil_div(p.tokens, count), CHUNK_ALIGNMENT)
        chunk = max(1, min(even, p.tokens))
        yield Family(1, [chunked_plan(p, config, chunk)].__getitem__)
        if forms_dx_alone(p) and p.vocab >= 2 * MIN_CHUNK_WINDOW:
            yield from _windows_in_chunks(p, config, chunk)
        count = min(count + ceil_div(count, 8), max(most, count + 1))


def forms_dx_alone(p: Problem) -> bool:
    """Whether kernels form dX alone and may skip rows, as windows inside chunks need."""
    alone = p.grad_hidden and not (p.grad_weight or p.grad_bias)
    return alone and p.selects_rows and has_weight_kernels(p)


def _windows_in_chunks(p: Problem, config: WindowConfig, chunk: int) -> Iterator[Family]:
    """Yield plans of 2 windows of about equal width and more in each chunk.

    All but the last are multiples of what fills waves of tiles, or of a reference block, some of
    which nearly fill waves.  Each plan is a family, as narrower windows may leave fewer SMs idle.
    """
    units = whole_waves(p, chunk), config.reference_block
    numbers = product(range(2, p.vocab // MIN_CHUNK_WINDOW + 1), units)
    for width, widest in dict.fromkeys(window_widths(p.vocab, *each) for each in numbers):
        if widest < p.vocab:
            widths = width, round_up(widest, config.reference_block)
            yield Family(1, [chunked_plan(p, config, chunk, widths)].__getitem__)


def chunked_plan(
    p: Problem, config: WindowConfig, chunk: int, widths: tuple[int, int] | None = None
) -> Plan:
    """Return the plan of chunks of `chunk` tokens with all columns at once, or with windows.

    `widths` are the columns of a window, and those that have memory.
    """
    every = round_up(p.vocab, config.reference_block)
    window, stored = widths or (config.window, every)
    stored = min(stored, every)
    return Plan(
        "gradients_in_forward",
        window,
        aliased=0,
        kept=stored,
        chunk=chunk,
        grad_hidden=p.grad_hidden,
        grad_weight=p.grad_weight,
        grad_bias=p.grad_bias,
        vocab=p.vocab,
        workspace_bytes=chunked_bytes(p, config, stored, chunk),
        seconds=chunked_seconds(p, chunk, window, stored),
        tokens=p.tokens,
        low_bits=kept_low_bits(p, ceil_div(p.tokens, chunk)),
        adds_in_forward=adds_in_forward(p),
    )
