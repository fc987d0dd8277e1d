"""Chunks of tokens of gradients in forward, and where their exponentials lie.

A chunk reads the weight and dW's sums, whatever its size, so fewer chunks take less time.  The rows
of dX of later chunks are not written yet: they can hold some columns of the exponentials, beside
memory for all columns of a smaller chunk.  So chunks shrink towards the end.
"""

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from math import gcd

from cutefce.cute_kernels.integers import ceil_div

OWN_ALIGNMENT = 16
"""Tokens in multiples of which memory of their own is tried."""
SPREAD_BLOCKS = 8
"""Blocks of dX that are put in the order of the call one after the other, through a copy."""


@dataclass(frozen=True)
class Chunks:
    """Consecutive chunks of all tokens."""

    sizes: tuple[int, ...]
    """Tokens of each."""
    own: int
    """Tokens whose exponentials, of all columns, have memory of their own."""

    @staticmethod
    def even(tokens: int, chunk: int) -> "Chunks":
        """Return chunks of `chunk` tokens, the last one shorter; one chunk of no tokens."""
        count = max(ceil_div(tokens, chunk), 1)
        last = tokens - (count - 1) * chunk
        return Chunks((chunk,) * (count - 1) + (last,), min(chunk, tokens))

    @property
    def largest(self) -> int:
        """Tokens of the largest chunk, 1 or more."""
        return max(1, *self.sizes)

    @property
    def shrink(self) -> bool:
        """Whether some use the memory of dX."""
        return self.largest > self.own > 0

    @property
    def unit(self) -> int:
        """Tokens in multiples of which chunks begin."""
        return gcd(*self.sizes[:-1]) or max(self.sizes[0], 1)

    @property
    def spread(self) -> int:
        """Rows of dX that are copied at a time to put them in their places."""
        return ceil_div(sum(self.sizes), SPREAD_BLOCKS) * self.shrink

    def slices(self) -> Iterator[slice]:
        """Yield the tokens of each chunk."""
        start = 0
        for size in self.sizes:
            yield slice(start, start + size)
            start += size


def own_columns(tokens: int, columns: int, own: int, block: int) -> int:
    """Return how many of `columns` of a chunk of `tokens` lie in memory of their own.

    That holds the columns of `own` tokens; they are whole blocks.
    """
    return columns if tokens <= own else own * columns // tokens // block * block


def shrinking(
    tokens: int, hidden: int, columns: int, block: int, alignment: int, count: int
) -> Chunks:
    """Return `count` chunks, or fewer, with as little memory of their own as possible.

    Exponentials of `columns` lie there, or in unwritten rows of dX (N, `hidden`), in whole blocks.
    Chunks begin at multiples of `alignment` tokens.
    """

    def largest(own: int, rest: int) -> int:
        """Return the tokens of a chunk before the last `rest` ones."""
        if not rest:
            return max(own - (own - tokens) % alignment, 0)
        size = (own * columns + rest * hidden) // (columns * alignment) * alignment
        while size > own:
            beside = columns - own_columns(size, columns, own, block)
            if size * beside <= rest * hidden:
                break
            size -= alignment
        return size

    def chunks(own: int) -> tuple[int, ...] | None:
        """Return the sizes with `own` tokens, None for more than `count`."""
        sizes: list[int] = []
        rest = 0
        while rest < tokens:
            size = min(largest(own, rest), tokens - rest)
            if size <= 0 or len(sizes) == count:
                return None
            sizes.append(size)
            rest += size
        return tuple(reversed(sizes))

    steps = range(ceil_div(tokens, OWN_ALIGNMENT))
    least = bisect_left(steps, True, key=lambda i: chunks(i * OWN_ALIGNMENT) is not None)
    own = min(least * OWN_ALIGNMENT, tokens)
    return Chunks(chunks(own) or (tokens,), own)
