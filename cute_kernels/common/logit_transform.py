"""The logit transform: the one place where raw logits become the model's logits.

    u_iv = κ_i (t_iv + b_v)             without softcap
    u_iv = κ_i tanh(s (t_iv + b_v))     with softcap: du/dt = κ_i s (1 - (u/κ_i)²)

Logits but the target's that are below a row's floor become -inf.  `LogitTransform` says which of
them is compiled, and which operands there are.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from cutefce.cute_kernels.common.dsl import LOG2_E, exp2, vector
from cutefce.cute_kernels.integers import ceil_div
from cutefce.cute_kernels.variant import IDENTITY, LogitTransform


class Transform(NamedTuple):
    """The launch argument of a transform that is not the identity; None for what it lacks."""

    row_scale: cute.Tensor | None
    """κ (N,) float32"""
    bias: cute.Tensor | None
    """b (V,) float32, of the same columns as w."""
    slope: Float32 | None
    """s"""


class FlooredTransform(NamedTuple):
    """The same with floors."""

    row_scale: cute.Tensor | None
    bias: cute.Tensor | None
    slope: Float32 | None
    floor: cute.Tensor
    """(N,) float32 below which logits but the target's become -inf"""


def transform_argument(options: LogitTransform, rows: Any, columns: Any) -> Any:
    """Return the argument to compile a kernel for, None for the identity."""
    if options == IDENTITY:
        return None
    assert options.row_scale or not options.softcap
    own = (
        vector(Float32, rows) if options.row_scale else None,
        vector(Float32, columns) if options.bias else None,
        Float32(1.0) if options.softcap else None,
    )
    return FlooredTransform(*own, vector(Float32, rows)) if options.floor else Transform(*own)


@cute.jit
def row_scale(operands: Any, row: Int32, rows: Int32) -> Any:
    """Return κ of a row, 1 from row `rows` on; None if it is not compiled in."""
    if cutlass.const_expr(operands is None or operands.row_scale is None):
        return None
    scale = Float32(1.0)
    if row < rows:
        scale = operands.row_scale[row]
    return scale


@cute.jit
def row_floor(operands: Any, row: Int32, rows: Int32) -> Any:
    """Return the floor of a row, -inf from row `rows` on; None if it is not compiled in."""
    if cutlass.const_expr(not hasattr(operands, "floor")):
        return None
    floor = -Float32.inf
    if row < rows:
        floor = operands.floor[row]
    return floor


@cute.jit
def load_bias(operands: Any, first: Int32, count: int) -> Any:
    """Return b of columns `first` to `first + count - 1`, column i in lane i % 32; None without b.

    Columns beyond the last have its bias.
    """
    if cutlass.const_expr(operands is None or operands.bias is None):
        return None
    biases = cute.make_rmem_tensor((ceil_div(count, 32),), Float32)
    for i in cutlass.range_constexpr(cute.size(biases)):
        column = first + 32 * i + cute.arch.lane_idx()
        biases[i] = operands.bias[cutlass.min(column, operands.bias.shape[0] - 1)]
    return biases


@cute.jit
def column_bias(biases: Any, column: int, offset: Any) -> Any:
    """Return b of the column `column + offset` of `load_bias`; a whole warp calls it.

    `column` and `column + offset` are in the same 32 columns.
    """
    if cutlass.const_expr(biases is None):
        return None
    return cute.arch.shuffle_sync(biases[column // 32], column % 32 + offset)


@cute.jit
def transform_logit(t: Float32, operands: Any, scale: Any, bias: Any) -> Float32:
    """Return the model's logit of a raw one; applied before logits are masked."""
    u = t
    if cutlass.const_expr(bias is not None):
        u += bias
    if cutlass.const_expr(operands is not None and operands.slope is not None):
        # κ tanh(x) = κ - κ · 2 / (1 + exp(2x)): exactly ±κ where exp is inf or 0
        exp = exp2(u * (operands.slope * (2 * LOG2_E)))
        u = scale - scale * cute.arch.rcp_approx(0.5 + 0.5 * exp)
    elif cutlass.const_expr(scale is not None):
        u *= scale
    return u


@cute.jit
def floored(u: Float32, floor: Any, is_target: Any) -> Float32:
    """Return a logit, or -inf below its row's floor unless it is the target's; NaN stays."""
    result = u
    if cutlass.const_expr(floor is not None):
        is_out = u < floor and not is_target
        result = Float32(cutlass.select_(is_out, -Float32.inf, u))
    return result


@cute.jit
def softcap_derivative(u: Float32, inverse_scale: Float32) -> Float32:
    """Return 1 - (u/κ)², the derivative of tanh at a capped logit; 0 at -inf and NaN."""
    tanh = u * inverse_scale
    return cute.arch.fmax(1.0 - tanh * tanh, 0.0)
