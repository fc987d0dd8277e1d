"""What the kernels share of the DSL: dtypes, arguments to compile for, arithmetic."""

import math
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_tensor

from cutefce.cute_kernels.common.exp2 import emulated_exp2

DTYPES = {
    "bfloat16": cutlass.BFloat16,
    "float16": cutlass.Float16,
    "float32": cutlass.Float32,
}

EARLY = {"use_pdl": True}
"""What a launch asks for to begin while the kernel before ends."""

LOG2_E = math.log2(math.e)
LN_2 = math.log(2)


def await_previous() -> None:
    """Wait for the kernel before - what is older is done - and let the next one begin.

    Every kernel that is launched early (`EARLY`) calls this before it reads or writes memory.
    """
    cute.arch.griddepcontrol_wait()
    cute.arch.griddepcontrol_launch_dependents()


def matrix(dtype: Any, rows: Any, columns: Any, aligned: bool = True) -> Any:
    """Return a stand-in for a matrix of any pitch, whose rows begin at 16 bytes if `aligned`."""
    if not aligned:
        return make_fake_tensor(dtype, (rows, columns), (cute.sym_int64(), 1))
    pitch = cute.sym_int64(divisibility=8)
    return make_fake_tensor(dtype, (rows, columns), (pitch, 1), assumed_align=16)


def transposed(dtype: Any, rows: Any, columns: Any) -> Any:
    """Return a stand-in for the transpose of a `matrix` of `columns` rows."""
    strides = 1, cute.sym_int64(divisibility=8)
    return make_fake_tensor(dtype, (rows, columns), strides, assumed_align=16)


def vector(dtype: Any, size: Any) -> Any:
    """Return a stand-in for a contiguous vector."""
    return make_fake_compact_tensor(dtype, (size,))


def number(dtype: Any) -> Any:
    """Return a stand-in for a tensor () of one number."""
    return make_fake_compact_tensor(dtype, ())


def exp2(x: Any, emulated: bool = False) -> Any:
    """Return 2**x to 2 units of the last place: by the hardware's approximation, or `emulated`."""
    return emulated_exp2(x, _clamp, _power) if emulated else cute.math.exp2(x, fastmath=True)


def _clamp(x: Any, low: float, high: float) -> Any:
    """Return x within [low, high]; NaN stays."""
    return cute.arch.fmin(cute.arch.fmax(x, low, nan=True), high, nan=True)


def _power(x: Any) -> Any:
    """Return the float of x's bits, moved by 23."""
    return (x.bitcast(cutlass.Int32) << 23).bitcast(cutlass.Float32)
