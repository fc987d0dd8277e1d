"""dW, a factor times its kept sums, in their memory: the last step of gradients in forward."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint8
from cutlass.cute.runtime import make_fake_tensor

from cutefce.cute_kernels import spec
from cutefce.cute_kernels.common.dsl import (
    DTYPES,
    USE_PDL,
    current_stream,
    matrix,
    pdl_wait,
    vector,
)
from cutefce.cute_kernels.common.kept_bits import join_eight
from cutefce.cute_kernels.common.row_vectors import WARPS, row_vectors


def compile_signature(kernel: spec.ScaleKeptSpec) -> tuple[Any, tuple[Any, ...]]:
    """Return the host function of `kernel` and the arguments to compile it for."""
    rows, hidden, low_bits = cute.sym_int(), cute.sym_int(divisibility=8), kernel.low_bits
    bytes_ = hidden if low_bits == 8 else cute.sym_int(divisibility=4)
    pitch = cute.sym_int64(divisibility=low_bits)
    low = make_fake_tensor(Uint8, (rows, bytes_), (pitch, 1), assumed_align=low_bits)
    kept = matrix(DTYPES[kernel.dtype], rows, hidden)
    return ScaleKept(low_bits), (kept, low, vector(Float32, 1), current_stream())


class ScaleKept:
    """The kernel and its launch."""

    def __init__(self, low_bits: int) -> None:
        self.low_bits = low_bits

    @cute.jit
    def __call__(
        self, kept: cute.Tensor, low: cute.Tensor, factor: cute.Tensor, stream: Any
    ) -> None:
        """Write factor (1,) times the sums in kept and low (V, D) to `kept`, rounded once.

        Of four low bits, low is (V, D / 2).
        """
        self.kernel(kept, low, factor).launch(
            grid=[kept.shape[0], 1, 1], block=[32 * WARPS, 1, 1], stream=stream, **USE_PDL
        )

    @cute.kernel
    def kernel(self, kept: cute.Tensor, low: cute.Tensor, factor: cute.Tensor) -> None:
        """Scale one row a block."""
        pdl_wait()
        row = cute.arch.block_idx()[0]
        upper_half, scale = row_vectors(kept, row), factor[0]
        lower = row_vectors(low, row, self.low_bits)
        vectors = kept.shape[1] // 8
        for i in cutlass.range(cute.arch.thread_idx()[0], vectors, 32 * WARPS, unroll=2):
            halves = cute.make_rmem_tensor((4,), Int32)
            bytes_ = cute.make_rmem_tensor((self.low_bits,), Uint8)
            cute.autovec_copy(upper_half[None, i], cute.recast_tensor(halves, kept.element_type))
            cute.autovec_copy(lower[None, i], bytes_)
            sums = join_eight(halves, bytes_, self.low_bits)
            rounded = cute.make_rmem_tensor((8,), kept.element_type)
            rounded.store((sums.load() * scale).to(kept.element_type))
            cute.autovec_copy(rounded, upper_half[None, i])
