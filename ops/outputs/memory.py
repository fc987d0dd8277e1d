"""What it takes to combine parts of the classes, and to search for the largest ones."""

from cutefce.cute_kernels.integers import ceil_div
from cutefce.ops.outputs.reductions import COMBINED_BYTES, MATRICES, MATRICES_OF_OTHERS
from cutefce.ops.outputs.top_classes import FOUND_BYTES, found_bytes
from cutefce.ops.program.problem import LossProblem
from cutefce.ops.program.step_memory import NARROWEST_TILE, upcast_bytes


def combined_bytes(p: LossProblem, rows: int) -> int:
    """Return the bytes of combining reductions (N, P) of some tokens.

    Where kernels have no partial sum of each tile, P is small.
    """
    if not p.outputs.reductions or (p.arch is not None and not p.outputs.searches):
        return 0
    parts = ceil_div(p.vocab, p.block if p.arch is None else NARROWEST_TILE)
    matrices = MATRICES if p.outputs.reduces_all else MATRICES_OF_OTHERS
    return min(int(matrices * rows * parts * p.accumulator_bytes), COMBINED_BYTES)


def searched_bytes(p: LossProblem, rows: int) -> int:
    """Return the bytes of a search for the largest classes of some tokens; 0 if there is none."""
    if not p.outputs.searches:
        return 0
    k, sums = p.outputs.top_k, p.accumulator_bytes
    chosen, of_block = min(k, ceil_div(p.vocab, p.block)), found_bytes(1, min(k, p.block), sums)
    row = chosen * of_block
    at_once = min(rows, max(FOUND_BYTES // row, 1))
    beside = 32 * chosen  # pairs of tokens and blocks, which Triton's launch sorts
    if not (p.triton or p.arch):  # all tokens may choose one block: their numbers, states, logits
        beside = 16 + p.hidden * p.item_bytes + p.block * (sums + 1) + 2 * of_block
    computed = at_once * (row + beside) + upcast_bytes(p, at_once, p.hidden, p.block)
    return computed + rows * (k + 1) * (sums + 8)
