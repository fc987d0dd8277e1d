"""Plans of divergences: tiles of both models' logits, and the tokens whose factors are kept.

A tile is some tokens times some classes, of the student and of the teacher.  The forward takes one
pass if a tile has all classes, else two: log-sum-exps, then divergences.  The backward has windows
of `columns` classes, and blocks of `rows` tokens: it computes factors, what the gradients multiply
hidden states and weights with, tile by tile of `tile_columns` classes, then multiplies those of a
window.  Those of the first `kept` tokens were stored by the forward.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from math import ceil

from cutefce.cute_kernels.integers import ceil_div
from cutefce.cute_kernels.problem import Problem
from cutefce.cute_kernels.process_cache import process_cache
from cutefce.ops.planning.step_memory import accumulates_wider, row_block_bytes, upcast_bytes

FORWARD_ROWS = (32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
"""Tokens of the forward's tiles that have all classes."""
ROWS = (128, 256, 512, 1024, 2048, 4096, 8192)
COLUMNS = (2048, 4096, 8192, 16384, 32768)
"""Tokens and classes of other tiles, and of windows: those below the problem's, and all of it."""
TILE_COLUMNS = 2048
"""Classes of the backward's tiles: GEMMs of many tokens are at full speed."""
KEPT_PARTS = 16
"""Tokens are kept in multiples of this part of all."""
LATER_ROWS, ALIGNMENT = 128, 8
"""Tokens that blocks are multiples of whose tiles take memory of kept factors, and classes."""
MIN_SCALED_NUMEL = 1 << 22
"""Elements of a weight whose gradient has enough tiles for all SMs."""
FLOOR = Fraction(3, 2)
"""Memory that every plan may take, relative to the least that any takes."""
FLOP_PER_BYTE = 128
"""Multiply-adds in the time of a byte of memory traffic."""
STEP_BLOCKS = 11
"""Blocks of rows that an element-wise step holds at a time on a CPU; a GPU fuses the steps."""
ROW_WORDS = 88
"""Sums per token beside the tiles: statistics, losses, upstream gradients, selection, and what the
kernel of rows exchanges."""


@dataclass(frozen=True)
class DivergencePlan:
    """How one divergence runs."""

    tokens: int
    """Tokens that are computed."""
    vocab: int
    """Classes, of one rank."""
    forward_rows: int
    forward_columns: int
    """The forward's tiles; all classes for one pass."""
    rows: int
    columns: int
    """The backward's blocks of tokens, and windows."""
    tile_columns: int
    """Classes of its tiles."""
    kept: int
    """Tokens whose factors are kept."""
    workspace_bytes: int = 0
    """Predicted peak memory beyond inputs and gradients."""
    cost: int = 0
    """Predicted time, in multiply-adds."""

    @property
    def is_one_pass(self) -> bool:
        """Whether the forward computes each logit once."""
        return self.forward_columns >= self.vocab


@dataclass(frozen=True)
class DivergenceProblem:
    """Two models' heads, with the same tokens and classes, and the gradients that are wanted."""

    student: Problem
    teacher: Problem
    """Their `tokens` are those that are computed."""
    tokens: int
    """Tokens of the call, computed or not."""
    copied_bytes: int = 0
    """Bytes of the copies of operands that the call makes."""
    scales_rows: bool = False
    """Whether tokens differ in the factors of their gradients."""
    sharded: bool = False
    """Whether the classes are those of one rank of a group."""

    @property
    def sides(self) -> tuple[Problem, Problem]:
        """Student and teacher."""
        return self.student, self.teacher

    @property
    def trained(self) -> list[Problem]:
        """The sides that have gradients."""
        return [p for p in self.sides if p.grad_hidden or p.grad_weight or p.grad_bias]

    @property
    def selects(self) -> bool:
        """Whether some tokens are left out."""
        return self.student.tokens < self.tokens

    @property
    def factor_bytes(self) -> int:
        """Bytes of the factors of one logit."""
        return sum(p.item_bytes for p in self.trained)


@process_cache
def plan_divergence(problem: DivergenceProblem, budget: int) -> DivergencePlan:
    """Return the fastest plan that takes `budget` bytes or 3/2 of the least, whichever is more."""
    forwards, backwards = list(_forwards(problem)), list(_backwards(problem))
    least = max(
        min(plan.workspace_bytes for plan in forwards),
        min(plan.workspace_bytes for plan in backwards),
    )
    budget = max(budget, ceil(least * FLOOR))
    tokens, best = problem.student.tokens, None
    may_keep = bool(problem.trained) and not (problem.sharded or problem.scales_rows)
    for part in range(KEPT_PARTS + 1 if may_keep else 1):
        kept = tokens * part // KEPT_PARTS
        left = budget - kept * problem.student.vocab * problem.factor_bytes
        forward = _fastest(
            list(_forwards(problem, kept)) if kept == tokens > 0 else forwards, left, kept
        )
        backward = _fastest(list(_backwards(problem, kept)) if kept else backwards, left)
        if forward is None or backward is None:
            continue
        taken = max(forward.workspace_bytes, backward.workspace_bytes) + budget - left
        plan = replace(
            backward,
            forward_rows=forward.forward_rows,
            forward_columns=forward.forward_columns,
            workspace_bytes=taken,
            cost=forward.cost + backward.cost,
        )
        if best is None or (plan.cost, plan.workspace_bytes) < (best.cost, best.workspace_bytes):
            best = plan
    assert best is not None, "the least plan fits"
    return best


def _fastest(plans: list[DivergencePlan], budget: int, kept: int = 0) -> DivergencePlan | None:
    """Return the fastest of the plans that fit, with one pass if factors are kept."""
    fitting = [
        plan for plan in plans if plan.workspace_bytes <= budget and (plan.is_one_pass or not kept)
    ]
    return min(fitting, key=lambda plan: (plan.cost, plan.workspace_bytes), default=None)


def _sizes(ladder: tuple[int, ...], limit: int) -> Iterator[int]:
    """Yield the sizes of tiles of at most `limit`, which is one of them; at least one."""
    yield from (size for size in ladder if size < limit)
    yield max(limit, 1)


def forward_blocks(tokens: int, rows: int, later: int | None = None) -> Iterator[slice]:
    """Cut tokens into the blocks of a forward with tiles of all classes, of `rows` or more.

    Where the factors of all tokens are kept, tiles may take the memory of the factors of later
    tokens: those of a token take `later` times that of its factors; None if they may not.
    """
    start = 0
    while start < tokens:
        fits = 0 if later is None else (tokens - start) // (1 + later)
        stop = min(start + max(rows, fits // LATER_ROWS * LATER_ROWS), tokens)
        yield slice(start, stop)
        start = stop


def bytes_of_later(factor_items: Sequence[int], sum_bytes: int, vocab: int) -> int | None:
    """Return the `later` of `forward_blocks`, for kept factors of these bytes each, in buffers.

    With two buffers each has the tile of one side, with one it has both; rows are aligned.
    """
    if not factor_items or vocab % ALIGNMENT:
        return None
    return max(ceil_div(2 // len(factor_items) * sum_bytes, item) for item in factor_items)


def _forwards(problem: DivergenceProblem, kept: int = 0) -> Iterator[DivergencePlan]:
    """Yield forwards with their memory and cost; `kept` are all tokens, or not counted."""
    tokens, vocab = problem.student.tokens, problem.student.vocab
    tiles = [(rows, vocab) for rows in _sizes(FORWARD_ROWS, tokens)] if not problem.sharded else []
    narrow = [(rows, columns) for rows in _sizes(ROWS, tokens) for columns in COLUMNS]
    tiles += [tile for tile in narrow if tile[1] < vocab or problem.sharded]
    items = [p.item_bytes for p in problem.trained] if kept else []
    later = bytes_of_later(items, problem.student.accumulator_bytes, vocab)
    for rows, columns in tiles:
        passes = 1 if columns >= vocab and not problem.sharded else 2
        blocks = list(forward_blocks(tokens, rows, later if passes == 1 else None))
        cost, chunks = 0, len(blocks)
        for p in problem.sides:
            read = chunks * vocab * p.hidden * p.item_bytes
            cost += passes * (tokens * vocab * p.hidden + FLOP_PER_BYTE * read)
        largest = max((block.stop - block.start for block in blocks), default=1)
        taken = _tile_bytes(problem, rows, min(columns, vocab), largest) + _common_bytes(problem)
        yield DivergencePlan(tokens, vocab, rows, columns, 1, 1, 1, 0, taken, cost)


def _backwards(problem: DivergenceProblem, kept: int = 0) -> Iterator[DivergencePlan]:
    """Yield backwards of a forward that keeps `kept` tokens, with the other memory and cost."""
    tokens, vocab = problem.student.tokens, problem.student.vocab
    if not problem.trained:
        yield DivergencePlan(tokens, vocab, 1, 1, 1, 1, 1, kept)
        return
    common = _common_bytes(problem) + _gradient_bytes(problem)
    for rows in _sizes(ROWS, tokens):
        for columns in _sizes(COLUMNS, vocab):
            windows, chunks = ceil_div(vocab, columns), ceil_div(tokens, rows)
            cost, taken, tile_columns = 0, common, min(columns, TILE_COLUMNS)
            if kept < tokens:
                part = Fraction(tokens - kept, max(tokens, 1))
                tiles = ceil_div(vocab, tile_columns)
                for p in problem.sides:
                    read = (chunks * vocab + tiles * tokens) * p.hidden * p.item_bytes
                    cost += ceil(part * (tokens * vocab * p.hidden + FLOP_PER_BYTE * read))
                taken += _tile_bytes(problem, rows, tile_columns)
                taken += rows * columns * problem.factor_bytes
            in_one_block = chunks == 1 and kept in (0, tokens)
            for p in problem.trained:
                width = p.hidden * p.accumulator_bytes
                moved = p.grad_hidden * windows * tokens * 2 * width
                products = (p.grad_hidden + p.grad_weight) * tokens * vocab * p.hidden
                if (
                    p.grad_weight
                    and in_one_block
                    and rounds_scaled(p.device, p.dtype, p.vocab * p.hidden)
                ):
                    taken += tokens * p.hidden * p.item_bytes
                else:
                    moved += p.grad_weight * chunks * vocab * 2 * width
                    if p.grad_weight and accumulates_wider(p):
                        taken += columns * width
                cost += products + FLOP_PER_BYTE * moved
            taken += max(
                max(upcast_bytes(p, rows, columns, p.hidden) for p in problem.trained),
                max(upcast_bytes(p, columns, rows, p.hidden) for p in problem.trained),
            )
            sizes = rows, columns, tile_columns
            yield DivergencePlan(tokens, vocab, 1, 1, *sizes, kept, taken, cost)


def rounds_scaled(device: str, dtype: str, weight_numel: int) -> bool:
    """Whether dW may be a product of factors and scaled hidden states, rounded once.

    That takes no window in the dtype of sums.  A CPU's GEMM sums in 16 bits, and so may one of few
    tiles on a GPU, which splits its sums.
    """
    return device == "cuda" and dtype == "bfloat16" and weight_numel >= MIN_SCALED_NUMEL


def _common_bytes(problem: DivergenceProblem) -> int:
    """Bytes of vectors of tokens and of copies of operands."""
    copies = problem.copied_bytes
    if problem.selects:
        copies += sum(p.tokens * p.hidden * p.item_bytes for p in problem.sides)
    return copies + problem.tokens * ROW_WORDS * problem.student.accumulator_bytes


def _tile_bytes(
    problem: DivergenceProblem, rows: int, columns: int, largest: int | None = None
) -> int:
    """Bytes of a tile of both sides' logits, and of the step that computes or reads it.

    Steps are of up to `largest` rows; None for those of the tile.
    """
    p = problem.student
    tile, most = rows * columns * p.accumulator_bytes, largest or rows
    steps = 0
    if p.device == "cpu":
        block = max(row_block_bytes("cpu"), columns * p.accumulator_bytes)
        steps = STEP_BLOCKS * min(most * columns * p.accumulator_bytes, block)
    upcast = max(
        upcast_bytes(side, largest or rows, side.hidden, columns) for side in problem.sides
    )
    return 2 * tile + max(steps, upcast)


def _gradient_bytes(problem: DivergenceProblem) -> int:
    """Bytes of sums of the gradients, beside the gradients."""
    taken = 0
    for p in problem.trained:
        rows = p.tokens * p.hidden
        if p.grad_hidden:
            if accumulates_wider(p) or problem.selects or problem.sharded:
                taken += rows * p.accumulator_bytes
            if accumulates_wider(p) and (problem.selects or problem.sharded):
                taken += rows * p.item_bytes  # rounded, before they are put in their places
            if problem.sharded:
                taken += rows * p.accumulator_bytes
        taken += 2 * p.grad_bias * p.vocab * p.accumulator_bytes
    return taken
