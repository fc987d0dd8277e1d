"""The memory and the time of the steps of sampled gradients.

How many entries there are depends on the softmax.  Predicted are those of a flat one, which keeps
the most: `samples` of each token.
"""

from cutefce.ops.program import predicted_memory, predicted_time
from cutefce.ops.program.layout import Layout
from cutefce.ops.program.predicted_time import device_of
from cutefce.ops.program.problem import LossProblem
from cutefce.ops.program.step_memory import partial_sums, tile_bytes
from cutefce.ops.program.steps import Program, Step
from cutefce.ops.sampling.sample_sizes import estimate_count
from cutefce.ops.sampling.steps import SampleKind

CHOOSE = 32
"""Bytes of a class while the most frequent ones are found."""
SAMPLED_AGAIN = 28
"""Bytes of a token's target, order and references where it may be sampled again."""


def seconds(program: Program) -> float:
    """Return the predicted time of forward and backward."""
    p: LossProblem = program.problem
    total, device = predicted_time.seconds(program), device_of(p.device)
    product = 2 * p.tokens * p.hidden / device.flops
    sparse = p.tokens * p.samples * p.hidden * p.item_bytes / max(p.vocab, 1) / device.bytes
    for step in program.steps():
        columns = step.columns[1] - step.columns[0]
        match step.kind:
            case SampleKind.ESTIMATE | SampleKind.SAMPLE:
                total += columns * product
            case SampleKind.SPARSE_HIDDEN | SampleKind.SPARSE_WEIGHT:
                total += columns * sparse
    return total


def scratch(p: LossProblem, x: Layout, step: Step) -> int:
    """Return the bytes that a step takes while it runs, beside its buffers."""
    match step.kind:
        case SampleKind.ESTIMATE:
            return _estimate(p, step.columns[1])
        case SampleKind.FINISH_ENTRIES:
            sums = partial_sums(p, p.tokens, p.vocab)
            return p.tokens * (SAMPLED_AGAIN + sums * p.accumulator_bytes)
    return predicted_memory.scratch(p, x, step)


def _estimate(p: LossProblem, columns: int) -> int:
    """Return the bytes of making estimates, beside these, of `columns` of each rank's classes."""
    own, total = p.tokens * p.accumulator_bytes, p.vocab * max(p.ranks, 1)
    sums, chosen, places = own * partial_sums(p, p.tokens, columns), 0, 0
    if (count := estimate_count(total)) < total:
        chosen, places = 8 * count, 16 * p.tokens
    found = chosen + places + sums + tile_bytes(p, p.tokens, columns, copies=p.tile_copies)
    return max(chosen + (CHOOSE * total if chosen else 0), found, sums + own) - own
