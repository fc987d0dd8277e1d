"""Bytes that soft targets add to the steps of a call, and those of the targets' part of dW.

With K classes of each of N tokens, a bytes a sum and e bytes a hidden state:

    held      N·K·(8 + 2·a)        classes, coefficients, logits
    returned  N·K·5·a              log-probabilities, their gradients as given and in the order of
                                   classes, logits in that order, and of the forward
    entries   N·K·a                among exponentials, in a backward
    lists     N·(K + 1)·(16 + a)   of dW, of 16-bit exponentials that were stored: class, token,
              + N·K·a              coefficient, which are sorted
    gathered  K·D·(a + e)          rows of the weight for a token, on a CPU for a block of tokens
"""

from cutefce.cute_kernels.arch import arch_named
from cutefce.cute_kernels.problem import Problem
from cutefce.ops.planning.call_problem import CallProblem, soft_targets
from cutefce.ops.planning.step_memory import (
    accumulates_wider,
    row_block_bytes,
    soft_block_rows,
)

MADE_BYTES = 33
"""Bytes of a class while it is sorted, or put."""


def soft_bytes(p: Problem, tokens: int) -> int:
    """Bytes of the soft targets of `tokens`, which exist in a forward and in a backward."""
    returned = 5 * (isinstance(p, CallProblem) and p.returns_classes)
    return tokens * soft_targets(p) * (8 + (2 + returned) * p.accumulator_bytes)


def soft_step_bytes(p: Problem, tokens: int) -> int:
    """Bytes of the largest step that makes them, or gathers rows of the weight, beside them."""
    made = tokens * soft_targets(p) * MADE_BYTES
    if p.device != "cpu" or not soft_targets(p):
        return made
    elements = soft_targets(p) * p.hidden
    rows = min(soft_block_rows(elements, p.accumulator_bytes, p.device), tokens)
    row_bytes = p.accumulator_bytes + p.item_bytes * accumulates_wider(p)
    return max(made, rows * elements * row_bytes)


def entries_bytes(p: Problem, tokens: int) -> int:
    """Bytes of the entries among exponentials."""
    return tokens * soft_targets(p) * p.accumulator_bytes


def listed(p: Problem, *, stored: bool) -> int:
    """Return the soft targets of each token that are in dW's lists; `stored` exponentials."""
    return soft_targets(p) * (accumulates_wider(p) and stored)


def targets_bytes(p: Problem, tokens: int, soft: int) -> tuple[int, int]:
    """Return the bytes of the targets' part of dW until it is added, and of what makes it.

    Its lists have `soft` targets of each token beside its lead.
    """
    count, is_soft = tokens * (1 + soft), soft > 0
    entries = count * (16 + p.accumulator_bytes) * is_soft
    others = tokens * soft * p.accumulator_bytes
    if sorts_by_kernel(p):
        return 12 * count + 12 * p.vocab, 40 * count * is_soft + others
    if sorts_entries(p, soft):
        # a sort holds its keys and indices twice
        return count * (12 + p.accumulator_bytes), 40 * count + others
    sums = min(count + 1, p.vocab) * p.hidden * p.accumulator_bytes
    return entries + 8 * p.vocab + sums, 17 * count * is_soft + others


def target_rows_bytes(p: Problem, tokens: int, soft: int = 0) -> int:
    """Bytes of the step that adds a block of entries to the targets' part of dW, in plain torch."""
    if not p.grad_weight or sorts_by_kernel(p):
        return 0
    rows = tokens * (1 + soft) * p.hidden
    block = min(rows * p.accumulator_bytes, row_block_bytes(p.device))
    gathered = block * p.item_bytes // p.accumulator_bytes * (soft > 0)
    return block + gathered


def sorts_by_kernel(p: Problem) -> bool:
    """Whether a kernel lists the entries of every class."""
    return p.arch is not None and arch_named(p.arch).forms_weight_gradient


def sorts_entries(p: Problem, soft: int) -> bool:
    """Whether dW's entries are sorted, and added for some rows at a time."""
    return soft > 0 and p.device == "cpu"
