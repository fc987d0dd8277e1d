"""Bytes that single steps take: a tile of logits, a block of rows, converted operands."""

from cutefce.cute_kernels.arch import arch_named
from cutefce.cute_kernels.config import PortableTiles
from cutefce.cute_kernels.integers import ceil_div
from cutefce.cute_kernels.problem import LOW_BITS, Problem, can_keep
from cutefce.cute_kernels.schedule.order import PARTIAL_BYTES

UPCAST_BLOCK = 2048
"""Rows and columns of a 16-bit operand that a CPU's GEMM converts to float32 at a time."""
TARGET_BYTES = 17
"""Bytes of a token's target: index and safe index as int64, and whether it is active."""
MIN_ADDED_ROWS = 1024
"""Rows of dW below which each product of them converts its operands for too little work."""
FINISHED_ROWS, FINISHED_BYTES = 1024, 16 << 20
"""Rows of dX whose sums exist at a time beside kept ones; on a GPU, as many as take these bytes."""
UNUSED_COLUMNS = 8
"""Exponentials of a row that a kernel of row sums stores where none are wanted: 16 bytes."""
NARROWEST_TILE = 128
"""Columns of the narrowest tile of a kernel, each of which gives one partial sum at most."""


def row_block_bytes(device: str) -> int:
    """Return the bytes of rows, in the dtype of sums, that an unfused step takes at a time."""
    return (1 if device == "cpu" else 128) << 20


def partial_sums(p: Problem, config: PortableTiles, rows: int, columns: int) -> int:
    """Return how many numbers a row has of partial sums, and of their references."""
    if p.arch is None:
        return 2 * ceil_div(columns, config.reference_block)
    affordable = PARTIAL_BYTES // (p.accumulator_bytes * max(rows, 1))
    return max(1, min(ceil_div(columns, NARROWEST_TILE), affordable))


def rows_bytes(p: Problem, rows: int, low_bits: int = 0) -> int:
    """Bytes of a row-wise step on a CPU, with an operand that may be converted; a GPU fuses it.

    With `low_bits`, of one that adds to kept sums: a block has as many words as it has sums.
    """
    if p.device != "cpu":
        return 0
    words = LOW_BITS[1] // (low_bits or LOW_BITS[1])
    block = min(rows * p.hidden * p.accumulator_bytes, words * row_block_bytes(p.device))
    halves = 6 if low_bits else 3 if accumulates_wider(p) else 2
    return block * halves // 2


def tile_bytes(
    p: Problem, config: PortableTiles, tokens: int, window: int, *, stored: bool = False
) -> int:
    """Bytes of a tile of the logits of `window` columns, and of the step that computes it.

    A CPU may compute logits in the memory of stored exponentials.  A kernel of row sums stores some
    in any case.
    """
    if p.arch is not None:
        return 0 if stored else unused_bytes(p, tokens)
    if p.triton:
        return 0
    rows, columns = min(tokens, config.tile_rows), config.columns(tokens)
    if p.device != "cpu":
        return rows * columns * p.accumulator_bytes
    in_place = stored and not accumulates_wider(p)
    logits = (p.tile_copies + (not in_place)) * rows * columns * p.accumulator_bytes
    step = max(rows * columns, upcast_bytes(p, rows, p.hidden, min(columns, window)))
    return logits + step


def unused_bytes(p: Problem, tokens: int) -> int:
    """Bytes of the exponentials that kernels of row sums store where none are wanted."""
    return UNUSED_COLUMNS * tokens * p.item_bytes if can_keep(p.dtype) else 0


def soft_block_rows(elements: int, sum_bytes: int, device: str) -> int:
    """Return how many tokens are taken at a time that gather `elements` of the weight each."""
    return max(1, row_block_bytes(device) // max(elements * sum_bytes, 1))


def added_rows(hidden: int, sum_bytes: int, device: str) -> int:
    """Return how many rows of dW are computed at a time that a buffer cannot add in place."""
    block = row_block_bytes(device) // max(hidden * sum_bytes, 1)
    return max(MIN_ADDED_ROWS, block // MIN_ADDED_ROWS * MIN_ADDED_ROWS)


def upcast_bytes(p: Problem, rows: int, inner: int, columns: int) -> int:
    """Bytes of the blocks converted for a GEMM (rows, inner) @ (inner, columns)."""
    if p.device != "cpu" or not accumulates_wider(p):
        return 0
    block = min(inner, UPCAST_BLOCK)
    return (min(rows, UPCAST_BLOCK) + columns) * block * p.accumulator_bytes


def shared_sums_bytes(p: Problem) -> tuple[int, int]:
    """Return the bytes of dX's sums on a rank, and of adding them to the other ranks'.

    They are less those of dX itself, which is allocated at the end.  The exchange on a CPU copies
    the rows of all ranks.
    """
    own_rows = ceil_div(p.tokens, p.ranks)
    dx_rows = own_rows if p.sequence_parallel else p.tokens
    copied_rows = p.tokens if p.device == "cpu" else 0
    sums = p.tokens * p.accumulator_bytes - dx_rows * p.item_bytes
    padded = p.tokens if p.tokens % p.ranks else 0
    reduced = (own_rows + copied_rows + padded) * p.accumulator_bytes
    rounded = own_rows * (p.accumulator_bytes + p.item_bytes * accumulates_wider(p))
    gathered = own_rows * p.item_bytes
    if not p.sequence_parallel:
        gathered += (p.tokens + copied_rows) * p.item_bytes
    return sums * p.hidden, max(reduced, rounded, gathered) * p.hidden


def few_low_bits(hidden: int) -> int:
    """Return the least low bits of kept sums: two columns share a byte."""
    return LOW_BITS[hidden % 2]


def finished_rows(hidden: int, sum_bytes: int, device: str) -> int:
    """Return how many rows of dX's sums exist at a time beside kept ones."""
    if device == "cpu":
        return FINISHED_ROWS
    return max(FINISHED_ROWS, FINISHED_BYTES // max(hidden * sum_bytes, 1))


def targets_bytes(p: Problem, tokens: int) -> int:
    """Bytes of the targets' part of dW until it is added."""
    if has_weight_kernels(p) or p.triton:
        return (20 if p.triton else 12) * tokens + 4 * (p.vocab + 1)
    return 8 * p.vocab + min(tokens + 1, p.vocab) * p.hidden * p.accumulator_bytes


def target_rows_bytes(p: Problem, tokens: int) -> int:
    """Bytes of the step that adds a block of tokens to the targets' part of dW, in plain torch."""
    if has_weight_kernels(p):
        return 0
    if p.triton:  # which sorts the targets
        return 40 * tokens + 8 * p.vocab
    return min(tokens * p.hidden * p.accumulator_bytes, row_block_bytes(p.device))


def added_bytes(p: Problem, columns: int) -> int:
    """Bytes of rows of dW, of so many in a window, that are computed beside the caller's buffer."""
    rows = added_rows(p.hidden, p.accumulator_bytes, p.device)
    return min(rows, columns) * p.hidden * p.accumulator_bytes


def has_weight_kernels(p: Problem) -> bool:
    """Whether kernels form dW: they list the tokens of every class, and add to kept sums.

    Else products are made beside these.
    """
    return p.arch is not None and "grad_weight" in arch_named(p.arch).listed


def accumulates_wider(p: Problem) -> bool:
    """Whether sums need more bytes than the inputs have."""
    return p.item_bytes < p.accumulator_bytes
