"""Bytes that single steps take: a tile of logits, a block of rows, converted operands."""

from cutefce.cute_kernels.integers import ceil_div
from cutefce.cute_kernels.problem import LOW_BITS, Problem, can_keep
from cutefce.cute_kernels.schedule.order import PARTIAL_BYTES
from cutefce.ops.primitives.block_sizes import UNUSED_COLUMNS, UPCAST_BLOCK
from cutefce.ops.program.problem import LossProblem
from cutefce.ops.rows.blocks import row_block_bytes

TARGET_BYTES = 17
"""Bytes of a token's target: index and safe index as int64, and whether it is active."""
NARROWEST_TILE = 128
"""Columns of the narrowest tile of a kernel, each of which gives one partial sum at most."""


def partial_sums(p: LossProblem, rows: int, columns: int) -> int:
    """Return how many numbers a row has of partial sums, their references and what is beside."""
    if p.arch is None:
        return (2 + p.outputs.reductions) * ceil_div(columns, p.block)
    affordable = PARTIAL_BYTES // (p.accumulator_bytes * max(rows, 1))
    parts = p.outputs.parts(ceil_div(columns, NARROWEST_TILE), affordable)
    return (1 + p.outputs.reductions) * parts


def rows_bytes(p: Problem, rows: int, low_bits: int = 0) -> int:
    """Bytes of a row-wise step on a CPU, with an operand that may be converted; a GPU fuses it.

    With `low_bits`, of one that adds to packed sums: a block has as many words as it has sums.
    """
    if p.device != "cpu":
        return 0
    words = LOW_BITS[1] // (low_bits or LOW_BITS[1])
    block = min(rows * p.hidden * p.accumulator_bytes, words * row_block_bytes(p.device))
    halves = 6 if low_bits else 3 if p.accumulates_wider else 2
    return block * halves // 2


def tile_bytes(
    p: LossProblem, tokens: int, window: int, *, copies: int = 0, stored: bool = False
) -> int:
    """Bytes of a tile of the logits of `window` columns, and of the step that computes it.

    A CPU may compute logits in the memory of stored exponentials; options make `copies` of a tile.
    A kernel of row sums stores some exponentials in any case.
    """
    if p.arch is not None:
        is_free = stored or not can_keep(p.dtype)
        return 0 if is_free else UNUSED_COLUMNS * tokens * p.item_bytes
    if p.triton:
        return 0
    rows, columns = min(tokens, p.tiles.tile_rows), p.tiles.columns(tokens)
    if p.device != "cpu":
        return rows * columns * p.accumulator_bytes
    in_place = stored and not p.accumulates_wider
    logits = (copies + (not in_place)) * rows * columns * p.accumulator_bytes
    step = max(rows * columns, upcast_bytes(p, rows, p.hidden, min(columns, window)))
    return logits + step


def upcast_bytes(p: Problem, rows: int, inner: int, columns: int) -> int:
    """Bytes of the blocks converted for a GEMM (rows, inner) @ (inner, columns)."""
    if p.device != "cpu" or not p.accumulates_wider:
        return 0
    block = min(inner, UPCAST_BLOCK)
    return (min(rows, UPCAST_BLOCK) + columns) * block * p.accumulator_bytes


def shared_sums_bytes(p: LossProblem) -> tuple[int, int]:
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
    rounded = own_rows * (p.accumulator_bytes + p.item_bytes * p.accumulates_wider)
    gathered = own_rows * p.item_bytes
    if not p.sequence_parallel:
        gathered += (p.tokens + copied_rows) * p.item_bytes
    return sums * p.hidden, max(reduced, rounded, gathered) * p.hidden


def targets_bytes(p: LossProblem, tokens: int) -> int:
    """Bytes of the targets' part of dW until it is added."""
    if p.is_fused or p.triton:
        return (20 if p.triton else 12) * tokens + 4 * (p.vocab + 1)
    return 8 * p.vocab + min(tokens + 1, p.vocab) * p.hidden * p.accumulator_bytes


def target_rows_bytes(p: LossProblem, tokens: int) -> int:
    """Bytes of the step that adds a block of tokens to the targets' part of dW, in plain torch."""
    if p.triton:  # which sorts the targets
        return 40 * tokens + 8 * p.vocab
    return min(tokens * p.hidden * p.accumulator_bytes, row_block_bytes(p.device))
