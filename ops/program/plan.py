"""From a problem and a budget to the program that runs: the fastest that fits.

Programs come in families that store more and more exponentials: of each family, the one that stores
the most within the budget is a candidate.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from cutefce.cute_kernels.integers import ceil_div, round_up
from cutefce.ops.program.backend import Backend
from cutefce.ops.program.cost import Device, seconds
from cutefce.ops.program.layout import Layout, most_aliased
from cutefce.ops.program.lower import lower
from cutefce.ops.program.place import peak
from cutefce.ops.program.problem import Problem
from cutefce.ops.program.steps import Program

MINIMUM = -1
"""The budget "min": the fastest program that takes little more than the least memory."""
MAXIMUM = 1 << 62
"""The budget "max": the fastest program."""
WORTH = 5, 4
"""Memory that "min" may take, over the least of any program: a tenth of it is often worth half of
the time."""
WINDOWS = 1024, 4096, 16384
"""Widths of windows that are tried; where the vocabulary is narrower, it is one window."""
LEAST_CHUNK = 512
"""Tokens below which a chunk's products wait for the weight to be read."""
CHUNK_WINDOWS = 16384, 65536
"""Widths that are tried inside chunks of a frozen weight."""
ROWS = 128
"""Tokens of which chunks are multiples: those of a row of tiles."""
LOW_BITS = 4, 8
"""Bits of kept sums beside 16; the fewer are tried up to `SHORT_SUMS` additions."""
SHORT_SUMS = 32
"""Additions whose roundings to 20 bits err together by less than 6 % of the last rounding."""


def plan(p: Problem, backend: Backend, device: Device, budget: int) -> Program:
    """Return the fastest program within `budget` bytes, or the one that takes the least."""
    families = [*_families(p, backend)]
    costs: dict[Layout, tuple[int, float]] = {}

    def cost(x: Layout) -> tuple[int, float]:
        """Return bytes and seconds."""
        if x not in costs:
            program = lower(p, x, backend, brief=True)
            costs[x] = peak(program), seconds(program, device)
        return costs[x]

    least = min(cost(family[0])[0] for family in families)
    limit = least * WORTH[0] // WORTH[1] if budget == MINIMUM else max(budget, least)
    found = [_most_within(family, limit, lambda x: cost(x)[0]) for family in families]
    chosen = min((x for x in found if x), key=lambda x: cost(x)[::-1])
    return lower(p, chosen, backend)


def _most_within(
    family: Sequence[Layout], limit: int, size: Callable[[Layout], int]
) -> Layout | None:
    """Return the last layout of at most `limit` bytes.

    Bytes grow about linearly, so that a guess between two that are known is nearly right.
    """
    low, high = 0, len(family) - 1
    if size(family[low]) > limit:
        return None
    if size(family[high]) <= limit:
        return family[high]
    while high - low > 1:
        least, most = size(family[low]), size(family[high])
        guess = low + (limit - least) * (high - low) // max(most - least, 1)
        guess = min(max(guess, low + 1), high - 1)
        if size(family[guess]) <= limit:
            low = guess
            if low + 1 < high and size(family[low + 1]) > limit:
                break
        else:
            high = guess
    return family[low]


def _families(p: Problem, backend: Backend) -> Iterator[Sequence[Layout]]:
    """Yield layouts of which each takes more memory, and less time, than the one before."""
    block = backend.block
    every = round_up(p.vocab, block)
    if not (p.needs_gradients and p.stores):
        yield [Layout(p.tokens, min(window, every)) for window in _widths(p)[:1]]
        return
    for window in _widths(p):
        # float32 sums are worth their memory where few windows add to them
        widest = window == _widths(p)[-1]
        for low in (*_bits(p, window), *[0] * widest) or (0,):
            for aliased in {0, most_aliased(p, window, block)}:
                rest = p.vocab - aliased
                kept = [*range(0, rest, window), round_up(rest, block)]
                yield [Layout(p.tokens, window, x, aliased, low) for x in kept]
    if p.can_chunk and p.tokens > LEAST_CHUNK:
        yield from _chunks(p, every)


def _widths(p: Problem) -> list[int]:
    return [window for window in WINDOWS if window < p.vocab] or [p.vocab]


def _bits(p: Problem, window: int) -> list[int]:
    """Return the low bits of sums of dX over windows that are worth a try."""
    if not (p.keeps_sums and p.grad_hidden and p.ranks == 1):
        return []
    return [LOW_BITS[ceil_div(p.vocab, window) > SHORT_SUMS or p.hidden % 2]]


def _chunks(p: Problem, every: int) -> Iterator[Sequence[Layout]]:
    """Yield chunks, the most and smallest first, each size a family of its own kind."""
    counts = [2]
    while counts[-1] < ceil_div(p.tokens, LEAST_CHUNK):
        counts.append(counts[-1] + ceil_div(counts[-1], 6))
    for count in sorted({*counts, SHORT_SUMS}):
        size = round_up(ceil_div(p.tokens, count), ROWS)
        low = LOW_BITS[count > SHORT_SUMS or p.hidden % 2] if p.keeps_sums else 0
        whole = Layout(size, every, low_bits=low, in_forward=True)
        if LEAST_CHUNK <= size < p.tokens:
            yield [whole]
            if not (p.grad_weight or p.grad_bias):
                yield from ([replace(whole, window=x)] for x in CHUNK_WINDOWS if x < p.vocab)
