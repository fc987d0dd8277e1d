"""Bytes that single steps take: a tile of logits, a block of rows, converted operands."""

from cutefce.cute_kernels.arch import arch_named
from cutefce.cute_kernels.config import PortableTiles, WindowConfig
from cutefce.cute_kernels.integers import ceil_div
from cutefce.cute_kernels.problem import LOW_BITS, Problem, can_keep
from cutefce.cute_kernels.schedule.order import PARTIAL_BYTES
from cutefce.ops.planning.call_problem import accumulates, adds_in_forward
from cutefce.ops.planning.dw_aliasing import FINISHED_ROWS

UPCAST_BLOCK = 2048
"""Rows and columns of a 16-bit operand that a CPU's GEMM converts to float32 at a time."""
TARGET_BYTES = 17
"""Bytes of a token's target: index and safe index as int64, and whether it is active."""
GATHERED_COLUMNS = 256
"""Columns of an operand that a CPU's sparse product converts to the dtype of sums at a time."""
SAMPLED_BLOCK = {"cpu": 1 << 18}
"""Logits of which entries are chosen at a time, by device type; `LARGE_SAMPLED_BLOCK` of others."""
LARGE_SAMPLED_BLOCK = 1 << 22
MIN_ADDED_ROWS = 1024
"""Rows of dW below which each product of them converts its operands for too little work."""
MAX_SHORT_SUMS = 32
"""Chunks up to which dW's sums are kept in the least bits.  Each addition errs by 1/16 of the final
rounding's error, which together adds 4 % to the latter where sums grow evenly, and 6 % where one
chunk has most of them."""
NARROWEST_TILE = 128
"""Columns of the narrowest tile of a kernel, each of which gives one partial sum at most."""


def row_block_bytes(device: str) -> int:
    """Return the bytes of rows, in the dtype of sums, that an unfused step takes at a time."""
    return (1 if device == "cpu" else 128) << 20


def sampled_rows(columns: int, device: str) -> int:
    """Return the rows of tiles of `columns` of which entries are chosen at a time."""
    return max(1, SAMPLED_BLOCK.get(device, LARGE_SAMPLED_BLOCK) // columns)


def partial_bytes(p: Problem, config: WindowConfig, tokens: int) -> int:
    """Bytes of a token's target, logit and partial sums while the forward of `tokens` runs."""
    if p.arch is not None:
        tiles = ceil_div(p.vocab, NARROWEST_TILE)
        partials = min(tiles, PARTIAL_BYTES // (4 * max(tokens, 1)))
        return TARGET_BYTES + (2 + partials) * p.accumulator_bytes
    blocks = ceil_div(p.vocab, config.reference_block)
    return TARGET_BYTES + (2 + 2 * blocks) * p.accumulator_bytes


def forward_step_bytes(p: Problem, config: WindowConfig, tokens: int, stored: int) -> int:
    """Bytes of one step of the forward of `tokens` that stores `stored` columns."""
    if p.arch is not None:
        return 0
    blocks = ceil_div(p.vocab, config.reference_block)
    # vectors of tokens beside the partial sums; float16 makes new statistics of the old ones
    vectors = 5 if can_keep(p.dtype) else 8
    reduced = tokens * max(blocks * (2 * p.accumulator_bytes + 1), vectors * p.accumulator_bytes)
    repaired = 0
    if stored and p.device == "cpu" and accumulates_wider(p):
        # a block of exponentials in the dtype of sums, and of the scaled ones
        repaired = 2 * min(tokens * p.vocab * p.accumulator_bytes, row_block_bytes(p.device))
    rows = rows_bytes(p, tokens, CONVERTED)
    tile = tile_bytes(p, config, tokens, p.vocab, stored=stored >= p.vocab)
    return max(tile, reduced, repaired, rows)


PLAIN, GATHERED, CONVERTED, KEPT = 2, 3, 4, 12
"""Half row blocks of a row-wise step with operands in the dtype of sums; with one that is gathered
and converted; with one that is converted beside the result; with kept sums."""


def rows_bytes(p: Problem, rows: int, halves: int) -> int:
    """Bytes of a row-wise step on a CPU; fused steps of a GPU allocate only their results."""
    if p.device != "cpu":
        return 0
    row_bytes = p.hidden * p.accumulator_bytes
    block = min(rows * row_bytes, max(row_block_bytes(p.device), row_bytes))
    return block // 2 * halves if accumulates_wider(p) else block


def tile_bytes(p: Problem, config: WindowConfig, tokens: int, window: int, *, stored: bool) -> int:
    """Bytes of a tile of the logits of `window` columns, and of the step that computes it.

    A CPU may compute logits in the memory of stored exponentials.
    """
    if p.arch is not None:
        return 0
    assert isinstance(config, PortableTiles)
    rows, columns = min(tokens, config.tile_rows), config.columns(tokens)
    if p.device != "cpu":
        return rows * columns * p.accumulator_bytes
    in_place = stored and not accumulates_wider(p)
    logits = (p.tile_copies + (not in_place)) * rows * columns * p.accumulator_bytes
    step = max(rows * columns, upcast_bytes(p, rows, p.hidden, min(columns, window)))
    return logits + step


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


def kept_hidden_bytes(p: Problem, inner: int) -> int:
    """Bytes of adding a product over `inner` columns to kept sums of dX."""
    if has_weight_kernels(p):
        return 0
    rows = min(FINISHED_ROWS, p.tokens)
    product = max(upcast_bytes(p, rows, inner, p.hidden), rows_bytes(p, rows, KEPT))
    return rows_of_sums(p) + product


def rows_of_sums(p: Problem) -> int:
    """Bytes of the rows of dX whose sums are in float32 at a time, where kernels do not add."""
    return min(FINISHED_ROWS, p.tokens) * p.hidden * p.accumulator_bytes


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


def keeps_weight_sums(p: Problem) -> bool:
    """Whether dW's sums over chunks of tokens are kept in 16 bits of dW and low bits beside."""
    narrow = accumulates(p) or not p.wide_grad_weight
    return p.grad_weight and accumulates_wider(p) and narrow and not adds_in_forward(p)


def kept_low_bits(p: Problem, chunks: int) -> int:
    """Return the low bits of each of dW's sums over `chunks` chunks of tokens."""
    return LOW_BITS[-1] if accumulates(p) else low_bits_of(p.hidden, chunks)


def low_bits_of(hidden: int, additions: int) -> int:
    """Return the low bits of sums of `hidden` columns that are rounded `additions` times."""
    return LOW_BITS[-1] if additions > MAX_SHORT_SUMS else few_low_bits(hidden)


def few_low_bits(hidden: int) -> int:
    """Return the least low bits of kept sums: two columns share a byte."""
    return LOW_BITS[hidden % 2]


def can_keep_hidden(p: Problem) -> bool:
    """Whether dX's sums over windows may be kept in 16 bits and low bits beside.

    Ranks add theirs in float32.
    """
    return p.grad_hidden and p.dtype == "bfloat16" and p.ranks == 1


def rounds_hidden(p: Problem) -> bool:
    """Whether gradients in forward round dX, for a known upstream gradient."""
    return adds_in_forward(p) and accumulates_wider(p) and p.grad_hidden and p.ranks == 1


def has_weight_kernels(p: Problem) -> bool:
    """Whether kernels form dW: they list the tokens of every class, and add to kept sums.

    Else products are made beside these.
    """
    return p.arch is not None and arch_named(p.arch).forms_weight_gradient


def accumulates_wider(p: Problem) -> bool:
    """Whether sums need more bytes than the inputs have."""
    return p.item_bytes < p.accumulator_bytes
