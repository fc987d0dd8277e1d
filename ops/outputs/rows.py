"""The rows of statistics that are outputs of tokens."""

from typing import Any

from torch import Tensor

from cutefce.ops.outputs.reductions import reduce_outputs, stat_rows
from cutefce.ops.outputs.top_classes import top_rows
from cutefce.ops.program.inputs import LossInputs
from cutefce.ops.rows.statistics import RowStats


def output_rows(
    x: LossInputs, states: Tensor, partial: Any, logit: Tensor, stats: RowStats
) -> list[Tensor]:
    """Return rows (R, N): those of `stat_rows` and of `top_rows` that are asked for.

    Args:
        x: the operands of some tokens.
        states: (N, D) hidden states, in the order of the targets.
        partial: this rank's row sums of all columns, with the reductions beside them.
        logit: (N,) of the targets, on whichever rank.
        stats: those of every call.
    """
    primitives, targets, ranks = x.primitives, x.targets, x.ranks
    outputs, found = targets.options.output_names, list[Tensor]()
    if outputs and stat_rows(outputs):
        part = None
        if targets.options.reduces_rows:
            part = primitives.partial_outputs(partial)
            part = part if ranks is None else ranks.partial_outputs(part)
        classes = targets.index + targets.first
        found.append(reduce_outputs(part, logit, classes, targets.class_logits, outputs))
    if targets.options.searches_classes:
        values, numbers = primitives.top_logits(states, x.w, partial, logit, targets)
        if ranks is not None:  # each has a part of the classes
            values, numbers = ranks.join_columns(values), ranks.join_columns(numbers)
        found.append(top_rows(values, numbers, stats, targets, primitives.largest))
    return found
