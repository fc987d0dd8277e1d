"""A backward over windows: its kernels launched by one host function.

The exponentials of a window are stored, or computed again here.  Sums of dX over all columns may be
given, so that cuBLAS may compute them.  The workspace, which the host allocates, is laid out as
`spec.FusedBackwardSpec.workspace_size` says.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from cutefce.cute_kernels import spec
from cutefce.cute_kernels.common.dsl import DTYPES, current_stream, matrix, vector
from cutefce.cute_kernels.common.window_table import (
    columns_of,
    exps_of,
    rows_of,
    transpose,
    vector_part,
    window_table,
)
from cutefce.cute_kernels.fused_forward import order_argument
from cutefce.cute_kernels.jit import compiler
from cutefce.cute_kernels.workspace import (
    NUM_STATS,
    BackwardWindow,
    Coefficient,
    ExpsMemory,
    GradHidden,
    Stat,
    Window,
)


def compile_signature(kernel: spec.FusedBackwardSpec) -> tuple[Any, tuple[Any, ...]]:
    """Return the host function of `kernel` and the arguments to compile it for."""
    dtype, tokens, vocab = DTYPES[kernel.dtype], cute.sym_int(), cute.sym_int()
    hidden = cute.sym_int(divisibility=8)
    h, w = matrix(dtype, tokens, hidden), matrix(dtype, vocab, hidden)
    stats = matrix(Float32, NUM_STATS, tokens, aligned=False)
    order = order_argument(tokens) if kernel.selects else None
    upstream, kept = vector(Float32, cute.sym_int()), matrix(dtype, cute.sym_int(), cute.sym_int())
    given = h, w, vector(Int64, tokens), order, stats, upstream, kept
    results = matrix(dtype, tokens, hidden), matrix(dtype, vocab, hidden)
    workspace = vector(Float32, cute.sym_int(), aligned=True)
    windows, numbers = (Int64(0), Int32(1), Int32(0), Int32(0)), (Int64(0), Int32(0), Int32(1))
    return FusedBackward(kernel), (
        *given,
        *results,
        workspace,
        *windows,
        *numbers,
        current_stream(),
    )


class FusedBackward:
    """The launches of the kernels' host functions."""

    def __init__(self, kernel: spec.FusedBackwardSpec) -> None:
        self.spec = kernel
        self.row_coefficients, _ = compiler.compile_signature(kernel.row_coefficients)
        self.scale_rows, _ = compiler.compile_signature(kernel.scale_rows)
        self.gather_rows, _ = compiler.compile_signature(kernel.gather_rows)
        self.sort_targets, _ = compiler.compile_signature(kernel.sort_targets)
        self.exps, _ = compiler.compile_signature(kernel.exps)
        self.grad_hidden, _ = compiler.compile_signature(kernel.grad_hidden)
        self.grad_hidden_short, _ = compiler.compile_signature(kernel.grad_hidden_short)
        self.grad_weight, arguments = compiler.compile_signature(kernel.grad_weight)
        self.csr_of = type(arguments[3])  # the `TargetCsr` of this architecture's kernel
        self.finish_dx, _ = compiler.compile_signature(kernel.finish_dx)

    @cute.jit
    def __call__(
        self,
        h: cute.Tensor,
        w: cute.Tensor,
        target: cute.Tensor,
        stored_order: Any,
        stats: cute.Tensor,
        upstream: cute.Tensor,
        kept: cute.Tensor,
        dx: cute.Tensor,
        dw: cute.Tensor,
        workspace: cute.Tensor,
        table: Int64,
        windows: Int32,
        buffer_columns: Int32,
        recomputes: Int32,
        ignored: Int64,
        mean: Int32,
        num_sms: Int32,
        stream: Any,
    ) -> None:
        """Write dX (N, D) and dW (V, D) on `num_sms` multiprocessors.

        If the spec selects, `upstream` and `stats` are in the `Order` of rows that the forward has
        stored, as are exponentials: `windows` of them are described by `BackwardWindow`s at the
        address `table` of host memory.  They are in `dw`, in `kept` and, with `recomputes`, in
        `buffer_columns` of the workspace.  `dx` holds the scaled hidden states until it is written.
        Each parameter is one argument that the host passes by position.
        """
        rows, hidden, vocab = target.shape[0], h.shape[1], w.shape[0]
        sums = cute.make_tensor(
            workspace.iterator, cute.make_layout((rows, hidden), stride=(hidden, 1))
        )
        after = workspace.iterator + Int64(rows) * hidden
        gathered = cute.recast_ptr(after, dtype=h.element_type)
        after += self.spec.gathered_size(Int64(rows), hidden, recomputes)
        buffer = cute.recast_ptr(after, dtype=h.element_type)
        after += Int64(rows) * buffer_columns // 2
        count_of_all = windows * self.spec.semaphore_places(rows, num_sms)[-1]
        integers = cute.recast_ptr(after, dtype=Int32)
        semaphores = cute.make_tensor(integers, cute.make_layout((count_of_all,)))
        by_target, scalars = (
            cute.recast_ptr(after + count_of_all, dtype=Int64),
            after + count_of_all,
        )
        tokens = cute.make_tensor(by_target, cute.make_layout((rows,)))
        scalars += 2 * rows
        planes = cute.make_layout((3, rows), stride=(rows, 1))
        coefficients = cute.make_tensor(scalars, planes)
        scale = cute.slice_(coefficients, (int(Coefficient.DX_SCALE), None))
        at_target = cute.slice_(coefficients, (int(Coefficient.DX_TARGET), None))
        sorted_coefficient = cute.make_tensor(scalars + 3 * rows, cute.make_layout((rows,)))
        scalars += 4 * rows
        offsets = cute.make_tensor(
            cute.recast_ptr(scalars, dtype=Int32), cute.make_layout((vocab + 1,))
        )
        grad_scale = scalars + (vocab + 1)
        index, places, count, selects, dense = target, target, semaphores, Int32(0), h
        if cutlass.const_expr(self.spec.selects):
            places, index, count = stored_order
            selects = Int32(1)
            dense = cute.make_tensor(gathered, sums.layout)
        results = coefficients, cute.make_tensor(grad_scale, cute.make_layout(())), semaphores
        counted, options = (count, selects), (ignored, mean, Int32(vocab), None, stream)
        self.row_coefficients(stats, index, upstream, *results, *counted, *options)
        if cutlass.const_expr(self.spec.selects):
            self.scale_rows(dx, h, places, scale, count, stream)
            if recomputes != 0:
                self.gather_rows(dense, h, places, None, count, stream)
        else:
            self.scale_rows(dx, h, None, scale, None, None, None, None, Int32(0), stream)
        csr = tokens, offsets, sorted_coefficient
        self.sort_targets(index, at_target, places, *csr, ignored, selects, stream)
        reference = cute.slice_(stats, (int(Stat.REFERENCE), None))
        operands = dense, w, (reference, index), (*csr, h), (dx, grad_scale)
        memories = {ExpsMemory.DW: dw.iterator, ExpsMemory.KEPT: kept.iterator}
        memories[ExpsMemory.BUFFER] = buffer
        of_windows = window_table(table, windows, len(Window) + len(BackwardWindow)), memories
        launch = semaphores, counted, num_sms, stream
        self.run_windows(operands, windows, of_windows, sums, dw, launch)
        self.finish_dx(dx, sums, w, scale, at_target, index, None, places, selects, stream)

    @cute.jit
    def run_windows(
        self,
        operands: Any,
        windows: Int32,
        of_windows: Any,
        sums: cute.Tensor,
        dw: cute.Tensor,
        launch: Any,
    ) -> None:
        """Compute the sums of dX (N, D) and dW (V, D), window after window.

        `operands` are the hidden states in the order of rows, the weight, (reference, target), the
        fields of `TargetCsr` but the last, and (scaled hidden states, dW's factor); `of_windows`
        are the table and the memories of exponentials; `launch` are semaphores, the fields of
        `RowCount`, multiprocessors and stream.
        """
        h, w, row_vectors, csr, (scaled, grad_scale) = operands
        (table, memories), (semaphores, counted, num_sms, stream) = of_windows, launch
        rows, kernel = sums.shape[0], self.spec
        of_hidden, of_weight, pitch = kernel.semaphore_places(rows, num_sms)
        factor = cute.make_tensor(grad_scale, cute.make_layout((1,)))
        for i in cutlass.range(windows, unroll=1):
            whole, first = exps_of(table, i, memories, rows)
            columns = Int32(table[i, Window.COLUMNS])
            exps, part = columns_of(whole, columns), rows_of(w, first, columns)
            counters = vector_part(semaphores, i * pitch, pitch)
            if table[i, BackwardWindow.RECOMPUTED] != 0:
                # one split a tile: there are no sums to keep in registers across tiles
                tile, clusters = kernel.exps_config.tile_n, num_sms // kernel.exps_config.cluster
                numbers = first, (columns + tile - 1) // tile, clusters, stream
                more = counters, None, None, None, *counted, *numbers
                self.exps(h, part, *row_vectors, None, exps, *more)
            given = exps, transpose(part), sums, None, None
            own = vector_part(counters, of_hidden, of_weight - of_hidden)
            more = Int32(table[i, BackwardWindow.K_SPLITS]), Int32(i == 0), stream
            if table[i, BackwardWindow.GRAD_HIDDEN] == GradHidden.LONG:
                clusters = num_sms // kernel.hidden_config.cluster
                self.grad_hidden(*given, own, *counted, clusters, *more)
            if table[i, BackwardWindow.GRAD_HIDDEN] == GradHidden.SHORT:
                clusters = num_sms // kernel.short_config.cluster
                self.grad_hidden_short(*given, own, *counted, clusters, *more)
            order, offsets, coefficient, h_of_all = csr
            listed = order, vector_part(offsets, first, columns + 1), coefficient, h_of_all
            own = vector_part(counters, of_weight, pitch - of_weight)
            gemm = transpose(exps), transpose(scaled), rows_of(dw, first, columns)
            clusters = num_sms // kernel.config.cluster
            more = self.csr_of(*listed, factor), None, own, *counted, clusters, None, None, stream
            self.grad_weight(*gemm, *more)
