"""DSL basics shared by all kernels: dtypes, fake tensors to compile for, PDL, waits, TMA, exp2."""

import math
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.nvgpu import cpasync
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream, make_fake_tensor

DTYPES = {
    "bfloat16": cutlass.BFloat16,
    "float16": cutlass.Float16,
    "float32": cutlass.Float32,
}

USE_PDL = {"use_pdl": True}
"""Launch option: start while the previous kernel ends (programmatic dependent launch)."""

LOG2_E = math.log2(math.e)
LN_2 = math.log(2)


def pdl_wait() -> None:
    """Wait until the previous kernel's memory is visible, then let the next kernel start.

    A kernel launched with `USE_PDL` calls this before it accesses memory.
    """
    cute.arch.griddepcontrol_wait()
    cute.arch.griddepcontrol_launch_dependents()


@cute.jit
def await_count(counter: Any, count: Int32) -> None:
    """Have a warp wait until other thread blocks have increased a counter to `count`.

    What they wrote before is visible then.  They must be on the device at the same time.
    """
    if cute.arch.lane_idx() == 0:
        reached = cute.arch.load(counter, Int32, sem="acquire", scope="gpu")
        while reached < count:
            reached = cute.arch.load(counter, Int32, sem="acquire", scope="gpu")
    cute.arch.sync_warp()


def matrix(dtype: Any, rows: Any, columns: Any, aligned: bool = True) -> Any:
    """Return a fake row-major matrix of any pitch; if `aligned`, rows start at 16 bytes."""
    if not aligned:
        return make_fake_tensor(dtype, (rows, columns), (cute.sym_int64(), 1))
    pitch = cute.sym_int64(divisibility=8)
    return make_fake_tensor(dtype, (rows, columns), (pitch, 1), assumed_align=16)


def transposed(dtype: Any, rows: Any, columns: Any) -> Any:
    """Return a fake (rows, columns) transpose of a `matrix` of `columns` rows."""
    strides = 1, cute.sym_int64(divisibility=8)
    return make_fake_tensor(dtype, (rows, columns), strides, assumed_align=16)


def vector(dtype: Any, size: Any, aligned: bool = False) -> Any:
    """Return a fake contiguous vector; if `aligned`, it starts at 16 bytes."""
    return make_fake_compact_tensor(dtype, (size,), assumed_align=16 if aligned else None)


def scalar(dtype: Any) -> Any:
    """Return a fake tensor of shape ()."""
    return make_fake_compact_tensor(dtype, ())


def current_stream() -> Any:
    """Return a fake stream, for which a launch takes torch's current stream."""
    return make_fake_stream(use_tvm_ffi_env_stream=True)


@cute.jit
def partition(operand: Any, shape: Any, rank: Int32, multicast: int) -> Any:
    """Return (TMA atom, its sources by tile and K tile, its destinations by stage)."""
    atom, coordinates, smem = operand
    tiles = cute.local_tile(coordinates, shape, (None, None))
    destination, source = cpasync.tma_partition(
        atom,
        rank,
        cute.make_layout(multicast),
        cute.group_modes(smem, 0, 2),
        cute.group_modes(tiles, 0, 2),
    )
    return atom, source, destination


def exp2(x: Any) -> Any:
    """Return 2**x to 2 ulp, by the hardware's approximation."""
    return cute.math.exp2(x, fastmath=True)


def clamp(x: Any, low: float, high: float) -> Any:
    """Return x clamped to [low, high]; NaN stays NaN."""
    return cute.arch.fmin(cute.arch.fmax(x, low, nan=True), high, nan=True)
