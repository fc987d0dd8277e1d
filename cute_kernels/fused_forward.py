"""A forward whose kernels are launched by one host function.

One host call and few allocations minimize CPU overhead.  The workspace, which the host allocates,
holds the rows that count if they are selected, r (N,), the partial sums (N, P) and the semaphores,
in elements of 4 bytes.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from cutefce.cute_kernels import spec
from cutefce.cute_kernels.common.dsl import matrix, scalar, vector
from cutefce.cute_kernels.common.logit_transform import Transform
from cutefce.cute_kernels.common.window_table import exps_of, rows_of, vector_part, window_table
from cutefce.cute_kernels.jit import compiler
from cutefce.cute_kernels.workspace import (
    NUM_STATS,
    ExpsMemory,
    ForwardWindow,
    Stat,
    Window,
)


class Order(NamedTuple):
    """The rows that count, where a backward needs them too."""

    order: cute.Tensor
    """(N,) int64: the tokens, those that count first."""
    target: cute.Tensor
    """(N,) int64: their targets."""
    count: cute.Tensor
    """(1,) int32: how many count."""


class Stored(NamedTuple):
    """Where exponentials are stored for a backward."""

    dw: cute.Tensor
    """(V, D) memory of dW, or any other if no window is there."""
    kept: cute.Tensor
    """(N, K) memory of kept columns, likewise."""
    table: Int64
    """The windows as `workspace.ForwardWindow` describes them, at this address of host memory."""
    windows: Int32
    """Their number; those of a layout are consecutive, and the first has column 0."""


def table_of(stored: Stored) -> cute.Tensor:
    """Return the table of its windows."""
    return window_table(stored.table, stored.windows, len(Window) + len(ForwardWindow))


def memories_of(stored: Stored) -> dict[ExpsMemory, cute.Pointer]:
    """Return the memories that its windows may be in."""
    return {ExpsMemory.DW: stored.dw.iterator, ExpsMemory.KEPT: stored.kept.iterator}


def order_argument(tokens: Any) -> Order:
    """Return what an order of `tokens` rows is compiled for."""
    return Order(vector(Int64, tokens), vector(Int64, tokens), vector(Int32, 1))


def compile_signature(kernel: spec.FusedForwardSpec) -> tuple[Any, tuple[Any, ...]]:
    """Return the host function of `kernel` and the arguments to compile it for."""
    target_logit, inputs = compiler.compile_signature(kernel.target_logit)
    h, w, target, _, _, transform, _, ignored, *_, stream = inputs
    tokens = target.shape[0]
    workspace = vector(Float32, cute.sym_int(), aligned=True)
    stats, reduced = matrix(Float32, NUM_STATS, tokens, aligned=False), scalar(Float32)
    stored = order = None
    if kernel.stores:
        dw, kept = (matrix(w.element_type, cute.sym_int(), cute.sym_int()) for _ in range(2))
        stored = Stored(dw, kept, Int64(0), Int32(1))
        order = order_argument(tokens) if kernel.selects else None
    results = stats, reduced, stored, order
    numbers = ignored, Int32(1), Int32(1), Int32(1), Int32(0)
    function = FusedForward(kernel, target_logit)
    return function, (h, w, target, workspace, *results, transform, *numbers, stream)


class FusedForward:
    """The launches of the kernels' host functions."""

    def __init__(self, kernel: spec.FusedForwardSpec, target_logit: Any) -> None:
        self.spec, self.config, self.target_logit = kernel, kernel.config, target_logit
        self.project_exp, _ = compiler.compile_signature(kernel.project_exp)
        self.reduce, _ = compiler.compile_signature(kernel.reduce_partials)
        if kernel.stores:
            self.repair_exps, _ = compiler.compile_signature(kernel.repair_exps)
        if kernel.selects:
            self.select_rows, _ = compiler.compile_signature(kernel.select_rows)
            self.gather_rows, _ = compiler.compile_signature(kernel.gather_rows)

    @cute.jit
    def __call__(
        self,
        h: cute.Tensor,
        w: cute.Tensor,
        target: cute.Tensor,
        workspace: cute.Tensor,
        stats: cute.Tensor,
        reduced: cute.Tensor,
        stored: Any,
        stored_order: Order | None,
        transform: Transform | None,
        ignored: Int64,
        vocab_splits: Int32,
        most_splits: Int32,
        clusters: Int32,
        mean: Int32,
        stream: Any,
    ) -> None:
        """Run `target_logit`, `project_exp` over all columns and `reduce_partials`.

        Before them, if the spec selects, `select_rows` and `gather_rows`; then these three run over
        the rows that count, in at most `most_splits` vocabulary splits.  If it stores,
        `project_exp` runs over the windows of `stored`, a `Stored`, whose splits are in the table,
        `most_splits` in all of a layout; `repair_exps` runs last, over each of them; and the
        statistics are in the order of rows, which `stored_order` receives.  Each parameter is one
        argument that the host passes by position.
        """
        rows, partials = target.shape[0], most_splits * self.config.partials_per_row
        memory, hidden = workspace.iterator, h.shape[1]
        dense, order, counted, count = h, target, target, target
        selects, scatter = Int32(0), None
        if cutlass.const_expr(self.spec.selects):
            dense, order, counted, count = self.selection(h, memory, rows, stored_order)
            self.select_rows(target, order, counted, count, rows, ignored, stream)
            self.gather_rows(dense, h, order, None, count, stream)
            memory += self.spec.selection_size(rows, hidden)
            selects = Int32(1)
            if cutlass.const_expr(not self.spec.stores):
                scatter = order
        logit = cute.make_tensor(memory, cute.make_layout((rows,)))
        sums_layout = cute.make_layout((rows, partials), stride=(partials, 1))
        sums = cute.make_tensor(memory + rows, sums_layout)
        after_sums = cute.recast_ptr(memory + rows + rows * partials, dtype=Int32)
        pitch, windows = self.spec.semaphore_pitch(rows), Int32(1)
        if cutlass.const_expr(stored is not None):
            windows = stored.windows
        semaphores = cute.make_tensor(after_sums, cute.make_layout((windows * pitch,)))
        more = order, ignored, selects, None, stream
        self.target_logit(h, w, counted, logit, semaphores, transform, *more)
        if cutlass.const_expr(not self.spec.selects):
            count = semaphores  # any int32
        row_vectors, launch = (logit, counted), (count, clusters, stream)
        if cutlass.const_expr(self.spec.stores):
            self.sum_windows(dense, w, row_vectors, sums, semaphores, stored, launch)
        else:
            of_semaphores, numbers = (semaphores, transform, *(None,) * 3), (Int32(0), vocab_splits)
            given = *row_vectors, sums, None, *of_semaphores, count, selects, *numbers
            self.project_exp(dense, w, *given, *launch[1:])
        results = stats, reduced, semaphores, scatter
        self.reduce(sums, logit, counted, *results, ignored, mean, None, None, stream)
        if cutlass.const_expr(self.spec.stores):
            reference = cute.slice_(stats, (int(Stat.REFERENCE), None))
            self.repair_windows(dense, w, (reference, counted), semaphores, stored, launch)

    @cute.jit
    def sum_windows(
        self,
        h: cute.Tensor,
        w: cute.Tensor,
        row_vectors: Any,
        sums: cute.Tensor,
        semaphores: cute.Tensor,
        stored: Stored,
        launch: Any,
    ) -> None:
        """Run `project_exp` over each window; those of a step write partial sums to `sums` (N, P).

        `row_vectors` are (logit, target), `launch` (count, clusters, stream).
        """
        (count, clusters, stream), table = launch, table_of(stored)
        partials, per_split = sums.shape[1], self.config.partials_per_row
        pitch, done = self.spec.semaphore_pitch(sums.shape[0]), Int32(0)
        for i in cutlass.range(stored.windows, unroll=1):
            exps, first = exps_of(table, i, memories_of(stored))
            if first == 0:
                done = Int32(0)
            rows, part = exps.shape[0], rows_of(w, first, Int32(table[i, Window.COLUMNS]))
            most = Int32(table[i, ForwardWindow.MOST_SPLITS]) * per_split
            layout = cute.make_layout((rows, most), stride=(partials, 1))
            own = cute.make_tensor(sums.iterator + done, layout)
            counters = vector_part(semaphores, i * pitch, pitch)
            counted = count, Int32(table[i, Window.SELECTS])
            splits = Int32(table[i, ForwardWindow.SPLITS])
            more = counters, *(None,) * 4, *counted, first, splits, clusters, stream
            self.project_exp(rows_of(h, 0, rows), part, *row_vectors, own, exps, *more)
            done += most

    @cute.jit
    def repair_windows(
        self,
        h: cute.Tensor,
        w: cute.Tensor,
        row_vectors: Any,
        semaphores: cute.Tensor,
        stored: Stored,
        launch: Any,
    ) -> None:
        """Run `repair_exps` over the stored columns of each window; see `sum_windows`."""
        (count, clusters, stream), table = launch, table_of(stored)
        for i in cutlass.range(stored.windows, unroll=1):
            exps, first = exps_of(table, i, memories_of(stored))
            part = rows_of(w, first, Int32(table[i, ForwardWindow.STORED]))
            counted = count, Int32(table[i, Window.SELECTS])
            splits = Int32(table[i, ForwardWindow.REPAIR_SPLITS])
            more = semaphores, *(None,) * 4, *counted, first, splits, clusters, stream
            states = rows_of(h, 0, exps.shape[0])
            self.repair_exps(states, part, *row_vectors, None, exps, *more)

    @cute.jit
    def selection(self, h: cute.Tensor, memory: Any, rows: Int32, stored: Any) -> Any:
        """Return hidden states (N, D) in `memory`, order and targets (N,), and count (1,).

        These are in `memory`, too, unless they are `stored`, an `Order`.
        """
        hidden = h.shape[1]
        dense = cute.make_tensor(
            cute.recast_ptr(memory, dtype=h.element_type),
            cute.make_layout((rows, hidden), stride=(hidden, 1)),
        )
        if cutlass.const_expr(stored is not None):
            return dense, stored.order, stored.target, stored.count
        after_h = memory + rows * hidden // 2
        vectors = cute.recast_ptr(after_h, dtype=Int64)
        order = cute.make_tensor(vectors, cute.make_layout((rows,)))
        counted = cute.make_tensor(vectors + rows, cute.make_layout((rows,)))
        counter = cute.recast_ptr(after_h + 4 * rows, dtype=Int32)
        return dense, order, counted, cute.make_tensor(counter, cute.make_layout((1,)))
