"""A backward with all exponentials stored: its kernels launched by one host function.

The sums of dX come first, so that cuBLAS may compute them.  The workspace, which the host
allocates, is laid out as `spec.FusedBackwardSpec.workspace_size` says.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from cutefce.cute_kernels import spec
from cutefce.cute_kernels.common.dsl import DTYPES, current_stream, matrix, vector
from cutefce.cute_kernels.fused_forward import order_argument
from cutefce.cute_kernels.jit import compiler
from cutefce.cute_kernels.workspace import NUM_STATS, Coefficient


def compile_signature(kernel: spec.FusedBackwardSpec) -> tuple[Any, tuple[Any, ...]]:
    """Return the host function of `kernel` and the arguments to compile it for."""
    dtype, tokens, vocab = DTYPES[kernel.dtype], cute.sym_int(), cute.sym_int()
    hidden = cute.sym_int(divisibility=8)
    h, w = matrix(dtype, tokens, hidden), matrix(dtype, vocab, hidden)
    stats = matrix(Float32, NUM_STATS, tokens, aligned=False)
    exps = matrix(dtype, tokens, vocab)
    sums, workspace = matrix(Float32, tokens, hidden), vector(Float32, cute.sym_int(), aligned=True)
    order = order_argument(tokens) if kernel.selects else None
    upstream = vector(Float32, cute.sym_int())
    given = h, w, vector(Int64, tokens), order, stats, upstream, exps, sums
    results = matrix(dtype, tokens, hidden), matrix(dtype, vocab, hidden), workspace
    numbers = Int64(0), Int32(0), Int32(1), current_stream()
    return FusedBackward(kernel), (*given, *results, *numbers)


class FusedBackward:
    """The launches of the kernels' host functions."""

    def __init__(self, kernel: spec.FusedBackwardSpec) -> None:
        self.spec = kernel
        self.row_coefficients, _ = compiler.compile_signature(kernel.row_coefficients)
        self.scale_rows, _ = compiler.compile_signature(kernel.scale_rows)
        self.sort_targets, _ = compiler.compile_signature(kernel.sort_targets)
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
        exps: cute.Tensor,
        sums: cute.Tensor,
        dx: cute.Tensor,
        dw: cute.Tensor,
        workspace: cute.Tensor,
        ignored: Int64,
        mean: Int32,
        clusters: Int32,
        stream: Any,
    ) -> None:
        """Write dX (N, D) of its `sums`, and dW (V, D) on `clusters` clusters.

        If the spec selects, `upstream`, `stats` and `exps` (N, V) are in the `Order` of rows that
        the forward has stored.  `dx` holds the scaled hidden states until it is written.  Each
        parameter is one argument that the host passes by position.
        """
        rows, vocab = target.shape[0], w.shape[0]
        by_target, scalars = cute.recast_ptr(workspace.iterator, dtype=Int64), workspace.iterator
        tokens = cute.make_tensor(by_target, cute.make_layout((rows,)))
        scalars += 2 * rows
        planes = cute.make_layout((3, rows), stride=(rows, 1))
        coefficients = cute.make_tensor(scalars, planes)
        scale = cute.slice_(coefficients, (int(Coefficient.DX_SCALE), None))
        at_target = cute.slice_(coefficients, (int(Coefficient.DX_TARGET), None))
        sorted_coefficient = cute.make_tensor(scalars + 3 * rows, cute.make_layout((rows,)))
        scalars += 4 * rows
        integers = cute.recast_ptr(scalars, dtype=Int32)
        offsets = cute.make_tensor(integers, cute.make_layout((vocab + 1,)))
        grad_scale = scalars + (vocab + 1)
        zeros = cute.make_layout((self.spec.LINE,))
        semaphores = cute.make_tensor(integers + (vocab + 2), zeros)
        index, places, count, selects = target, target, semaphores, Int32(0)
        if cutlass.const_expr(self.spec.selects):
            places, index, count = stored_order
            selects = Int32(1)
        results = coefficients, cute.make_tensor(grad_scale, cute.make_layout(())), semaphores
        counted, options = (count, selects), (ignored, mean, Int32(vocab), None, stream)
        self.row_coefficients(stats, index, upstream, *results, *counted, *options)
        if cutlass.const_expr(self.spec.selects):
            self.scale_rows(dx, h, places, scale, count, stream)
        else:
            self.scale_rows(dx, h, None, scale, None, None, None, None, Int32(0), stream)
        csr = tokens, offsets, sorted_coefficient
        self.sort_targets(index, at_target, places, *csr, ignored, selects, stream)
        transposed = cute.select(exps.layout, mode=[1, 0])
        a = cute.make_tensor(exps.iterator, transposed)
        b = cute.make_tensor(dx.iterator, cute.select(dx.layout, mode=[1, 0]))
        targets = self.csr_of(*csr, h, cute.make_tensor(grad_scale, cute.make_layout((1,))))
        launch = clusters, None, None, stream
        self.grad_weight(a, b, dw, targets, None, semaphores, *counted, *launch)
        self.finish_dx(dx, sums, w, scale, at_target, index, None, places, selects, stream)
