"""Layout of the small buffers that the host and the kernels share."""

from enum import IntEnum

from cutefce.cute_kernels.integers import ceil_div, round_up


class Stat(IntEnum):
    """Rows of the statistics (NUM_STATS, N), float32, that a forward writes for each token."""

    REFERENCE = 0
    """ρ: exponentials are relative to it; +inf if the token is ignored."""
    SUM_EXP_OTHERS = 1
    """S: the sum of exponentials over all columns but the target's."""
    SUM_EXP = 2
    """T: S plus the target's exponential; NaN where there is no gradient."""
    LOSS = 3
    """The token's cross entropy; 0 if ignored."""


NUM_STATS = len(Stat)


class Coefficient(IntEnum):
    """Rows of the coefficients (P, N), float32, that a backward needs of each token.

    P is 2 where dX and dW have the same ones.
    """

    DX_SCALE = 0
    """Factor of the sums of dX."""
    DX_TARGET = 1
    """Factor of the target's row of the weight in dX."""
    DW_SCALE = 2
    """Factor of the hidden states in dW, over dW's own."""
    DW_TARGET = 3
    """Factor of the hidden states in dW's row of the target, over dW's own."""
    REFERENCE = 4
    """What exponentials are computed again relative to."""


class Move(IntEnum):
    """What a launch of `move_rows` with an order does."""

    GATHER = 0
    SCATTER = 1
    CLEAR = 2


class Semaphore(IntEnum):
    """Offsets into the int32 buffer of one forward's counters and flags, which start at 0."""

    SYNC_COUNTER = 0
    """Arrivals of clusters at the sync points that keep them in step."""
    DONE_COUNTER = 1
    """Thread blocks of `reduce_partials` that have finished."""
    REPAIR_ROWS = 2
    """The number of rows if any row block is flagged, else 0."""
    REPAIR_FLAGS = 3
    """One flag a row block: 1 if its exponentials must be stored again."""


SPLIT_K_COUNTERS = 1
"""Offset of a gradient GEMM's counters, one a warp: the K splits it has added so far."""


def forward_semaphore_count(tokens: int, block_rows: int) -> int:
    """Return the size of a forward's int32 buffer for row blocks of `block_rows` tokens."""
    return Semaphore.REPAIR_FLAGS + ceil_div(tokens, block_rows)


LOW_ALIGNMENT = 16
"""Rows of the low bits of packed sums are multiples of these bytes, which kernels read at once."""


def low_bytes(hidden: int, low_bits: int) -> int:
    """Return the bytes of the low bits of a row of `hidden` sums."""
    return round_up(ceil_div(hidden * low_bits, 8), LOW_ALIGNMENT)
