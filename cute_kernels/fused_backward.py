"""A backward over windows: its kernels launched by one host function.

The exponentials of a window are stored, or computed again here, which may be probabilities then.
Sums of dX over all columns may be given, so that cuBLAS may compute them; those over windows may be
kept in 24 or 20 bits.  The workspace, which the host allocates, is laid out as
`spec.FusedBackwardSpec.workspace_size` says.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64

from cutefce.cute_kernels import spec
from cutefce.cute_kernels.common.dsl import DTYPES, current_stream, matrix, vector
from cutefce.cute_kernels.common.window_table import (
    columns_of,
    either,
    exps_of,
    low_of,
    rows_of,
    transpose,
    vector_part,
    window_table,
)
from cutefce.cute_kernels.fused_forward import order_argument
from cutefce.cute_kernels.jit import compiler
from cutefce.cute_kernels.sm90.kept_store import KeptSums
from cutefce.cute_kernels.workspace import (
    NUM_STATS,
    BackwardWindow,
    Coefficient,
    ExpsMemory,
    GradHidden,
    Stat,
    Window,
)

COEFFICIENTS = (
    Coefficient.DX_SCALE,
    Coefficient.DX_TARGET,
    Coefficient.DW_SCALE,
    Coefficient.DW_TARGET,
    Coefficient.REFERENCE,
)
"""The coefficients of tokens that kernels need."""


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
    windows = Int64(0), Int32(1), Int32(1), Int32(0), Int32(0)
    numbers = Int64(0), Int32(0), Int32(1)
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
        probabilities = kernel.probability_coefficients
        self.probability_coefficients, _ = compiler.compile_signature(probabilities)
        self.scale_rows, _ = compiler.compile_signature(kernel.scale_rows)
        self.gather_rows, _ = compiler.compile_signature(kernel.gather_rows)
        self.sort_targets, _ = compiler.compile_signature(kernel.sort_targets)
        self.exps, _ = compiler.compile_signature(kernel.exps)
        self.grad_hidden, _ = compiler.compile_signature(kernel.grad_hidden)
        if kernel.hidden_bits is None:
            self.grad_hidden_short, _ = compiler.compile_signature(kernel.grad_hidden_short)
        self.grad_weight, arguments = compiler.compile_signature(kernel.grad_weight)
        self.csr_of = type(arguments[3])  # the `TargetCsr` of this architecture's kernel
        self.scale_sums, _ = compiler.compile_signature(kernel.scale_sums)
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
        probabilities: Int32,
        buffer_columns: Int32,
        gathers: Int32,
        ignored: Int64,
        mean: Int32,
        num_sms: Int32,
        stream: Any,
    ) -> None:
        """Write dX (N, D) and dW (V, D) on `num_sms` multiprocessors.

        If the spec selects, `upstream` and `stats` are in the `Order` of rows that the forward has
        stored, as are exponentials: `windows` of them are described by `BackwardWindow`s at the
        address `table` of host memory.  They are in `dw`, in `kept` and in `buffer_columns` of the
        workspace.  If `probabilities` of them come before those that are computed again, these are
        probabilities, for one `upstream` gradient (1,) of all tokens; otherwise it is `windows`.
        `dx` holds hidden states until it is written: scaled ones, then those that make
        probabilities.  With `gathers`, others are computed again, whose hidden states are in the
        workspace if the spec selects.  Each parameter is one argument that the host passes by
        position.
        """
        rows, hidden, vocab = target.shape[0], h.shape[1], w.shape[0]
        row_major = cute.make_layout((rows, hidden), stride=(hidden, 1))
        sums = self.sums_of(workspace.iterator, rows, hidden)
        after = workspace.iterator + self.spec.sums_size(Int64(rows), hidden)
        gathered = cute.recast_ptr(after, dtype=h.element_type)
        after += self.spec.gathered_size(Int64(rows), hidden, gathers)
        buffer = cute.recast_ptr(after, dtype=h.element_type)
        after += Int64(rows) * buffer_columns // 2
        count_of_all = windows * self.spec.semaphore_places(rows, num_sms)[-1]
        integers = cute.recast_ptr(after, dtype=Int32)
        semaphores = cute.make_tensor(integers, cute.make_layout((count_of_all,)))
        after += count_of_all
        tokens = cute.make_tensor(cute.recast_ptr(after, dtype=Int64), cute.make_layout((rows,)))
        after += 2 * rows
        in_reference = Int32(probabilities < windows)
        planes = self.spec.probability_coefficients.planes
        coefficients = cute.make_tensor(after, cute.make_layout((planes, rows), stride=(rows, 1)))
        scale, at_target, dw_scale, dw_target, own = (
            cute.slice_(coefficients, (int(i), None)) for i in COEFFICIENTS
        )
        row_scale = either(scale, dw_scale, in_reference)
        target_scale = either(at_target, dw_target, in_reference)
        after += planes * rows
        sorted_coefficient = cute.make_tensor(after, cute.make_layout((rows,)))
        after += rows
        offsets = cute.make_tensor(
            cute.recast_ptr(after, dtype=Int32), cute.make_layout((vocab + 1,))
        )
        grad_scale = cute.make_tensor(after + (vocab + 1), cute.make_layout((1,)))
        index, places, count, selects, dense = target, target, semaphores, Int32(0), h
        if cutlass.const_expr(self.spec.selects):
            places, index, count = stored_order
            selects = Int32(1)
            apart = cute.make_tensor(gathered, row_major)
            dense = either(apart, cute.make_tensor(dx.iterator, row_major), in_reference)
        counted, options = (count, selects), (ignored, mean, Int32(vocab), None, stream)
        factor = cute.make_tensor(grad_scale.iterator, cute.make_layout(()))
        if in_reference != 0:
            of_all = coefficients, factor, semaphores, *counted, *options
            self.probability_coefficients(stats, index, upstream, *of_all)
        else:
            three = rows_of(coefficients, 0, 3)
            of_all = three, factor, semaphores, *counted, *options
            self.row_coefficients(stats, index, upstream, *of_all)
        if cutlass.const_expr(self.spec.selects):
            self.scale_rows(dx, h, places, row_scale, count, stream)
            if gathers != 0:
                self.gather_rows(dense, h, places, None, count, stream)
        else:
            self.scale_rows(dx, h, None, row_scale, None, None, None, None, Int32(0), stream)
        csr = tokens, offsets, sorted_coefficient
        self.sort_targets(index, target_scale, places, *csr, ignored, selects, stream)
        reference = either(cute.slice_(stats, (int(Stat.REFERENCE), None)), own, in_reference)
        operands = dense, w, (reference, index), (*csr, h, grad_scale), dx
        memories = {ExpsMemory.DW: dw.iterator, ExpsMemory.KEPT: kept.iterator}
        memories[ExpsMemory.BUFFER] = buffer
        of_windows = window_table(table, windows, len(Window) + len(BackwardWindow)), memories
        launch = semaphores, count, num_sms, stream
        later = probabilities, row_scale, places
        self.run_windows(operands, windows, of_windows, sums, dw, later, launch)
        last = None, places, selects, stream
        if cutlass.const_expr(self.spec.hidden_bits is None):
            self.finish_dx(dx, sums, w, scale, at_target, index, *last)
        else:
            self.finish_dx(dx, sums.upper, sums.low, w, index, scale, at_target, *last)

    @cute.jit
    def sums_of(self, memory: cute.Pointer, rows: Int32, hidden: Int32) -> Any:
        """Return dX's sums (N, D) in `memory`: float32, or `KeptSums`."""
        layout = cute.make_layout((rows, hidden), stride=(hidden, 1))
        low_bits = self.spec.hidden_bits
        if cutlass.const_expr(low_bits is None):
            return cute.make_tensor(memory, layout)
        assert low_bits is not None
        upper = cute.make_tensor(cute.recast_ptr(memory, dtype=BFloat16), layout)
        after = memory + Int64(rows) * hidden // 2
        return KeptSums(upper, low_of(after, rows, hidden, low_bits))

    @cute.jit
    def run_windows(
        self,
        operands: Any,
        windows: Int32,
        of_windows: Any,
        sums: Any,
        dw: cute.Tensor,
        later: Any,
        launch: Any,
    ) -> None:
        """Compute the sums of dX (N, D) and dW (V, D), window after window.

        `operands` are the hidden states in the order of rows, the weight, (reference, target), the
        fields of `TargetCsr`, and scaled hidden states; `of_windows` are the table and the memories
        of exponentials; `later` are the windows before those of probabilities, the factors of rows
        that become parts of these, and the order of rows; `launch` are semaphores, the number of
        rows that count, multiprocessors and stream.  More than eight parameters: they are grouped.
        """
        h, w, row_vectors, (order, offsets, *of_entries), scaled = operands
        (table, memories), (semaphores, count, num_sms, stream) = of_windows, launch
        kernel, rows = self.spec, row_vectors[1].shape[0]
        of_hidden, of_weight, pitch = kernel.semaphore_places(rows, num_sms)
        probabilities = later[0]
        for i in cutlass.range(windows, unroll=1):
            if i == probabilities:
                self.begin_probabilities(sums, scaled, operands[3][3], later, count, stream)
            whole, first = exps_of(table, i, memories)
            counted = count, Int32(table[i, Window.SELECTS])
            columns = Int32(table[i, Window.COLUMNS])
            exps, part = columns_of(whole, columns), rows_of(w, first, columns)
            counters = vector_part(semaphores, i * pitch, pitch)
            if table[i, BackwardWindow.RECOMPUTED] != 0:
                # one split a tile: there are no sums to keep in registers across tiles
                tile, clusters = kernel.exps_config.columns, num_sms // kernel.exps_config.cluster
                numbers = first, (columns + tile - 1) // tile, clusters, stream
                of_exps = counters, *(None,) * 4, *counted, *numbers
                self.exps(rows_of(h, 0, exps.shape[0]), part, *row_vectors, None, exps, *of_exps)
            own, of_dx = vector_part(counters, of_hidden, of_weight - of_hidden), (counted, num_sms)
            self.add_grad_hidden(sums, (exps, transpose(part)), own, (table, i), (*of_dx, stream))
            listed = order, vector_part(offsets, first, columns + 1), *of_entries
            own = vector_part(counters, of_weight, pitch - of_weight)
            states = scaled
            if cutlass.const_expr(not kernel.selects):
                states = either(scaled, h, Int32(i >= probabilities))
            gemm = transpose(exps), transpose(states), rows_of(dw, first, columns)
            clusters = num_sms // kernel.config.cluster
            more = self.csr_of(*listed), None, own, *counted, clusters, None, None, stream
            self.grad_weight(*gemm, *more)

    @cute.jit
    def begin_probabilities(
        self,
        sums: Any,
        states: cute.Tensor,
        h: cute.Tensor,
        later: Any,
        count: cute.Tensor,
        stream: Any,
    ) -> None:
        """Multiply dX's sums by the factors of rows, and bring h into their order, to `states`.

        See `run_windows`.
        """
        _, row_scale, places = later
        if cutlass.const_expr(self.spec.hidden_bits is None):
            self.scale_sums(sums, sums, None, row_scale, None, None, None, None, Int32(0), stream)
        else:
            self.scale_sums(sums.upper, sums.low, row_scale, stream)
        if cutlass.const_expr(self.spec.selects):
            self.gather_rows(states, h, places, None, count, stream)

    @cute.jit
    def add_grad_hidden(
        self, sums: Any, operands: Any, semaphores: cute.Tensor, window: Any, launch: Any
    ) -> None:
        """Add the product of `operands` to dX's sums; `window` are the table and its row.

        `launch` are the fields of `RowCount`, multiprocessors and stream.
        """
        (table, i), (counted, num_sms, stream) = window, launch
        given = *operands, sums, None, None, semaphores, *counted
        kernel, kind = self.spec, table[i, BackwardWindow.GRAD_HIDDEN]
        overwrite = Int32(table[i, Window.FIRST] == 0)
        if cutlass.const_expr(kernel.hidden_bits is not None):
            clusters = num_sms // kernel.hidden_config.cluster
            self.grad_hidden(*given, clusters, None, overwrite, stream)
        else:
            more = Int32(table[i, BackwardWindow.K_SPLITS]), overwrite, stream
            if kind == GradHidden.LONG:
                clusters = num_sms // kernel.hidden_config.cluster
                self.grad_hidden(*given, clusters, *more)
            if kind == GradHidden.SHORT:
                clusters = num_sms // kernel.short_config.cluster
                self.grad_hidden_short(*given, clusters, *more)
