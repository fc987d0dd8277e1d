"""Interface of `project_exp` on every architecture, and its row arithmetic.

    sums (N, P)   log2 Σ exp(z_iv - ρ_i) over the columns of one partial, without the target
    exps (N, K)   exp(z_iv - ρ_i), 0 at the target, in the inputs' dtype; the first K columns;
                  with softcap times the derivative of tanh

with the logits z of `logit_transform`.

Sums are relative to the running maximum until they are written (online softmax, the paper's
Algorithm 1), so that they are exact for any logits; exps are relative to ρ and may overflow.

Shapes: h (N, D), w (V, D), reference ρ (N,) float32, target (N,) int64 counted from `first`,
semaphores int32 as in `workspace.Semaphore`, transform as in `logit_transform.Transform`, whose
bias (V,) belongs to the rows of w.  N, V and D are dynamic; rows of h, w and exps start
at multiples of 16 bytes.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from cutefce.cute_kernels import spec
from cutefce.cute_kernels.common.dsl import (
    DTYPES,
    LOG2_E,
    clamp,
    current_stream,
    exp2,
    matrix,
    vector,
)
from cutefce.cute_kernels.common.logit_transform import transform_argument


class Rows(NamedTuple):
    """Row vectors and outputs that the epilogue needs."""

    reference: cute.Tensor
    target: cute.Tensor
    sums: Any
    semaphores: cute.Tensor
    transform: Any
    first: Int32
    """Vocabulary entry of the first column: targets are counted from it."""


def project_exp_arguments(kernel: spec.ProjectExpSpec) -> tuple[Any, ...]:
    """Return the arguments to compile a `project_exp` kernel for."""
    dtype = DTYPES[kernel.dtype]
    tokens, vocab, hidden = cute.sym_int(), cute.sym_int(), cute.sym_int(divisibility=8)
    columns, partials = cute.sym_int(divisibility=8), cute.sym_int()
    return (
        matrix(dtype, tokens, hidden),
        matrix(dtype, vocab, hidden),
        vector(Float32, tokens),
        vector(Int64, tokens),
        matrix(Float32, tokens, partials, aligned=False) if kernel.sums else None,
        matrix(dtype, tokens, columns) if kernel.store else None,
        vector(Int32, cute.sym_int()),
        transform_argument(kernel.transform, tokens, vocab),
        None,
        Int32(0),
        Int32(1),
        Int32(1),
        current_stream(),
    )


@cute.jit
def accumulate(z: cute.Tensor, row_max: Float32, row_sum: Float32, poly_per_16: int = 0) -> Any:
    """Add logits z of one row to its accumulators: (max of z·log2 e, Σ exp2(z·log2 e - max)).

    Further accumulators of `spec.RowReductions` belong here.
    """
    z_max = z[0]
    for i in cutlass.range_constexpr(cute.size(z)):
        z_max = cute.arch.fmax(z_max, z[i])
    new_max = cute.arch.fmax(row_max, z_max * LOG2_E)
    base = finite(new_max)
    even = row_sum * exp2(row_max - base)
    odd = Float32(0.0)
    for i in cutlass.range_constexpr(0, cute.size(z), 2):
        even += exp2(z[i] * LOG2_E - base, uses_poly_exp2(i, poly_per_16))
        odd += exp2(z[i + 1] * LOG2_E - base, uses_poly_exp2(i + 1, poly_per_16))
    return new_max, even + odd


@cute.jit
def bounded_sum(row_sum: Float32) -> Float32:
    """Return a sum of exponentials relative to their maximum: 1 to 2³¹, the most columns.

    Beyond about 2²⁴, the rounding of z·log2 e alone may have made it 0 or inf.  NaN stays NaN.
    """
    return clamp(row_sum, 0.5, 2.0**31)


def uses_poly_exp2(column: int, poly_per_16: int) -> bool:
    """Return whether a column is one of `poly_per_16` in every 16, evenly spread."""
    return column % 16 * poly_per_16 % 16 < poly_per_16


@cute.jit
def finite(x: Float32) -> Float32:
    """Return x, or 0 for -inf: the maximum of an empty row, where x - x would be NaN."""
    y = x
    if x == -Float32.inf:
        y = Float32(0.0)
    return y
