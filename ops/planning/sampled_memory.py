"""The workspace of sampled gradients.

N tokens, D hidden, V vocab, e bytes an element, a bytes a sum.

With K slots a token, S classes of the estimate, R rows and C columns of a tile, and M entries in a
window of w columns, N·samples·w/V of them where the softmax is flat:

    kept      N·(K + 1)·(4 + a)          entries, from the forward to the backward
    forward   R·C·a + 25·B               a tile, and the bits of B of its logits
              or S·D·e                   their rows of the weight
    backward  sums of dX and s_i h_i, N·K for where entries are, 28·M of a window, as much
              again by column, and sums of 256 columns; on a GPU, a window of exponentials N·w·e

Kernels keep 8·N·K from the forward to the backward, and need no window:

    forward   S·D·e                      rows of the estimate, or
              N·D·e                      hidden states of tokens that are sampled again
    backward  12·N·(K + 1) + 8·V         lists of dW, or
              N·D·a                      sums of dX, with label smoothing, which also forms dW
                                         beside its memory, some rows at a time
"""

from dataclasses import dataclass, replace
from math import sqrt

from cutefce.cute_kernels.config import PortableTiles, WindowConfig
from cutefce.cute_kernels.integers import ceil_div
from cutefce.cute_kernels.problem import Problem, can_keep
from cutefce.cute_kernels.workspace import NUM_STATS
from cutefce.ops.planning.device import device_of
from cutefce.ops.planning.sample_sizes import estimate_count, slots
from cutefce.ops.planning.step_memory import (
    CONVERTED,
    GATHERED,
    GATHERED_COLUMNS,
    PLAIN,
    TARGET_BYTES,
    accumulates_wider,
    added_bytes,
    added_rows,
    forward_step_bytes,
    partial_bytes,
    rows_bytes,
    sampled_rows,
    target_rows_bytes,
    unused_bytes,
    upcast_bytes,
)

INDEX_BYTES = 8
SAMPLED_AGAIN_BYTES = 24
"""Bytes of a token's target, order and reference where it may be sampled again."""
CHOICE_BYTES = 21
"""Bytes of a logit while it is chosen, beside its probability: bits, in 32 and in 64, a threshold
in 64, and the choice."""


@dataclass(frozen=True)
class SampledProblem(Problem):
    """A problem whose gradients are formed of sampled exponentials."""

    samples: int = 0
    """Entries of a token that are expected to be kept."""
    smooths: bool = False
    """Whether label smoothing adds a part to the gradients."""
    accumulates: bool = False
    """Whether dW is added to a buffer and not returned."""
    adds_in_place: bool = True
    """Whether GEMMs can add to that buffer; else dW is computed beside it, some rows at a time."""

    @property
    def gradient_bytes(self) -> int:
        """Bytes of the gradients that are returned."""
        dw = self.vocab * self.hidden * self.grad_weight_bytes * self.grad_weight
        return super().gradient_bytes - dw * self.accumulates


def sampled_seconds(p: SampledProblem) -> float:
    """Return the time of forward and backward; without kernels, a GPU multiplies whole windows."""
    device, gradients = device_of(p.device), p.grad_hidden + p.grad_weight
    columns = p.vocab + estimate_count(p.vocab * p.ranks) // p.ranks
    if p.device != "cpu" and p.arch is None:
        columns += (1 + gradients) * p.vocab
    moved = gradients * p.tokens * p.samples * p.hidden * p.item_bytes
    return 2 * p.tokens * p.hidden * columns / device.flops + moved / device.bytes


def sampled_bytes(p: SampledProblem, config: WindowConfig) -> int:
    """Return the workspace of sampled gradients, beside copies and what ranks exchange."""
    if p.arch is not None:
        return _kernel_bytes(p, config)
    assert isinstance(config, PortableTiles)
    entry_bytes = 4 + p.accumulator_bytes
    samples = p.tokens * (slots(p.samples, p.vocab) + 1) * entry_bytes
    saved = p.tokens * NUM_STATS * p.accumulator_bytes
    forward = saved + _forward_bytes(p, config, samples)
    after = saved + samples + p.tokens * TARGET_BYTES
    after += (4 if can_keep(p.dtype) else 6) * p.tokens * p.accumulator_bytes
    backward = after
    end = backward + rows_bytes(p, p.tokens, GATHERED)
    sums = p.tokens * p.hidden * p.accumulator_bytes
    if p.grad_hidden and p.ranks == 1 and accumulates_wider(p):
        backward += sums - p.tokens * p.hidden * p.item_bytes
        end += sums
    step = 0
    if p.grad_weight:
        backward += p.tokens * p.hidden * p.item_bytes + INDEX_BYTES * p.vocab
        backward += min(p.tokens + 1, p.vocab) * p.hidden * p.accumulator_bytes
        step = max(target_rows_bytes(p, p.tokens), rows_bytes(p, p.tokens, CONVERTED))
    step = max(step, _window_bytes(p, min(config.window, p.vocab)))
    return max(forward - p.gradient_bytes, backward + step, end)


def _kernel_bytes(p: SampledProblem, config: WindowConfig) -> int:
    """Return the workspace of sampled gradients on kernels."""
    most, item = slots(p.samples, p.vocab), p.tokens * p.hidden * p.item_bytes
    samples, saved = p.tokens * (8 * most + 12), p.tokens * NUM_STATS * p.accumulator_bytes
    saved += (16 + NUM_STATS * p.accumulator_bytes) * p.tokens * p.selects_rows
    copy, partial = item * p.selects_rows, p.tokens * partial_bytes(p, config, p.tokens)
    drawn = estimate_count(p.vocab * p.ranks)
    gathered = drawn * p.hidden * p.item_bytes * (drawn < p.vocab * p.ranks)
    again = item + SAMPLED_AGAIN_BYTES * p.tokens
    estimate = gathered + p.tokens * partial_bytes(replace(p, vocab=drawn), config, p.tokens)
    estimate += unused_bytes(p, p.tokens)
    forward = saved + copy + max(estimate, partial + samples + again)
    backward = saved + samples + p.tokens * (TARGET_BYTES + 6 * p.accumulator_bytes)
    smoothed = p.tokens * p.hidden * p.accumulator_bytes * (p.smooths and p.grad_hidden)
    lists = 0
    if p.grad_weight or p.grad_bias:
        lists = 12 * p.tokens * (most + 1) + 8 * p.vocab
        beside = min(added_rows(p.hidden, p.accumulator_bytes, p.device), p.vocab)
        is_beside = not p.grad_weight or not p.adds_in_place or p.smooths
        lists += beside * p.hidden * p.accumulator_bytes * is_beside
    return max(forward - p.gradient_bytes, backward + max(smoothed, lists))


def _forward_bytes(p: SampledProblem, config: PortableTiles, samples: int) -> int:
    """Bytes of the forward beside its statistics."""
    drawn = estimate_count(p.vocab * p.ranks)
    partial = p.tokens * partial_bytes(p, config, p.tokens)
    estimate = forward_step_bytes(p, config, p.tokens)
    if drawn < p.vocab * p.ranks:
        blocks = ceil_div(ceil_div(drawn, p.ranks), config.reference_block)
        estimate += drawn * p.hidden * p.item_bytes
        estimate += 2 * p.tokens * blocks * p.accumulator_bytes
    rows, columns = min(p.tokens, config.tile_rows), config.columns(p.tokens)
    tiles = 1 if p.device == "cpu" else 2
    chosen = min(rows, sampled_rows(columns, p.device)) * columns
    choice = chosen * (p.accumulator_bytes + CHOICE_BYTES)
    upcast = upcast_bytes(p, rows, p.hidden, min(columns, p.vocab))
    vectors = p.tokens * (TARGET_BYTES + 2 * p.accumulator_bytes)
    sampling = samples + vectors + tiles * rows * columns * p.accumulator_bytes
    return partial + max(estimate, sampling + max(choice, upcast))


def _window_bytes(p: SampledProblem, window: int) -> int:
    """Bytes of a window's entries and of their products."""
    used = min(slots(p.samples, p.vocab), int(p.samples + 3 * sqrt(p.samples)))
    places = p.tokens * used
    rows_sums = window * p.hidden * p.accumulator_bytes if accumulates_wider(p) else 0
    if p.accumulates:
        rows_sums = 0 if p.adds_in_place else added_bytes(p)
    if p.device != "cpu":
        scattered = p.tokens * slots(p.samples, p.vocab) * (14 + p.accumulator_bytes)
        return places + p.tokens * window * p.item_bytes + max(scattered, rows_sums)
    entries = min(p.tokens * p.samples * window // p.vocab, places)
    own = entries * (3 * INDEX_BYTES + p.accumulator_bytes)
    # torch's product of float64 numbers the sum of every entry
    bags = entries * INDEX_BYTES * (p.accumulator_bytes == INDEX_BYTES)
    width = min(p.hidden, GATHERED_COLUMNS) * p.accumulator_bytes
    copies = accumulates_wider(p) or p.hidden > GATHERED_COLUMNS
    found = 0
    if p.grad_hidden:
        found = (p.tokens + window * copies) * width + bags
    if p.grad_weight:
        by_column = entries * (2 * INDEX_BYTES + p.accumulator_bytes)
        product = bags + (window + p.tokens * copies) * width
        product = by_column + max(entries * INDEX_BYTES, product)
        found = max(found, rows_sums + max(product, rows_bytes(p, window, PLAIN)))
    return places + max(2 * places + entries * 2 * INDEX_BYTES, own + found)
