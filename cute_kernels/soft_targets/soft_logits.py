"""Logits h_i · w_v of the soft targets v of each token.

`project_exp` computes them in warps that would be idle, where these have registers for it, and no
launch of this kernel's is needed.
"""

from typing import Any

import cutlass.cute as cute
from cutlass import Int32, Int64

from cutefce.cute_kernels import spec
from cutefce.cute_kernels.common.dsl import (
    DTYPES,
    USE_PDL,
    current_stream,
    matrix,
    pdl_wait,
    vector,
)
from cutefce.cute_kernels.common.row_vectors import WARPS
from cutefce.cute_kernels.common.soft_classes import SoftClasses, classes_argument, write_logits


def compile_signature(kernel: spec.SoftLogitsSpec) -> tuple[Any, tuple[Any, ...]]:
    """Return the host function of `kernel` and the arguments to compile it for."""
    dtype, hidden = DTYPES[kernel.dtype], cute.sym_int(divisibility=8)
    h, w = (matrix(dtype, cute.sym_int(), hidden) for _ in range(2))
    rows = cute.sym_int()
    order = vector(Int64, rows), Int32(0)
    return soft_logits, (h, w, classes_argument(rows), *order, current_stream())


@cute.jit
def soft_logits(
    h: cute.Tensor,
    w: cute.Tensor,
    classes: SoftClasses,
    order: cute.Tensor,
    selects: Int32,
    stream: Any,
) -> None:
    """Write the logits of `classes`.

    If `selects`, the hidden states of token i are row `order`_i of h.
    """
    soft_logits_kernel(h, w, classes, order, selects).launch(
        grid=[classes.logits.shape[0], 1, 1], block=[32 * WARPS, 1, 1], stream=stream, **USE_PDL
    )


@cute.kernel
def soft_logits_kernel(
    h: cute.Tensor, w: cute.Tensor, classes: SoftClasses, order: cute.Tensor, selects: Int32
) -> None:
    """Compute the logits of a token a block, some classes a warp."""
    pdl_wait()
    row = cute.arch.block_idx()[0]
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    source = Int64(row)
    if selects != 0:
        source = order[row]
    write_logits((h, source), (w, Int32(0)), classes, row, (warp, WARPS))
