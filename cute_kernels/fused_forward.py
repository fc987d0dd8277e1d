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
from cutefce.cute_kernels.common.dsl import DTYPES, matrix, scalar, vector
from cutefce.cute_kernels.common.logit_transform import Transform
from cutefce.cute_kernels.jit import compiler
from cutefce.cute_kernels.workspace import NUM_STATS, Stat, forward_semaphore_count


class Order(NamedTuple):
    """The rows that count, where a backward needs them too."""

    order: cute.Tensor
    """(N,) int64: the tokens, those that count first."""
    target: cute.Tensor
    """(N,) int64: their targets."""
    count: cute.Tensor
    """(1,) int32: how many count."""


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
    exps = order = None
    if kernel.stores:
        exps = matrix(DTYPES[kernel.dtype], tokens, cute.sym_int(divisibility=8))
        order = order_argument(tokens) if kernel.selects else None
    results = stats, reduced, exps, order
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
        exps: cute.Tensor | None,
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
        the rows that count, in at most `most_splits` vocabulary splits.  If it stores, `exps`
        (N, K) receives the exponentials, `repair_exps` runs last, and the statistics are in the
        order of rows, which `stored_order` receives.  Each parameter is one argument that the host
        passes by position.
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
        flags = forward_semaphore_count(rows, self.config.rows)
        logit = cute.make_tensor(memory, cute.make_layout((rows,)))
        after_logit = memory + rows
        sums_layout = cute.make_layout((rows, partials), stride=(partials, 1))
        sums = cute.make_tensor(after_logit, sums_layout)
        after_sums = cute.recast_ptr(after_logit + rows * partials, dtype=Int32)
        semaphores = cute.make_tensor(after_sums, cute.make_layout((flags,)))
        more = order, ignored, selects, None, stream
        self.target_logit(h, w, counted, logit, semaphores, transform, *more)
        if cutlass.const_expr(not self.spec.selects):
            count = semaphores  # any int32
        row_vectors, of_semaphores = (
            (logit, counted, sums, exps),
            (semaphores, transform, None, None),
        )
        numbers = Int32(0), vocab_splits, clusters, stream
        self.project_exp(dense, w, *row_vectors, *of_semaphores, count, selects, *numbers)
        results = stats, reduced, semaphores, scatter
        self.reduce(sums, logit, counted, *results, ignored, mean, None, None, stream)
        if cutlass.const_expr(self.spec.stores):
            reference = cute.slice_(stats, (int(Stat.REFERENCE), None))
            row_vectors = reference, counted, None, exps
            self.repair_exps(dense, w, *row_vectors, *of_semaphores, count, selects, *numbers)

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
