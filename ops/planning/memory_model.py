"""The workspace of a plan: its peak of allocated memory beyond the inputs and the gradients.

With N tokens, D hidden, V vocab, e bytes an element, a bytes a sum, w columns a window, K columns
kept, L columns aliased, and tiles of R rows and C columns, the larger parts are:

    kept    N·K·e                      exponentials from the forward to the backward; those of the
                                       L aliased columns use dW, allocated in the forward
    tile    R·C·a                      one tile of logits
    buffer  N·w·e / 2 at most          exponentials of half a window, where the tail of dW is too
                                       small to recompute them there; of a whole one without dW;
                                       none if K + L = V
    dX      N·D·a                      its sums, unless they are the gradient (e = a); dX itself is
                                       allocated after buffer and s_i h_i are freed
            or N·D / 2                 4 bits of each of them, beside 16 in dX's memory, or where
                                       rows are selected in other memory until the end; N·D over
                                       more than 32 windows
    dW      N·D·e                      s_i h_i, unless K = L = 0 and every token's loss has the same
                                       upstream gradient, or K + L > 0 with soft targets; freed
                                       before logits are recomputed
            soft targets: see `soft_memory`
            + 12·N + 4·V               kernels: the tokens of each target and their coefficients
            + (N + 1)·D·a + 8·V        portable: the targets' sums and their slots,
            + w·D·a                    one window's sums, unless they are the gradient

    forward without gradients          tile
    windows                            kept + buffer + dX + dW
    rows selected                      N·D·e, or c·D·e in chunks: h, where logits are computed
    gradients in forward               c·V·e for chunks of c tokens, c·K·e for dX alone; unless
                                       sums are the gradients (e = a), V·D / 2 for 4 bits of each
                                       of dW's sums, V·D over more than 32 chunks and nothing
                                       if they are added to a buffer at once, as N·D / 2 of
                                       dX's; and c·D·a for a chunk's

Copies of h and w that a call works on are added, less what its gradients lack of wider ones.  A
rank with a share of the tokens gathers them, N·D·e; ranks hold all of dX's sums, N·D·a, until the
backward, with gradients in forward.

Kernels need no tile.  A CPU converts 16-bit operands and takes row-wise steps in blocks.
"""

from cutefce.cute_kernels.config import WindowConfig
from cutefce.cute_kernels.integers import ceil_div
from cutefce.cute_kernels.problem import Problem, can_keep
from cutefce.cute_kernels.workspace import NUM_STATS, low_bytes
from cutefce.ops.planning.call_problem import (
    CallProblem,
    accumulates,
    adds_in_forward,
    forms_gradients,
    soft_targets,
)
from cutefce.ops.planning.dw_aliasing import DwMemory
from cutefce.ops.planning.soft_memory import (
    entries_bytes,
    soft_bytes,
    soft_step_bytes,
    target_rows_bytes,
    targets_bytes,
)
from cutefce.ops.planning.step_memory import (
    CONVERTED,
    GATHERED,
    KEPT,
    PLAIN,
    TARGET_BYTES,
    accumulates_wider,
    added_rows,
    few_low_bits,
    forward_step_bytes,
    has_weight_kernels,
    keeps_weight_sums,
    kept_hidden_bytes,
    kept_low_bits,
    partial_bytes,
    rounds_hidden,
    rows_bytes,
    rows_of_sums,
    shared_sums_bytes,
    tile_bytes,
    upcast_bytes,
)


def windows_bytes(
    p: Problem,
    config: WindowConfig,
    aliased: int,
    kept: int,
    scalar_upstream: bool,
    hidden_bits: int | None = None,
) -> int:
    """Return the workspace of a "windows" plan with `aliased` and `kept` columns.

    The latter may be padded.  With `hidden_bits`, these are kept of dX's sums beside 16.
    """
    stored = aliased + kept
    saved = p.tokens * (kept * p.item_bytes + NUM_STATS * p.accumulator_bytes)
    partial = p.tokens * partial_bytes(p, config, p.tokens)
    step = max(forward_step_bytes(p, config, p.tokens, stored), soft_step_bytes(p, p.tokens))
    copy, soft = _selected_bytes(p, p.tokens), soft_bytes(p, p.tokens)
    forward = saved + soft + partial + gathered_bytes(p) + copy + selection_bytes(p)
    if aliased:
        # partial sums of windows exist beside those of all columns, but not beside a tile
        forward += p.vocab * p.hidden * p.item_bytes
        step = max(step, partial)
    forward += step
    if not forms_gradients(p):
        return with_copies(p, forward)
    recomputed = buffer_columns = config.window
    if p.grad_weight and not p.wide_grad_weight:
        memory = DwMemory(p.tokens, p.hidden, p.vocab, config.reference_block)
        buffer_columns = memory.buffer_columns(stored, config.half(config.window))
        recomputed = max(buffer_columns, memory.widest(stored))
    # coefficients; losses and upstream gradients; float16's coefficients are scaled
    vectors = (2 if scalar_upstream else 4) + (0 if can_keep(p.dtype) else 2)
    after = saved + soft + p.tokens * (TARGET_BYTES + vectors * p.accumulator_bytes)
    after += selection_bytes(p) + entries_bytes(p, p.tokens)
    backward = after + gathered_bytes(p)
    # kernels put entries where they are, and gather no rows
    made = soft_step_bytes(p, p.tokens) if p.arch is None else 0
    end = backward + rows_bytes(p, p.tokens, GATHERED) + made
    if p.grad_hidden and p.ranks > 1:
        shared, reduced = shared_sums_bytes(p)
        backward += shared
        # ranks add dX in the order of the call
        ordered = p.tokens * p.hidden * p.accumulator_bytes * p.selects_rows
        end = shared + max(end + ordered, after + reduced)
    elif p.grad_hidden and hidden_bits is not None:
        low = p.tokens * low_bytes(p.hidden, hidden_bits)
        # rows get their places in dX itself, which is allocated at the end
        backward, end = backward + low, end + low + copy
        end += rows_of_sums(p) if p.arch is None else 0
    elif p.grad_hidden and accumulates_wider(p):
        # dX itself is allocated at the end
        backward += p.tokens * p.hidden * (p.accumulator_bytes - p.item_bytes)
        end += p.tokens * p.hidden * p.accumulator_bytes
    scales_exps = stored > 0 and accumulates_wider(p) and soft_targets(p) > 0
    if p.grad_weight:
        backward += copy * (not has_weight_kernels(p))
        backward += targets_bytes(p, p.tokens) * (not (scales_exps and has_weight_kernels(p)))
    scaled = step = 0
    uniform = scalar_upstream and not p.wide_grad_weight and not soft_targets(p)
    if p.grad_weight and (stored or not uniform):
        scaled = copy if scales_exps else p.tokens * p.hidden * p.item_bytes
    if stored:
        window = min(config.window, p.vocab)
        longest = max(window, min(kept, p.vocab))
        step = _window_bytes(p, window, longest, hidden_bits)
    peak = scaled + step
    if stored < p.vocab:
        rest = p.tokens * buffer_columns * p.item_bytes + copy * (not scales_exps)
        window = min(recomputed, config.window, p.vocab)
        tile = tile_bytes(p, config, p.tokens, min(recomputed, p.vocab), stored=True)
        own_step = max(_window_bytes(p, window, window, hidden_bits), tile)
        # scaled hidden states of stored columns are freed before the others are selected
        apart = p.grad_weight and uniform
        peak = max(peak, rest + own_step) if apart else scaled + rest + max(step, own_step)
    return with_copies(p, max(forward - p.gradient_bytes, backward + peak, end))


def _window_bytes(p: Problem, window: int, longest: int, hidden_bits: int | None) -> int:
    """Bytes of the products of a window: `longest` columns of dX, `window` rows of dW at once."""
    step = soft_step_bytes(p, p.tokens) if p.arch is None else 0
    if hidden_bits is not None:
        step = max(step, kept_hidden_bytes(p, longest))
    elif p.grad_hidden:
        step = max(step, upcast_bytes(p, p.tokens, longest, p.hidden))
    if not p.grad_weight:
        return step
    if has_weight_kernels(p):
        return max(step, added_bytes(p))
    sums = 0
    if accumulates(p):
        sums = added_bytes(p)
    elif accumulates_wider(p):
        sums = window * p.hidden * p.accumulator_bytes
    finish, added = sums + rows_bytes(p, window, PLAIN), target_rows_bytes(p, p.tokens)
    upcast = sums + upcast_bytes(p, window, p.tokens, p.hidden)
    return max(step, rows_bytes(p, p.tokens, CONVERTED), finish, added, upcast)


def chunked_bytes(p: Problem, config: WindowConfig, stored: int, chunk: int) -> int:
    """Return the workspace of gradients in forward, with chunks of `chunk` tokens.

    `stored` < V columns are those of dX alone.
    """
    wider = accumulates_wider(p)
    kept, copy = NUM_STATS * p.tokens * p.accumulator_bytes, _selected_bytes(p, p.tokens)
    kept += selection_bytes(p)
    if keeps_weight_sums(p):
        kept += p.vocab * low_bytes(p.hidden, kept_low_bits(p, ceil_div(p.tokens, chunk)))
    if accumulates(p) and not adds_in_forward(p):
        kept += p.vocab * p.hidden * p.item_bytes
    kept += soft_bytes(p, p.tokens)
    vectors = p.tokens * (TARGET_BYTES + 4 * p.accumulator_bytes)
    forward, reduced = vectors + gathered_bytes(p), 0
    sums = marks = finish = 0  # of dX in a chunk, and which of their low bytes are not 0
    restored = 0  # dX in the order of the call
    if p.grad_hidden and p.ranks > 1:
        shared, reduced = shared_sums_bytes(p)
        kept += shared
        restored = copy * p.accumulator_bytes // p.item_bytes  # ranks add theirs in that order
    elif p.grad_hidden and wider:
        if not rounds_hidden(p):
            kept += p.tokens * low_bytes(p.hidden, few_low_bits(p.hidden))
        sums = chunk * p.hidden * p.accumulator_bytes
        if p.arch is None:  # kernels join the bytes of a sum in registers
            marks = rows_bytes(p, chunk, KEPT)
            finish = 0 if rounds_hidden(p) else rows_of_sums(p)
    partial = chunk * partial_bytes(p, config, chunk)
    step = forward_step_bytes(p, config, chunk, p.vocab) + _selected_bytes(p, chunk)
    product = max(upcast_bytes(p, chunk, stored, p.hidden), marks) * p.grad_hidden
    in_chunk = min(chunk, p.tokens) * stored * p.item_bytes
    if stored < p.vocab:
        # partial sums of windows exist beside those of all columns, and h beside dX's sums
        in_chunk += sums + 2 * partial + max(step, product)
    else:
        product = max(product, soft_step_bytes(p, chunk))
        step += partial
        in_chunk += max(step, sums + product, _chunk_dw_bytes(p, config, chunk))
    in_chunk += entries_bytes(p, chunk)
    # of all targets' logits, before the chunks
    beside = max(rows_bytes(p, p.tokens, CONVERTED), soft_step_bytes(p, p.tokens))
    scaled = p.vocab * (p.grad_weight and not adds_in_forward(p))
    finished = max(rows_bytes(p, p.tokens, CONVERTED), rows_bytes(p, scaled, KEPT))
    backward = vectors + max(reduced, finished + max(finish, restored))
    return with_copies(p, kept + max(forward + max(in_chunk, beside), backward))


def _chunk_dw_bytes(p: Problem, config: WindowConfig, chunk: int) -> int:
    """Bytes of the step that adds the part of `chunk` tokens to the sums of dW."""
    if not p.grad_weight:
        return 0
    scaled = chunk * p.hidden * p.item_bytes
    if has_weight_kernels(p):
        scales_exps = accumulates_wider(p) and soft_targets(p) > 0
        return scaled + targets_bytes(p, p.tokens) * (not scales_exps)
    held = targets_bytes(p, chunk)
    rows, targets = p.vocab, target_rows_bytes(p, chunk)
    scaled += _selected_bytes(p, chunk)
    if keeps_weight_sums(p):
        # the targets' sums and their slots, and the products of a window
        rows = min(config.window, p.vocab)
        sums = rows * p.hidden * p.accumulator_bytes
        scaled += held + sums
        targets = max(targets, rows_bytes(p, rows, KEPT))
    products = upcast_bytes(p, rows, chunk, p.hidden)
    return scaled + max(rows_bytes(p, chunk, CONVERTED), targets, products)


def added_bytes(p: Problem) -> int:
    """Bytes of rows of dW that are computed beside the caller's buffer."""
    if not isinstance(p, CallProblem) or not accumulates(p) or p.adds_in_place:
        return 0
    rows = added_rows(p.hidden, p.accumulator_bytes, p.device)
    return min(rows, p.vocab) * p.hidden * p.accumulator_bytes


def with_copies(p: Problem, workspace: int) -> int:
    """Return the workspace of a call that takes `workspace` without copies of h and w.

    Copies made before the forward live until the backward has its gradients, which then are
    converted, one after the other, to the dtypes of the tensors given.
    """
    if not isinstance(p, CallProblem):
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


def selection_bytes(p: Problem) -> int:
    """Bytes of the order of tokens and their targets, where kernels select rows."""
    return (16 + NUM_STATS * p.accumulator_bytes) * p.tokens * p.selects_rows


def _selected_bytes(p: Problem, rows: int) -> int:
    """Bytes of a copy of `rows` hidden states or rows of dX, where kernels select rows."""
    return rows * p.hidden * p.item_bytes * p.selects_rows


def gathered_bytes(p: Problem) -> int:
    """Bytes of the hidden states of all tokens, where a rank has a share of them."""
    return p.tokens * p.hidden * p.item_bytes if p.sequence_parallel else 0
