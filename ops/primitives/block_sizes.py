"""How many rows and columns steps in plain torch work on at a time; plans predict memory by it."""

from cutefce.ops.rows.blocks import row_block_bytes

UPCAST_BLOCK = 2048
"""Rows and columns of a 16-bit operand that a CPU's GEMM converts to float32 at a time."""
MIN_ADDED_ROWS = 1024
"""Rows of dW below which each product of them converts its operands for too little work."""
FINISHED_ROWS, FINISHED_BYTES = 1024, 16 << 20
"""Rows of dX whose sums exist at a time beside packed ones; on a GPU, as many as these bytes."""
WEIGHT_FEATURES = 256
"""Features of a tile of dW in Triton; rows with terms of targets have low bits of whole tiles."""
UNUSED_COLUMNS = 8
"""Exponentials of a row that a kernel of row sums stores where none are wanted: 16 bytes."""


def soft_block_rows(elements: int, sum_bytes: int, device: str) -> int:
    """Return how many tokens are taken at a time that gather `elements` of the weight each."""
    return max(1, row_block_bytes(device) // max(elements * sum_bytes, 1))


def added_rows(hidden: int, sum_bytes: int, device: str) -> int:
    """Return how many rows of dW are computed at a time that a buffer cannot add in place."""
    block = row_block_bytes(device) // max(hidden * sum_bytes, 1)
    return max(MIN_ADDED_ROWS, block // MIN_ADDED_ROWS * MIN_ADDED_ROWS)


def finished_rows(hidden: int, sum_bytes: int, device: str) -> int:
    """Return how many rows of dX's sums exist at a time beside packed ones."""
    if device == "cpu":
        return FINISHED_ROWS
    return max(FINISHED_ROWS, FINISHED_BYTES // max(hidden * sum_bytes, 1))
