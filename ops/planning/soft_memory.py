"""Bytes that soft targets add to the steps of a call, and those of the targets' part of dW.

With K classes of each of N tokens, a bytes a sum and e bytes a hidden state:

    held      N·K·(8 + 2·a)        classes, coefficients, logits
    returned  N·K·(18 + 5·a)       log-probabilities, logits of all ranks, the order of classes,
                                   which are counted and which are leads; of the backward:
                                   gradients as given, and in the order of classes these,
                                   gradients, coefficients; 14 bytes less if e = a
    entries   N·K·a                among exponentials, in a backward
    gathered  K·D·(a + e)          rows of the weight for a token, on a CPU for a block of tokens
"""

from cutefce.cute_kernels.problem import Problem
from cutefce.ops.planning.call_problem import CallProblem, soft_targets
from cutefce.ops.planning.step_memory import (
    accumulates_wider,
    has_weight_kernels,
    row_block_bytes,
    soft_block_rows,
)

MADE_BYTES = 33
"""Bytes of a class while it is sorted, or put."""


def soft_bytes(p: Problem, tokens: int) -> int:
    """Bytes of the soft targets of `tokens`, which exist from a forward to its backward."""
    class_bytes = 8 + 2 * p.accumulator_bytes
    if isinstance(p, CallProblem) and p.returns_classes:
        # 14 bytes less where exponentials have the dtype of sums: fitted to peaks on a CPU
        class_bytes += (18 if accumulates_wider(p) else 4) + 5 * p.accumulator_bytes
    return tokens * soft_targets(p) * class_bytes


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


def targets_bytes(p: Problem, tokens: int) -> int:
    """Bytes of the targets' part of dW until it is added."""
    if has_weight_kernels(p):
        return 12 * tokens + 4 * (p.vocab + 1)
    return 8 * p.vocab + min(tokens + 1, p.vocab) * p.hidden * p.accumulator_bytes


def target_rows_bytes(p: Problem, tokens: int) -> int:
    """Bytes of the step that adds a block of tokens to the targets' part of dW, in plain torch."""
    if not p.grad_weight or has_weight_kernels(p):
        return 0
    return min(tokens * p.hidden * p.accumulator_bytes, row_block_bytes(p.device))
