"""The workspace of a plan: its peak of allocated memory beyond the inputs and the gradients.

With N tokens, D hidden, V vocab, e bytes an element, a bytes a sum, w columns a window, K columns
kept, L columns aliased, and tiles of R rows and C columns, the larger parts are:

    kept    N·K·e                      exponentials from the forward to the backward; those of the
                                       L aliased columns use dW, allocated in the forward
    tile    R·C·a                      one tile of logits
    buffer  N·w·e / 2                  exponentials of half a window, where the tail of dW is too
                                       small to recompute them there; of a whole one without dW;
                                       none if K + L = V
    dX      N·D·a                      its sums, unless they are the gradient (e = a); dX itself is
                                       allocated after buffer and s_i h_i are freed
    dW      N·D·e                      s_i h_i, unless K = L = 0 and every token's loss has the same
                                       upstream gradient
            + 12·N + 12·V              kernels: the tokens of each target and their coefficients
            + (N + 1)·D·a + 8·V        portable: the targets' sums and their slots,
            + w·D·a                    one window's sums, unless they are the gradient

    forward without gradients          tile
    windows                            kept + buffer + dX + dW
    rows selected                      N·D·e, or c·D·e in chunks: h, where logits are computed
    gradients in forward               c·V·e for chunks of c tokens; unless sums are the gradients
                                       (e = a), V·D·a / 2 for half of dW's sums, for which dW has no
                                       room, N·D for a byte of each of dX's, and c·D·a for a chunk's

Copies of h and w that a call works on are added, less what its gradients lack of wider ones.  A
rank with a share of the tokens gathers them, N·D·e; ranks hold all of dX's sums, N·D·a, until the
backward, with gradients in forward.

Kernels need no tile.  A CPU converts 16-bit operands and takes row-wise steps in blocks.
"""

from dataclasses import dataclass

from cutefce.cute_kernels.arch import arch_named
from cutefce.cute_kernels.config import PortableTiles, WindowConfig
from cutefce.cute_kernels.integers import ceil_div
from cutefce.cute_kernels.problem import Problem, can_keep
from cutefce.cute_kernels.schedule.order import PARTIAL_BYTES
from cutefce.cute_kernels.workspace import NUM_STATS
from cutefce.ops.planning.dw_aliasing import (
    BOUNCE_ROWS,
    FINISHED_ROWS,
    fits_in_tail,
    rows_in_place,
)

UPCAST_BLOCK = 2048
"""Rows and columns of a 16-bit operand that a CPU's GEMM converts to float32 at a time."""

TARGET_BYTES = 17
"""Bytes of a token's target: index and safe index as int64, and whether it is active."""
NARROWEST_TILE = 128
"""Columns of the narrowest tile of a kernel, each of which gives one partial sum at most."""


@dataclass(frozen=True)
class CopyingProblem(Problem):
    """A problem whose operands are copied before it is computed."""

    copied_hidden: int = 0
    """Bytes per element of the hidden states as given, if the call works on a copy of them that
    lives until its backward, as under autocast; else 0."""
    copied_weight: int = 0
    """The same of the weight."""
    dense_bytes: int = 0
    """Bytes of operands that forward and backward each copy to a layout that GEMMs can address."""


def row_block_bytes(device: str) -> int:
    """Return the bytes of rows, in the dtype of sums, that an unfused step takes at a time."""
    return (1 if device == "cpu" else 128) << 20


def windows_bytes(
    p: Problem, config: WindowConfig, aliased: int, kept: int, scalar_upstream: bool
) -> int:
    """Return the workspace of a "windows" plan with `aliased` and `kept` columns.

    The latter may be padded.
    """
    stored = aliased + kept
    saved = p.tokens * (kept * p.item_bytes + NUM_STATS * p.accumulator_bytes)
    partial = p.tokens * _partial_bytes(p, config, p.tokens)
    step = _forward_step_bytes(p, config, p.tokens, stored)
    copy = _selected_bytes(p, p.tokens)
    forward = saved + partial + _gathered_bytes(p) + copy + _selection_bytes(p)
    if aliased:
        # partial sums of windows exist beside those of all columns, but not beside a tile
        forward += p.vocab * p.hidden * p.item_bytes
        step = max(step, partial)
    forward += step
    if not p.gradient_bytes:
        return _with_copies(p, forward)
    recomputed = buffer_columns = config.window
    if p.grad_weight:
        if not p.wide_grad_weight:
            buffer_columns = min(config.half(config.window), config.window)
        # as if no column was kept: a plan that keeps more never takes less
        end = aliased + config.window
        fits = fits_in_tail(end, p.tokens, p.hidden, p.vocab, config.window)
        if p.wide_grad_weight or not fits:
            recomputed = buffer_columns
    window = min(config.window if stored else recomputed, p.vocab)
    # coefficients; losses and upstream gradients; float16's coefficients are scaled
    vectors = (2 if scalar_upstream else 4) + (0 if can_keep(p.dtype) else 2)
    backward = saved + p.tokens * (TARGET_BYTES + vectors * p.accumulator_bytes)
    backward += _gathered_bytes(p) + _selection_bytes(p)
    end = backward + _row_block_bytes(p, p.tokens, GATHERED)
    longest = max(window, min(kept, p.vocab))
    step = _upcast_block_bytes(p, p.tokens, longest, p.hidden) if p.grad_hidden else 0
    if p.grad_hidden and _accumulates_wider(p):
        # dX itself is allocated at the end
        backward += p.tokens * p.hidden * (p.accumulator_bytes - p.item_bytes)
        summed = 1 + (p.ranks > 1 and p.selects_rows)  # ranks add dX in the order of the call
        end += summed * p.tokens * p.hidden * p.accumulator_bytes
    if p.grad_weight and (stored or not scalar_upstream or p.wide_grad_weight):
        backward += p.tokens * p.hidden * p.item_bytes
    if p.grad_weight and p.arch is not None and arch_named(p.arch).forms_weight_gradient:
        backward += 12 * p.tokens + 12 * p.vocab
    elif p.grad_weight:
        backward += 8 * p.vocab + min(p.tokens + 1, p.vocab) * p.hidden * p.accumulator_bytes
        backward += copy
        step = max(step, _target_rows_bytes(p), _row_block_bytes(p, p.tokens, CONVERTED))
        sums = window * p.hidden * p.accumulator_bytes if _accumulates_wider(p) else 0
        finish = _row_block_bytes(p, window, PLAIN)
        step = max(step, sums + max(finish, _upcast_block_bytes(p, window, p.tokens, p.hidden)))
    if stored < p.vocab:
        backward += p.tokens * buffer_columns * p.item_bytes + copy
        step = max(step, _tile_bytes(p, config, p.tokens, min(recomputed, p.vocab), stored=True))
    return _with_copies(p, max(forward - p.gradient_bytes, backward + step, end))


def chunked_bytes(p: Problem, config: WindowConfig, stored: int, chunk: int) -> int:
    """Return the workspace of gradients in forward: `chunk` tokens' `stored` columns at a time."""
    wider = _accumulates_wider(p)
    kept, copy = NUM_STATS * p.tokens * p.accumulator_bytes, _selected_bytes(p, p.tokens)
    kept += _selection_bytes(p)
    if p.grad_weight:
        in_place = rows_in_place(p.vocab, narrow=wider and not p.wide_grad_weight)
        kept += (p.vocab - in_place) * p.hidden * p.accumulator_bytes
    vectors = p.tokens * (TARGET_BYTES + 4 * p.accumulator_bytes)
    forward, backward = vectors + _gathered_bytes(p), vectors
    sums = marks = finish = 0  # of dX in a chunk, and which of their low bytes are not 0
    restored = copy * p.grad_hidden  # dX in the order of the call
    if p.grad_hidden and p.ranks > 1:
        shared, reduced = _shared_sums_bytes(p)
        kept, backward = kept + shared, backward + reduced
        restored *= p.accumulator_bytes // p.item_bytes  # ranks add theirs in that order
    elif p.grad_hidden and wider:
        kept += p.tokens * p.hidden
        sums, marks = chunk * p.hidden * p.accumulator_bytes, chunk * p.hidden
        finish = min(FINISHED_ROWS, p.tokens) * p.hidden * p.accumulator_bytes
    in_chunk = chunk * (stored * p.item_bytes + _partial_bytes(p, config, chunk))
    to_dw = max(
        _row_block_bytes(p, chunk, CONVERTED), _upcast_block_bytes(p, p.vocab, chunk, p.hidden)
    )
    in_chunk += max(
        _forward_step_bytes(p, config, chunk, stored) + _selected_bytes(p, chunk),
        sums + max(_upcast_block_bytes(p, chunk, p.vocab, p.hidden), marks) if p.grad_hidden else 0,
        chunk * p.hidden * p.item_bytes + to_dw if p.grad_weight else 0,
    )
    # the logits of all targets come before the chunks, and their part of dW after them
    targets = _target_rows_bytes(p)
    beside = max(_row_block_bytes(p, p.tokens, CONVERTED), targets and targets + copy)
    backward += _row_block_bytes(p, max(p.tokens, p.vocab * p.grad_weight), CONVERTED)
    if p.grad_weight and wider:
        restored += min(BOUNCE_ROWS, p.vocab) * p.hidden * p.item_bytes
    backward += max(finish, restored)
    return _with_copies(p, kept + max(forward + max(in_chunk, beside), backward))


def _shared_sums_bytes(p: Problem) -> tuple[int, int]:
    """Return the bytes of dX's sums on a rank, and of adding them to the other ranks'.

    They are less those of dX itself, which is allocated at the end.
    """
    own_rows = ceil_div(p.tokens, p.ranks)
    dx_rows = own_rows if p.sequence_parallel else p.tokens
    sums = p.tokens * p.accumulator_bytes - dx_rows * p.item_bytes
    rounded = own_rows * p.item_bytes
    gathered = rounded + (0 if p.sequence_parallel else dx_rows * p.item_bytes)
    return sums * p.hidden, max(own_rows * p.accumulator_bytes + rounded, gathered) * p.hidden


def _with_copies(p: Problem, workspace: int) -> int:
    """Return the workspace of a call that takes `workspace` without copies of h and w.

    Copies made before the forward live until the backward has its gradients, which then are
    converted, one after the other, to the dtypes of the tensors given.
    """
    if not isinstance(p, CopyingProblem):
        return workspace
    own_tokens = p.tokens // p.ranks if p.sequence_parallel else p.tokens
    h_elements, w_elements = own_tokens * p.hidden, p.vocab * p.hidden
    converted = 0
    for given, elements, wanted in (
        (p.copied_hidden, h_elements, p.grad_hidden),
        (p.copied_weight, w_elements, p.grad_weight and not p.wide_grad_weight),
    ):
        if given:
            workspace += elements * p.item_bytes
        if wanted and given > p.item_bytes:
            workspace -= elements * (given - p.item_bytes)
            converted = max(converted, elements * p.item_bytes)
    return max(workspace + p.dense_bytes, converted)


def _selection_bytes(p: Problem) -> int:
    """Bytes of the order of tokens and their targets, where kernels select rows."""
    return (16 + NUM_STATS * p.accumulator_bytes) * p.tokens * p.selects_rows


def _selected_bytes(p: Problem, rows: int) -> int:
    """Bytes of a copy of `rows` hidden states or rows of dX, where kernels select rows."""
    return rows * p.hidden * p.item_bytes * p.selects_rows


def _gathered_bytes(p: Problem) -> int:
    """Bytes of the hidden states of all tokens, where a rank has a share of them."""
    return p.tokens * p.hidden * p.item_bytes if p.sequence_parallel else 0


def _partial_bytes(p: Problem, config: WindowConfig, tokens: int) -> int:
    """Bytes of a token's target, logit and partial sums while the forward of `tokens` runs."""
    if p.arch is not None:
        tiles = ceil_div(p.vocab, NARROWEST_TILE)
        partials = min(tiles, PARTIAL_BYTES // (4 * max(tokens, 1)))
        return TARGET_BYTES + (2 + partials) * p.accumulator_bytes
    blocks = ceil_div(p.vocab, config.reference_block)
    return TARGET_BYTES + (2 + 2 * blocks) * p.accumulator_bytes


def _forward_step_bytes(p: Problem, config: WindowConfig, tokens: int, stored: int) -> int:
    """Bytes of one step of the forward of `tokens` that stores `stored` columns."""
    if p.arch is not None:
        return 0
    blocks = ceil_div(p.vocab, config.reference_block)
    # vectors of tokens beside the partial sums; float16 makes new statistics of the old ones
    vectors = 5 if can_keep(p.dtype) else 8
    reduced = tokens * max(blocks * (2 * p.accumulator_bytes + 1), vectors * p.accumulator_bytes)
    repaired = 0
    if stored and p.device == "cpu" and _accumulates_wider(p):
        # a block of exponentials in the dtype of sums, and of the scaled ones
        repaired = 2 * min(tokens * p.vocab * p.accumulator_bytes, row_block_bytes(p.device))
    rows = _row_block_bytes(p, tokens, CONVERTED)
    tile = _tile_bytes(p, config, tokens, p.vocab, stored=stored >= p.vocab)
    return max(tile, reduced, repaired, rows)


PLAIN, GATHERED, CONVERTED = 2, 3, 4
"""Half row blocks of a row-wise step with operands in the dtype of sums; with one that is gathered
and converted; with one that is converted beside the result."""


def _row_block_bytes(p: Problem, rows: int, halves: int) -> int:
    """Bytes of a row-wise step on a CPU; fused steps of a GPU allocate only their results."""
    if p.device != "cpu":
        return 0
    row_bytes = p.hidden * p.accumulator_bytes
    block = min(rows * row_bytes, max(row_block_bytes(p.device), row_bytes))
    return block // 2 * halves if _accumulates_wider(p) else block


def _target_rows_bytes(p: Problem) -> int:
    """Bytes of the step that adds a block of tokens to the targets' part of dW, in plain torch."""
    if not p.grad_weight or (p.arch is not None and arch_named(p.arch).forms_weight_gradient):
        return 0
    return min(p.tokens * p.hidden * p.accumulator_bytes, row_block_bytes(p.device))


def _tile_bytes(p: Problem, config: WindowConfig, tokens: int, window: int, *, stored: bool) -> int:
    """Bytes of a tile of the logits of `window` columns, and of the step that computes it.

    A CPU may compute logits in the memory of stored exponentials.
    """
    if p.arch is not None:
        return 0
    assert isinstance(config, PortableTiles)
    rows, columns = min(tokens, config.tile_rows), config.columns(tokens)
    if p.device != "cpu":
        return rows * columns * p.accumulator_bytes
    in_place = stored and not _accumulates_wider(p)
    logits = (p.tile_copies + (not in_place)) * rows * columns * p.accumulator_bytes
    upcast = _upcast_block_bytes(p, rows, p.hidden, min(columns, window))
    return logits + max(rows * columns, upcast)


def _upcast_block_bytes(p: Problem, rows: int, inner: int, columns: int) -> int:
    """Bytes of the blocks converted for a GEMM (rows, inner) @ (inner, columns)."""
    if p.device != "cpu" or not _accumulates_wider(p):
        return 0
    block = min(inner, UPCAST_BLOCK)
    return (min(rows, UPCAST_BLOCK) + columns) * block * p.accumulator_bytes


def _accumulates_wider(p: Problem) -> bool:
    """Whether sums need more bytes than the inputs have."""
    return p.item_bytes < p.accumulator_bytes
