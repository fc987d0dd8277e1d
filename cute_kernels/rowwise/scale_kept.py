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
    rows, hidden = cute.sym_int(), cute.sym_int(divisibility=8)
    pitch = cute.sym_int64(divisibility=8)
    low = make_fake_tensor(Uint8, (rows, hidden), (pitch, 1), assumed_align=8)
    kept = matrix(DTYPES[kernel.dtype], rows, hidden)
    return scale_kept, (kept, low, vector(Float32, 1), current_stream())


@cute.jit
def scale_kept(kept: cute.Tensor, low: cute.Tensor, factor: cute.Tensor, stream: Any) -> None:
    """Write factor (1,) times the sums in kept and low (V, D) to `kept`, rounded once."""
    scale_kept_kernel(kept, low, factor).launch(
        grid=[kept.shape[0], 1, 1], block=[32 * WARPS, 1, 1], stream=stream, **USE_PDL
    )


@cute.kernel
def scale_kept_kernel(kept: cute.Tensor, low: cute.Tensor, factor: cute.Tensor) -> None:
    """Scale one row a block."""
    pdl_wait()
    row = cute.arch.block_idx()[0]
    upper_half, byte, scale = row_vectors(kept, row), row_vectors(low, row), factor[0]
    for i in cutlass.range(cute.arch.thread_idx()[0], kept.shape[1] // 8, 32 * WARPS, unroll=2):
        halves, bytes_ = cute.make_rmem_tensor((4,), Int32), cute.make_rmem_tensor((2,), Int32)
        cute.autovec_copy(upper_half[None, i], cute.recast_tensor(halves, kept.element_type))
        cute.autovec_copy(byte[None, i], cute.recast_tensor(bytes_, Uint8))
        rounded = cute.make_rmem_tensor((8,), kept.element_type)
        rounded.store((join_eight(halves, bytes_).load() * scale).to(kept.element_type))
        cute.autovec_copy(rounded, upper_half[None, i])
