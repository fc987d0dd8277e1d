"""Layout of the small buffers that the host allocates and the kernels share."""

from enum import IntEnum
from typing import Any


class Stat(IntEnum):
    """Rows of the statistics (len(Stat), N) that a forward leaves for each token, in float32."""

    REFERENCE = 0
    """ρ, what exponentials are relative to; +inf if the token is ignored."""
    SUM_EXP_OTHERS = 1
    """S, the sum of exponentials over all columns but the target's."""
    SUM_EXP = 2
    """T, which includes the target's exponential."""
    LOSS = 3
    """The token's loss; 0 if ignored."""


class Semaphore(IntEnum):
    """Where the counters and flags of one forward begin in its int32 buffer; all start at 0."""

    SYNC_COUNTER = 0
    """Arrivals of clusters at the checkpoints that keep them in step."""
    DONE_COUNTER = 1
    """Thread blocks of `reduce_partials` that are done."""
    REPAIR_FLAGS = 2
    """One flag a row block: 1 if its exponentials must be stored again."""


SPLIT_K_COUNTERS = 1
"""Where the counters of a gradient GEMM begin, one a warp: the K splits that it has added."""


def forward_semaphore_count(tokens: Any, block_rows: int) -> Any:
    """Return the size of a forward's int32 buffer for row blocks of `block_rows` tokens.

    Takes Python integers or a kernel's.
    """
    return int(Semaphore.REPAIR_FLAGS) + (tokens + block_rows - 1) // block_rows
