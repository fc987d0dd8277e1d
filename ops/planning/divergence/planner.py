"""Plans of divergences: tiles of both models' logits, and the tokens whose factors are kept.

A tile is some tokens times some classes, of the student and of the teacher.  The forward takes one
pass if a tile has all classes, else two: log-sum-exps, then divergences.  The backward has windows
of `columns` classes, and blocks of `rows` tokens: it computes factors, what the gradients multiply
hidden states and weights with, tile by tile of `tile_columns` classes, then multiplies those of a
window.  Those of the first `kept` tokens were stored by the forward, of which those of the first
`aliased` lie in the memory of the gradients dW, which nothing else needs till then.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from math import ceil

from cutefce.cute_kernels.integers import ceil_div
from cutefce.cute_kernels.process_cache import process_cache
from cutefce.cute_kernels.schedule.order import PARTIAL_BYTES
from cutefce.ops.planning.device import device_of
from cutefce.ops.planning.divergence.problem import DivergencePlan, DivergenceProblem
from cutefce.ops.planning.step_memory import accumulates_wider, row_block_bytes, upcast_bytes

FORWARD_ROWS = (32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
"""Tokens of the forward's tiles that have all classes."""
ROWS = (128, 256, 512, 1024, 2048, 4096, 8192)
COLUMNS = (2048, 4096, 8192, 16384, 32768)
"""Tokens and classes of other tiles, and of windows: those below the problem's, and all of it."""
TILE_COLUMNS, TILE_NUMEL = 2048, 1 << 24
"""Classes of the backward's tiles, and elements of those of few tokens: GEMMs are at full speed."""
KEPT_PARTS = 16
"""Tokens are kept in multiples of this part of all."""
LATER_ROWS, ALIGNMENT = 128, 8
"""Tokens that blocks are multiples of whose tiles take memory of kept factors, and classes."""
MIN_SCALED_NUMEL = 1 << 22
"""Elements of a weight whose gradient has enough tiles for all SMs."""
FLOOR = Fraction(3, 2)
"""Memory that every plan may take, relative to the least that any takes."""
FLOP_PER_BYTE, FLOP_PER_READ = 128, 24
"""Multiply-adds in the time of a byte of memory traffic, and of one that a GEMM's operand is read
by: most of it is hidden."""
FACTOR_READS = 8
"""Bytes of the logits that the factors, and the divergence, of a token and class are made of."""
STEP_BLOCKS, MIXTURE_BLOCKS = (6.25, 6.25), (10.5, 8.5)
"""Blocks of rows that an element-wise step of the forward, and of the backward, holds at a time on
a CPU, of a KL divergence and of a mixture; a GPU fuses the steps."""
SUMS_PART = 96
"""Logits for a sum of them, at least: a kernel has two for its tiles of 192 classes."""
ROW_WORDS = 88
"""Sums per token beside the tiles: statistics, losses, upstream gradients, selection, and what the
kernel of rows exchanges."""


@process_cache
def make_plan(problem: DivergenceProblem, budget: int) -> DivergencePlan:
    """Return the fastest plan that takes `budget` bytes or 3/2 of the least, whichever is more."""
    asked, choices = budget, []
    for kept, aliased in _kept_choices(problem):
        beside = (kept - aliased) * problem.student.vocab * problem.factor_bytes
        forwards = list(_forwards(problem, kept, aliased))
        choices.append((beside, forwards, list(_backwards(problem, kept, aliased))))
    least = min(beside + max(_least(f), _least(b)) for beside, f, b in choices)
    budget, best = max(budget, ceil(least * FLOOR)), None
    for beside, forwards, backwards in choices:
        forward = _fastest(forwards, budget - beside)
        backward = _fastest(backwards, budget - beside)
        if forward is None or backward is None:
            continue
        plan = replace(
            backward,
            forward_rows=forward.forward_rows,
            forward_columns=forward.forward_columns,
            workspace_bytes=beside + max(forward.workspace_bytes, backward.workspace_bytes),
            cost=forward.cost + backward.cost,
        )
        if best is None or (plan.cost, plan.workspace_bytes) < (best.cost, best.workspace_bytes):
            best = plan
    assert best is not None, "the least plan fits"
    return replace(
        best,
        sharded=problem.sharded,
        seconds=2 * best.cost / device_of(problem.student.device).flops,
        budget=asked if 0 <= asked < least else None,
    )


def _kept_choices(problem: DivergenceProblem) -> Iterator[tuple[int, int]]:
    """Yield how many tokens may be kept, and how many of them in the memory of dW."""
    yield 0, 0
    if problem.sharded or problem.scales_rows or not problem.trained:
        return
    tokens, most = problem.student.tokens, problem.most_aliased
    parts = {tokens * part // KEPT_PARTS for part in range(1, KEPT_PARTS + 1)} - {0}
    if most:
        yield from ((kept, min(kept, most)) for kept in sorted(parts | {most}))
        parts &= {tokens}
    yield from ((kept, 0) for kept in sorted(parts))


def _least(plans: list[DivergencePlan]) -> int:
    return min(plan.workspace_bytes for plan in plans)


def _fastest(plans: list[DivergencePlan], budget: int) -> DivergencePlan | None:
    """Return the fastest of the plans that fit."""
    fitting = [plan for plan in plans if plan.workspace_bytes <= budget]
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


def kept_blocks(
    tokens: int, rows: int, kept: int, aliased: int, dw_rows: int
) -> Iterator[tuple[slice, bool]]:
    """Cut tokens into the blocks of a forward with tiles of all classes, none kept in part.

    Each comes with whether its tiles are in the memory of dW, which has `dw_rows`, and has none of
    the aliased factors before the last blocks.
    """
    in_dw = aliased > 0 and dw_rows > rows
    for begin, end in ((kept, tokens), (aliased, kept)):
        for block in forward_blocks(end - begin, dw_rows if in_dw else rows):
            yield slice(begin + block.start, begin + block.stop), in_dw
    yield from ((block, False) for block in forward_blocks(aliased, rows))


def _forwards(problem: DivergenceProblem, kept: int, aliased: int) -> Iterator[DivergencePlan]:
    """Yield forwards that keep factors, with the other memory and cost."""
    tokens, vocab = problem.student.tokens, problem.student.vocab
    tiles = [(rows, vocab) for rows in _sizes(FORWARD_ROWS, tokens)] if not problem.sharded else []
    narrow = [(rows, columns) for rows in _sizes(ROWS, tokens) for columns in COLUMNS]
    if not kept:
        tiles += [tile for tile in narrow if tile[1] < vocab or problem.sharded]
    items = [p.item_bytes for p in problem.trained]
    later = bytes_of_later(items, problem.student.accumulator_bytes, vocab)
    for rows, columns in tiles:
        passes = 1 if columns >= vocab and not problem.sharded else 2
        if kept == tokens and not aliased:
            sizes = [x.stop - x.start for x in forward_blocks(tokens, rows, later)]
        else:
            found = kept_blocks(tokens, rows, kept, aliased, problem.dw_rows)
            sizes = [x.stop - x.start for x, _ in found]
        moved = tokens * FACTOR_READS + kept * problem.factor_bytes
        cost = passes * FLOP_PER_BYTE * vocab * moved
        for p in problem.sides:
            read = len(sizes) * vocab * p.hidden * p.item_bytes
            cost += passes * (tokens * vocab * p.hidden + FLOP_PER_READ * read)
        width, most = min(columns, vocab), max(sizes, default=1)
        taken = _common_bytes(problem) + _tile_bytes(problem, rows, width)
        taken += _step_bytes(problem, max(most, rows), width, is_forward=True)
        taken = max(taken - _unallocated_bytes(problem, aliased), 0)
        sizes_of_plan = tokens, vocab, rows, columns, 1, 1, 1, kept, aliased
        yield DivergencePlan(*sizes_of_plan, workspace_bytes=taken, cost=cost)


def _backwards(problem: DivergenceProblem, kept: int, aliased: int) -> Iterator[DivergencePlan]:
    """Yield backwards of a forward that keeps `kept` tokens, with the other memory and cost."""
    tokens, vocab = problem.student.tokens, problem.student.vocab
    if not problem.trained:
        yield DivergencePlan(tokens, vocab, 1, 1, 0, 0, 0, kept)
        return
    common = _common_bytes(problem)
    sums, in_the_end = _gradient_bytes(problem)
    for rows in [max(tokens, 1)] if aliased else _sizes(ROWS, tokens):
        for columns in _sizes(COLUMNS, vocab):
            windows, chunks = ceil_div(vocab, columns), ceil_div(tokens, rows)
            filled = tokens - kept if aliased else rows
            most = 1 << max((TILE_NUMEL // max(filled, 1)).bit_length() - 1, 0)
            tile_columns = min(columns, max(TILE_COLUMNS, most))
            cost, taken, step = 0, sums, 0
            if kept < tokens:
                tiles = ceil_div(vocab, tile_columns)
                for p in problem.sides:
                    read = ceil_div(tokens - kept, rows) * vocab + tiles * (tokens - kept)
                    cost += (tokens - kept) * vocab * p.hidden
                    cost += FLOP_PER_READ * read * p.hidden * p.item_bytes
                moved = FACTOR_READS + problem.factor_bytes
                cost += FLOP_PER_BYTE * (tokens - kept) * vocab * moved
                taken += _tile_bytes(problem, filled, tile_columns)
                step = _step_bytes(problem, filled, tile_columns, is_forward=False)
            if kept < tokens or aliased:
                taken += rows * columns * problem.factor_bytes
            if aliased:
                cost += FLOP_PER_BYTE * 2 * kept * vocab * problem.factor_bytes
            in_one_block = chunks == 1 and (kept in (0, tokens) or aliased > 0)
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
                step = max(
                    step,
                    upcast_bytes(p, rows, columns, p.hidden),
                    upcast_bytes(p, columns, rows, p.hidden),
                )
            taken = common + max(taken + step, in_the_end)
            sizes = tokens, vocab, 1, 1, rows, columns, tile_columns, kept, aliased
            yield DivergencePlan(*sizes, workspace_bytes=taken, cost=cost)


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


def _tile_bytes(problem: DivergenceProblem, rows: int, columns: int) -> int:
    """Bytes of a tile of both sides' logits."""
    return 2 * rows * columns * problem.student.accumulator_bytes


def _step_bytes(problem: DivergenceProblem, rows: int, columns: int, *, is_forward: bool) -> int:
    """Bytes of the step that computes or reads a tile of both sides' logits, and of their sums."""
    step, p = 0, problem.student
    if p.device == "cuda":
        step = min(_tile_bytes(problem, rows, columns) // SUMS_PART, 4 * PARTIAL_BYTES)
    if p.device == "cpu":
        row_bytes = columns * p.accumulator_bytes
        block = min(rows, max(row_block_bytes("cpu") // row_bytes, 1)) * row_bytes
        taken = MIXTURE_BLOCKS if problem.is_mixture else STEP_BLOCKS
        step = ceil(taken[0 if is_forward else 1] * block)
    return max(step, *(upcast_bytes(side, rows, side.hidden, columns) for side in problem.sides))


def _unallocated_bytes(problem: DivergenceProblem, aliased: int) -> int:
    """Bytes of the gradients that a forward does not allocate; it allocates dW for `aliased`."""
    return sum(
        replace(p, tokens=problem.tokens, grad_weight=p.grad_weight and not aliased).gradient_bytes
        for p in problem.trained
    )


def _gradient_bytes(problem: DivergenceProblem) -> tuple[int, int]:
    """Bytes of sums of the gradients, beside the gradients: during the windows, and in the end.

    dX that is not the sums themselves is not there before the end.
    """
    sums = in_the_end = 0
    for p in problem.trained:
        rows, gathers = p.tokens * p.hidden, problem.selects or problem.sharded
        if p.grad_hidden and (accumulates_wider(p) or gathers):
            sums += rows * p.accumulator_bytes - problem.tokens * p.hidden * p.item_bytes
            in_the_end += rows * p.accumulator_bytes
            if accumulates_wider(p) and gathers:
                in_the_end += rows * p.item_bytes  # rounded, before they are put in their places
            if problem.sharded:
                in_the_end += rows * p.accumulator_bytes
        sums += p.grad_bias * p.vocab * p.accumulator_bytes
        in_the_end += 2 * p.grad_bias * p.vocab * p.accumulator_bytes
    return sums, in_the_end
