"""The forward without stored exponentials: its kernels launched by one host function.

One host call and one allocation minimize CPU overhead.  The workspace, which the host allocates,
holds the selection of rows if there is one, r (N,), the partial sums (N, P) and the semaphores, in
elements of 4 bytes.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from cutefce.cute_kernels import spec
from cutefce.cute_kernels.common.dsl import matrix, scalar, vector
from cutefce.cute_kernels.common.logit_transform import Transform
from cutefce.cute_kernels.jit import compiler
from cutefce.cute_kernels.workspace import NUM_STATS, forward_semaphore_count


def compile_signature(kernel: spec.FusedForwardSpec) -> tuple[Any, tuple[Any, ...]]:
    """Return the host function of `kernel` and the arguments to compile it for."""
    target_logit, inputs = compiler.compile_signature(kernel.target_logit)
    project_exp, _ = compiler.compile_signature(kernel.row_sums)
    reduce_partials, _ = compiler.compile_signature(kernel.reduce_partials)
    h, w, target, _, _, transform, _, ignored, *_, stream = inputs
    workspace = vector(Float32, cute.sym_int(), aligned=True)
    stats, reduced = matrix(Float32, NUM_STATS, target.shape[0], aligned=False), scalar(Float32)
    numbers = ignored, Int32(1), Int32(1), Int32(1), Int32(0)
    function = FusedForward(kernel, target_logit, project_exp, reduce_partials)
    return function, (h, w, target, workspace, stats, reduced, transform, *numbers, stream)


class FusedForward:
    """The launches of the kernels' host functions."""

    def __init__(
        self, kernel: spec.FusedForwardSpec, target_logit: Any, project_exp: Any, reduce: Any
    ) -> None:
        self.spec, self.config = kernel, kernel.config
        self.target_logit, self.project_exp, self.reduce = target_logit, project_exp, reduce
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
        the rows that count, in at most `most_splits` vocabulary splits.  Each parameter is one
        argument that the host passes by position.
        """
        rows, partials = target.shape[0], most_splits * self.config.partials_per_row
        memory, hidden = workspace.iterator, h.shape[1]
        count, selects, order, scatter = target, Int32(0), target, None
        dense, counted = h, target
        if cutlass.const_expr(self.spec.selects):
            dense, order, counted, count = self.selection(h, memory, rows)
            self.select_rows(target, order, counted, count, rows, ignored, stream)
            self.gather_rows(dense, h, order, None, count, stream)
            memory += self.spec.selection_size(rows, hidden)
            selects, scatter = Int32(1), order
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
        row_vectors = logit, counted, sums, None, semaphores, transform, None
        numbers = Int32(0), vocab_splits, clusters
        self.project_exp(dense, w, *row_vectors, count, selects, *numbers, stream)
        results = stats, reduced, semaphores, scatter
        self.reduce(sums, logit, counted, *results, ignored, mean, None, None, stream)

    @cute.jit
    def selection(self, h: cute.Tensor, memory: Any, rows: Int32) -> Any:
        """Return hidden states (N, D), order and targets (N,), and count (1,) in `memory`."""
        hidden = h.shape[1]
        dense = cute.make_tensor(
            cute.recast_ptr(memory, dtype=h.element_type),
            cute.make_layout((rows, hidden), stride=(hidden, 1)),
        )
        after_h = memory + rows * hidden // 2
        vectors = cute.recast_ptr(after_h, dtype=Int64)
        order = cute.make_tensor(vectors, cute.make_layout((rows,)))
        counted = cute.make_tensor(vectors + rows, cute.make_layout((rows,)))
        counter = cute.recast_ptr(after_h + 4 * rows, dtype=Int32)
        return dense, order, counted, cute.make_tensor(counter, cute.make_layout((1,)))
