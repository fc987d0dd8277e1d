"""Sizes of sampled gradients: entries that a token may keep, columns that its lse is estimated of.

A token that expects `expected_limit` entries has more of them than slots with a probability below
1e-8: their number is a sum of independent ones, whose variance is at most its mean (Bernstein's
bound).
"""

from math import ceil, sqrt

from cutefce.cute_kernels.integers import round_up

MIN_SAMPLES, MAX_SAMPLES = 16, 4096
ESTIMATE_COLUMNS = 3072
"""Columns that log-sum-exps are estimated of, on all ranks together."""
COLUMNS_PER_FREQUENT = 3
"""Of these for each frequent target among them; the others are drawn."""
SLOT_ALIGNMENT = 8
"""Slots of a token are a multiple of this."""


def expected_limit(samples: int) -> int:
    """Return the expected number of entries that a token has slots for."""
    return 3 * samples // 2


def slots(samples: int, vocab: int | None = None) -> int:
    """Return the entries of a token that are stored, of `vocab` columns or of many."""
    limit = expected_limit(samples)
    most = round_up(ceil(limit + 6 * sqrt(limit) + 32), SLOT_ALIGNMENT)
    return most if vocab is None else min(most, vocab)


def estimate_count(total: int) -> int:
    """Return how many of `total` classes log-sum-exps are estimated of."""
    return min(ESTIMATE_COLUMNS, total)


def frequent_count(total: int) -> int:
    """Return how many of these are the batch's most frequent targets; the others are drawn."""
    return 0 if estimate_count(total) == total else estimate_count(total) // COLUMNS_PER_FREQUENT
