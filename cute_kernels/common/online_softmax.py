"""What `project_exp` is on every architecture: its arguments, and a row's arithmetic.

    sums (N, P)   log2 Σ exp(z_iv - ρ_i) over the columns of one part, without the target's
    exps (N, K)   exp(z_iv - ρ_i), 0 at the target, in the inputs' dtype; the first K columns

Sums are relative to the running maximum until they leave (online softmax, the paper's Algorithm
1), so that they are exact for any logits; exps are relative to the given ρ and may overflow.

Shapes: h (N, D), w (V, D), reference ρ (N,) float32, target (N,) int64 counted from `first`,
notes (2 + row blocks,) int32: see `dsl`.  N, V and D are dynamic; rows of h, w and exps begin at
multiples of 16 bytes.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.runtime import make_fake_stream

from cutefce.cute_kernels import spec
from cutefce.cute_kernels.common.dsl import DTYPES, LOG2_E, exp2, matrix, vector


class Rows(NamedTuple):
    """What there is of every row."""

    reference: cute.Tensor
    target: cute.Tensor
    sums: Any
    notes: cute.Tensor
    first: Int32
    """Vocabulary entry of the first column, from which targets are counted."""


def arguments(kernel: spec.ProjectExpSpec) -> tuple[Any, ...]:
    """Return arguments to compile the host function of `kernel` for."""
    dtype = DTYPES[kernel.dtype]
    tokens, vocab, hidden = cute.sym_int(), cute.sym_int(), cute.sym_int(divisibility=8)
    columns, parts = cute.sym_int(divisibility=8), cute.sym_int()
    return (
        matrix(dtype, tokens, hidden),
        matrix(dtype, vocab, hidden),
        vector(Float32, tokens),
        vector(Int64, tokens),
        matrix(Float32, tokens, parts, aligned=False) if kernel.sums else None,
        matrix(dtype, tokens, columns) if kernel.store else None,
        vector(Int32, cute.sym_int()),
        Int32(0),
        Int32(1),
        Int32(1),
        make_fake_stream(use_tvm_ffi_env_stream=True),
    )


@cute.jit
def accumulate(z: cute.Tensor, highest: Float32, total: Float32, emulated: int = 0) -> Any:
    """Join logits z to a row: return its maximum and Σ exp2(z·log2 e - maximum)."""
    maximum = z[0]
    for i in cutlass.range_constexpr(cute.size(z)):
        maximum = cute.arch.fmax(maximum, z[i])
    after = cute.arch.fmax(highest, maximum * LOG2_E)
    base = finite(after)
    even = total * exp2(highest - base)
    odd = Float32(0.0)
    for i in cutlass.range_constexpr(0, cute.size(z), 2):
        even += exp2(z[i] * LOG2_E - base, is_emulated(i, emulated))
        odd += exp2(z[i + 1] * LOG2_E - base, is_emulated(i + 1, emulated))
    return after, even + odd


def is_emulated(column: int, emulated: int) -> bool:
    """Whether a column's exponential is one of the `emulated` of every 16, evenly spread."""
    return column % 16 * emulated % 16 < emulated


@cute.jit
def finite(x: Float32) -> Float32:
    """Return x, or 0 for -inf: the maximum of nothing, which must not be subtracted from itself."""
    y = x
    if x == -Float32.inf:
        y = Float32(0.0)
    return y
