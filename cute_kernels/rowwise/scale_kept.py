"""Kept sums times a factor, in their memory.

Of dW that is the last step of gradients in forward.  Sums of dX over windows remain kept: where
exponentials that were stored end, and probabilities begin, each row is divided by its T_i.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32

from cutefce.cute_kernels import spec
from cutefce.cute_kernels.common.dsl import (
    DTYPES,
    USE_PDL,
    current_stream,
    matrix,
    pdl_wait,
    vector,
)
from cutefce.cute_kernels.common.row_vectors import WARPS, row_vectors
from cutefce.cute_kernels.rowwise.kept_sums import load_kept, low_signature, store_kept


def compile_signature(kernel: spec.ScaleKeptSpec) -> tuple[Any, tuple[Any, ...]]:
    """Return the host function of `kernel` and the arguments to compile it for."""
    rows, hidden = cute.sym_int(), cute.sym_int(divisibility=8)
    low = low_signature(rows, hidden, kernel.low_bits)
    kept = matrix(DTYPES[kernel.dtype], rows, hidden)
    factor = vector(Float32, rows if kernel.by_rows else 1)
    return ScaleKept(kernel), (kept, low, factor, current_stream())


class ScaleKept:
    """The kernel and its launch."""

    def __init__(self, kernel: spec.ScaleKeptSpec) -> None:
        self.low_bits, self.by_rows = kernel.low_bits, kernel.by_rows

    @cute.jit
    def __call__(
        self, kept: cute.Tensor, low: cute.Tensor, factor: cute.Tensor, stream: Any
    ) -> None:
        """Multiply the sums in kept and low (M, D) by `factor`, (1,) or one for each row, (M,).

        Without factors of rows the product is written to `kept`, rounded once.  Of four low bits,
        low is (M, D / 2).
        """
        self.kernel(kept, low, factor).launch(
            grid=[kept.shape[0], 1, 1], block=[32 * WARPS, 1, 1], stream=stream, **USE_PDL
        )

    @cute.kernel
    def kernel(self, kept: cute.Tensor, low: cute.Tensor, factor: cute.Tensor) -> None:
        """Scale one row a block."""
        pdl_wait()
        row = cute.arch.block_idx()[0]
        upper_half, scale = row_vectors(kept, row), factor[row if self.by_rows else 0]
        lower = row_vectors(low, row, self.low_bits)
        vectors = kept.shape[1] // 8
        for i in cutlass.range(cute.arch.thread_idx()[0], vectors, 32 * WARPS, unroll=2):
            sums = load_kept(upper_half, lower, i)
            sums.store(sums.load() * scale)
            if cutlass.const_expr(self.by_rows):
                store_kept(sums, upper_half, lower, i)
            else:
                rounded = cute.make_rmem_tensor((8,), kept.element_type)
                rounded.store(sums.load().to(kept.element_type))
                cute.autovec_copy(rounded, upper_half[None, i])
