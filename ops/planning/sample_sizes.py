"""Sizes of sampled gradients: entries that a token may keep, columns that its lse is estimated of.

The expected number of a token's entries is known after the forward.  A token that expects more than
`expected_limit` of them is done exactly, and so is one with more entries than slots, which is less
likely than 1e-8 then: the number of entries is a sum of independent ones, whose variance is at most
its mean (Bernstein's bound).
"""

from math import ceil, sqrt

from cutefce.cute_kernels.integers import ceil_div, round_up

MIN_SAMPLES, MAX_SAMPLES = 16, 4096
ESTIMATE_COLUMNS = 4096
"""Columns that log-sum-exps are estimated of, on all ranks together."""
SLOT_ALIGNMENT = 8
"""Slots of a token are a multiple of this."""


def expected_limit(samples: int) -> int:
    """Return the expected number of entries beyond which a token is done exactly."""
    return 3 * samples // 2


def slots(samples: int, vocab: int | None = None) -> int:
    """Return the entries of a token that are stored, of `vocab` columns or of many."""
    limit = expected_limit(samples)
    most = round_up(ceil(limit + 6 * sqrt(limit) + 32), SLOT_ALIGNMENT)
    return most if vocab is None else min(most, vocab)


def drawn_count(total: int) -> int:
    """Return how many of `total` classes log-sum-exps are estimated of."""
    return min(ESTIMATE_COLUMNS, total)


def strata(first: int, last: int, total: int) -> tuple[int, int]:
    """Return which of the strata of `total` classes meet the classes [first, last): [j0, j1)."""
    count = drawn_count(total)
    return first * count // total, ceil_div(last * count, total)
