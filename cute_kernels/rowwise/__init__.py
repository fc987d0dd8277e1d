"""The O(N·D) kernels: what a row needs before and after the products.

    target_logit   r_i = h_i · w_y, a warp a row; zeros for the notes of what follows
    finish         partial sums to S, T, ρ and the loss, a warp a row; the last block reduces
    combine        out_i = a_i (x_i + b_i t_{k_i}), a block a row: the last step of dX, and s ⊙ h
    add_targets    sums_v += Σ_{i: y_i = v} c_i h_i, a block a row

Each reads and writes everything once, 16 bytes a thread at a time, and adds in a fixed order.
"""

from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.runtime import make_fake_stream

from cutefce.cute_kernels import spec
from cutefce.cute_kernels.common.dsl import (
    DTYPES,
    matrix,
    number,
    vector,
)
from cutefce.cute_kernels.rowwise.add_targets import add_targets
from cutefce.cute_kernels.rowwise.reduce_partials import Finish
from cutefce.cute_kernels.rowwise.scale_add_rows import combine
from cutefce.cute_kernels.rowwise.target_logit import target_logit
from cutefce.cute_kernels.workspace import Stat


def trace(kernel: spec.KernelSpec) -> tuple[Any, tuple[Any, ...]]:
    """Return the host function of `kernel` and arguments to compile it for."""
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    rows = cute.sym_int()
    if isinstance(kernel, spec.TargetLogitSpec):
        dtype, hidden = DTYPES[kernel.dtype], cute.sym_int(divisibility=8)
        h, w = matrix(dtype, rows, hidden), matrix(dtype, cute.sym_int(), hidden)
        vectors = vector(Int64, rows), vector(Float32, rows), vector(Int32, cute.sym_int())
        return target_logit, (h, w, *vectors, Int64(0), stream)
    if isinstance(kernel, spec.ReducePartialsSpec):
        parts = matrix(Float32, rows, cute.sym_int(), aligned=False)
        stats = matrix(Float32, len(Stat), rows, aligned=False)
        logit, target = vector(Float32, rows), vector(Int64, rows)
        outputs = stats, number(Float32), vector(Int32, cute.sym_int())
        return Finish(kernel.rows), (parts, logit, target, *outputs, Int64(0), Int32(0), stream)
    if isinstance(kernel, spec.AddTargetsSpec):
        dtype, tokens, hidden = DTYPES[kernel.dtype], cute.sym_int(), cute.sym_int(divisibility=8)
        lists = vector(Int64, tokens), vector(Int32, cute.sym_int()), vector(Float32, tokens)
        sums = matrix(Float32, rows, hidden)
        return add_targets, (sums, *lists, matrix(dtype, tokens, hidden), stream)
    assert isinstance(kernel, spec.ScaleAddRowsSpec)
    hidden, table, index = cute.sym_int(divisibility=8), None, None
    x, out = (matrix(DTYPES[name], rows, hidden) for name in (kernel.x, kernel.out))
    if kernel.table is not None:
        table = matrix(DTYPES[kernel.table], cute.sym_int(), hidden)
        index = vector(Int64, rows)
    a = vector(Float32, rows) if kernel.scaled else None
    b = vector(Float32, rows) if kernel.weighted else None
    return combine, (out, x, table, a, b, index, stream)
