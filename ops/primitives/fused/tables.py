"""The windows of a step, as tables of numbers that host functions read."""

from array import array
from collections.abc import Sequence

from cutefce.cute_kernels.config import KernelConfigs
from cutefce.cute_kernels.kernel_set import KernelSet
from cutefce.cute_kernels.problem import Problem
from cutefce.cute_kernels.schedule.order import choose_vocab_splits, most_vocab_splits
from cutefce.cute_kernels.spec import FusedForwardSpec
from cutefce.cute_kernels.workspace import BackwardWindow, ForwardWindow, GradHidden
from cutefce.ops.planning.window_layout import PlacedWindow, WindowLayout
from cutefce.ops.primitives.cute_gradients import grad_hidden_kernel, is_small, k_splits

MOST_SPLITS = int(ForwardWindow.MOST_SPLITS)


class Table:
    """Rows of numbers in memory of the host, where host functions read them."""

    def __init__(self, rows: Sequence[Sequence[int]]) -> None:
        self._memory = array("q", [number for row in rows for number in row])
        self.arguments = self._memory.buffer_info()[0], len(rows)
        """Address and number of rows."""


def forward_rows(
    problem: Problem,
    kernel: FusedForwardSpec,
    clusters: int,
    layout: WindowLayout,
    selects: bool,
) -> list[list[int]]:
    """Return the table of the windows of a layout that a forward stores, see `ForwardWindow`."""
    vocab, config, rows = problem.vocab, kernel.config, list[list[int]]()
    affordable = most_vocab_splits(problem.tokens, vocab, config)
    ends = [*[window.first for window in layout.stored[1:]], vocab]
    for window, end in zip(layout.stored, ends, strict=True):
        columns, stored = end - window.first, window.last - window.first
        splits = most = choose_vocab_splits(layout.rows, columns, config, clusters)
        if selects:  # a window's share of what is affordable for all
            most = max(1, affordable * columns // vocab)
            if layout.rows == problem.tokens:
                most = max(splits, most)
            splits = min(splits, most)
        repaired = choose_vocab_splits(layout.rows, stored, config, clusters)
        place = _window_fields(window, columns, layout, selects)
        rows.append([*place, splits, most, stored, repaired])
    return rows


def equalize_splits(tables: Sequence[list[list[int]]]) -> int:
    """Return the most splits of any layout; the last windows of the others get what they lack."""
    totals = [sum(row[MOST_SPLITS] for row in table) for table in tables]
    for table, total in zip(tables, totals, strict=True):
        table[-1][MOST_SPLITS] += max(totals) - total
    return max(totals)


def is_given(row: Sequence[int]) -> bool:
    """Whether a window's part of dX is computed before the backward is launched."""
    return row[BackwardWindow.GRAD_HIDDEN] == GradHidden.GIVEN


def given(row: Sequence[int]) -> tuple[int, ...]:
    """Return the row of a window whose part of dX is."""
    fields = [*row]
    fields[BackwardWindow.GRAD_HIDDEN] = int(GradHidden.GIVEN)
    return (*fields,)


def _window_fields(
    window: PlacedWindow, columns: int, layout: WindowLayout, selects: bool
) -> tuple[int, ...]:
    """Return the fields of a `Window` of `columns`, in a layout."""
    place = window.memory, window.offset, window.width
    return window.first, columns, *place, layout.rows, int(selects) + layout.fewest


def backward_row(
    problem: Problem,
    kernels: KernelSet,
    num_sms: int,
    placed: tuple[WindowLayout, PlacedWindow],
    selects: bool,
    has_layouts: bool,
    hidden_bits: int | None,
    short: int | None,
) -> tuple[int, ...]:
    """Return the row of a window of a layout in a backward's table, see `BackwardWindow`.

    cuBLAS has no part in dX if the step `has_layouts`, or dX `is_small`.  More than eight
    parameters: the sizes, and how dX is added.
    """
    layout, window = placed
    columns, splits, kind = window.last - window.first, 1, GradHidden.GIVEN
    own = has_layouts or columns < problem.vocab
    own = own or is_small(problem.tokens, problem.hidden, columns)
    spec = grad_hidden_kernel(kernels, columns, own, short)
    if hidden_bits is not None:
        kind = GradHidden.LONG
    elif spec is not None:
        is_short = columns < (KernelConfigs.SHORT if short is None else short)
        kind = GradHidden.SHORT if is_short else GradHidden.LONG
        clusters = num_sms // spec.config.cluster
        splits = k_splits(spec, (layout.rows, problem.hidden), columns, clusters)
    place = _window_fields(window, columns, layout, selects)
    return *place, int(window.recomputed), kind, splits
