"""Products of matrices in plain torch, which sum in the dtype of sums."""

import torch
from torch import Tensor

from cutefce.ops.primitives.block_sizes import UPCAST_BLOCK
from cutefce.ops.rows.blocks import blocks
from cutefce.ops.rows.logit_map import LogitMap


def matmul_into(out: Tensor, a: Tensor, b: Tensor, *, accumulate: bool) -> None:
    """`out = a @ b`, or `out += a @ b` if `accumulate`; sums have the dtype of `out`."""
    if a.dtype == out.dtype:
        torch.addmm(out, a, b, beta=int(accumulate), out=out)
    elif not a.is_cuda:
        _matmul_upcast(out if accumulate else out.zero_(), a, b)
    elif accumulate:
        torch.addmm(out, a, b, out_dtype=out.dtype, out=out)
    else:
        torch.mm(a, b, out_dtype=out.dtype, out=out)


def _matmul_upcast(out: Tensor, a: Tensor, b: Tensor) -> None:
    """`out += a @ b` by blocks converted to out's dtype: a CPU's 16-bit GEMM sums in 16 bits."""
    for rows in blocks(a.shape[0], UPCAST_BLOCK):
        for inner in blocks(a.shape[1], UPCAST_BLOCK):
            out[rows].addmm_(a[rows, inner].to(out.dtype), b[inner].to(out.dtype))


def logits_into(out: Tensor, h: Tensor, w: Tensor, logits: LogitMap | None) -> None:
    """Write the model's logits of h (R, D) and w (C, D), whose map is given, to `out` (R, C)."""
    matmul_into(out, h, w.t(), accumulate=False)
    if logits is not None:
        logits.apply_(out)


def dense(x: Tensor) -> Tensor:
    """Return x (M, K) in a layout that a GEMM can address, copied if necessary."""
    return x if is_dense(x) else x.contiguous()


def is_dense(x: Tensor) -> bool:
    """Whether a GEMM can address x (M, K): its rows or its columns are contiguous."""
    (rows, columns), (pitch, unit) = x.shape, x.stride()
    return (unit == 1 and pitch >= columns) or (pitch == 1 and unit >= rows)
