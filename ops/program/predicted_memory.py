"""What a call costs on the primitives that serve it: the scratch of each step, and the workspace.

Kernels compute in registers and shared memory.  Plain torch takes tiles of logits; on a CPU also
blocks of operands that are converted to the dtype of sums, and of rows.
"""

from cutefce.cute_kernels.integers import ceil_div, round_up
from cutefce.ops.outputs.memory import combined_bytes, searched_bytes
from cutefce.ops.primitives.block_sizes import (
    WEIGHT_FEATURES,
    added_rows,
    finished_rows,
    soft_block_rows,
)
from cutefce.ops.program.layout import Layout, scales_exps
from cutefce.ops.program.problem import LossProblem
from cutefce.ops.program.step_memory import (
    partial_sums,
    rows_bytes,
    shared_sums_bytes,
    target_rows_bytes,
    targets_bytes,
    tile_bytes,
    upcast_bytes,
)
from cutefce.ops.program.steps import Kind, Step

MADE_BYTES = 33
"""Bytes of a soft target while it is sorted, or put."""


def workspace(p: LossProblem, peak: int, saved: int) -> int:
    """Return the workspace of a call whose program takes `peak` bytes.

    `saved` are the bytes that it holds from the forward to the end of the backward.
    Copies made before the forward live until the backward has its gradients, which then are
    converted, one after the other, to the dtypes of the tensors given.  A rank whose hidden
    states are a share gathers them, and has all of dX's sums until the ranks add theirs.
    """
    converted = 0
    peak += p.copied
    if p.ranks and p.grad_hidden:
        shared, reduced = shared_sums_bytes(p)
        ordered = p.tokens * p.hidden * p.accumulator_bytes * p.selects  # in the order of the call
        peak = max(peak, saved + max(ordered, reduced)) + shared
    if p.sequence_parallel:
        peak += p.tokens * p.hidden * p.item_bytes
    own_tokens = p.tokens // p.ranks if p.sequence_parallel else p.tokens
    for given, rows, returned in (
        (p.copied_hidden, own_tokens, p.grad_hidden),
        (p.copied_weight, p.vocab, p.grad_weight and not p.wide_grad_weight),
    ):
        copy = rows * p.hidden * p.item_bytes
        if given:
            peak += copy
        if returned and given > p.item_bytes:
            peak -= rows * p.hidden * (given - p.item_bytes)
            converted = max(converted, copy)
    return max(peak, converted)


def scratch(p: LossProblem, x: Layout, step: Step) -> int:
    """Return the bytes that a step takes while it runs, beside its buffers.

    A block of rows on a CPU, and of the steps that may be at a peak what they make.
    """
    own, sums = 0, p.accumulator_bytes
    rows, columns = step.rows[1] - step.rows[0], step.columns[1] - step.columns[0]
    match step.kind:
        case Kind.PROJECT if not step.repairs or "exps" in step.writes:
            stores = any(name.startswith("exps") for name in step.writes)
            # exponentials that are computed again have no sums over all classes
            has_sums = p.tile_copies < 2 or "logits" in step.reads
            copies = p.tile_copies if has_sums else 0
            own = tile_bytes(p, rows, columns, copies=copies, stored=stores)
        case Kind.REDUCE:
            parts = sum(name.startswith("partial") for name in step.reads)
            joined = rows * partial_sums(p, rows, p.vocab) * sums * (parts > 1)
            own = joined + max(combined_bytes(p, rows), searched_bytes(p, rows))
        case Kind.ALL_GATHER:
            own = 2 * rows * ceil_div(p.vocab, p.block) * sums * (p.arch is None)
        case Kind.TARGET_LOGIT if step.rows[0] == 0:  # makes the soft targets of all tokens
            own = p.tokens * p.soft * (MADE_BYTES - 8 - 2 * sums)
        case Kind.ENTRIES | Kind.SCALE_EXPS:
            own = rows * p.soft * (sums + MADE_BYTES * (not p.is_fused))
        case Kind.BIAS:
            own = 4 * columns * sums
        case Kind.GEMM_HIDDEN if not p.is_fused:
            packed = 0
            if len(step.writes) > 1:
                packed = min(finished_rows(p.hidden, sums, p.device), rows)
            product = upcast_bytes(p, packed or rows, columns, p.hidden)
            own = packed * p.hidden * sums + max(product, rows_bytes(p, packed, x.low_bits))
        case Kind.GEMM_WEIGHT:
            own = _weight(p, step, rows, columns, x)
        case Kind.KEEP_HIDDEN | Kind.FINISH_HIDDEN if step.low and not p.is_fused:
            own = rows_bytes(p, rows, p.few_low_bits if x.in_chunks else x.low_bits)
    if p.device != "cpu":
        return own
    if p.soft:  # gathers the weight's rows of one token at least
        elements = p.soft * p.hidden
        block = min(soft_block_rows(elements, sums, p.device), rows)
        own = max(own, block * elements * (sums + p.item_bytes * p.accumulates_wider))
    return max(own, rows_bytes(p, rows * max(p.soft, 1)))


def _weight(p: LossProblem, step: Step, rows: int, columns: int, x: Layout) -> int:
    """Bytes of a product that adds to dW, or writes rows of it."""
    is_packed, row_bytes, beside = len(step.writes) > 1, p.hidden * p.accumulator_bytes, 0
    if step.writes == ("into",) and not p.adds_in_place:
        beside = min(added_rows(p.hidden, p.accumulator_bytes, p.device), columns) * row_bytes
    if p.is_fused:
        return beside
    window = min(p.tiles.window, columns)
    is_wide = p.accumulates_wider and step.writes != ("into",)
    is_wide &= is_packed or p.dw_item < p.accumulator_bytes
    if p.triton and not beside:  # has low bits of rows to which terms of targets are added
        is_wide &= not (is_packed or scales_exps(p, x))
        beside = min(rows, columns) * round_up(p.hidden, WEIGHT_FEATURES) * is_wide
    elif not beside:
        beside = window * row_bytes * is_wide
    block = window if beside else columns
    most = max(upcast_bytes(p, block, rows, p.hidden), target_rows_bytes(p, rows))
    joined = rows_bytes(p, block, x.low_bits * is_packed)
    # the targets of a chunk are summed for it
    return beside + targets_bytes(p, rows) * is_packed + max(most, joined)
