"""A kernel in Triton for what is done to rows between GEMMs, and to the rows of their results.

This module imports Triton, which comes with torch on Linux.  In the shapes R is rows, D hidden.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from cutefce.cute_kernels.integers import ceil_div
from cutefce.ops.primitives.triton_kernels import pitch_of
from cutefce.ops.rows.coefficients import RankOne
from cutefce.ops.rows.packed_sums import Sums

COLUMNS = 1024
"""Columns of a row that a thread block computes."""


@triton.jit
def join_pieces(upper, lower, LOW_BITS: tl.constexpr):
    """Return float32 sums of their larger pieces, int16, and their low bits."""
    bits = lower.to(tl.int32) << (16 - LOW_BITS)
    return ((upper.to(tl.int32) << 16) | bits).to(tl.float32, bitcast=True)


@triton.jit
def split_pieces(sums, LOW_BITS: tl.constexpr):
    """Return the larger pieces of float32 sums, int16, and their low bits; rounds to nearest."""
    DROPPED: tl.constexpr = 16 - LOW_BITS
    bits = sums.to(tl.int32, bitcast=True)
    bits += ((bits >> DROPPED) & 1) + ((1 << (DROPPED - 1)) - 1)
    bits = tl.where(sums != sums, 0x7FC00000, bits)
    return (bits >> 16).to(tl.int16), (bits >> DROPPED) & ((1 << LOW_BITS) - 1)


@triton.jit
def _combine(
    out,
    out_pitch,
    packed,
    packed_pitch,
    low,
    low_pitch,
    x,
    x_pitch,
    scale,
    scale_step,
    table,
    table_pitch,
    index,
    coefficient,
    factor,
    row,
    last,
    columns,
    COLUMNS: tl.constexpr,
    LOW_BITS: tl.constexpr,
    JOINS: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Compute some columns of a row of `combine`; what is not given is None.

    More than eight parameters: operands, pitches and constants of a kernel.
    """
    r, start = tl.program_id(0).to(tl.int64), tl.program_id(1) * COLUMNS
    c = start + tl.arange(0, COLUMNS)
    exists = c < columns
    sums = tl.zeros((COLUMNS,), tl.float32)
    if x is not None:
        sums += tl.load(x + r * x_pitch + c, mask=exists, other=0.0).to(tl.float32)
    if JOINS:
        upper = tl.load(packed + r * packed_pitch + c, mask=exists, other=0)
        byte = c if LOW_BITS == 8 else c // 2
        lower = tl.load(low + r * low_pitch + byte, mask=exists, other=0)
        if LOW_BITS == 4:
            lower = (lower >> (4 * (c & 1)).to(tl.uint8)) & 15
        sums += join_pieces(upper, lower, LOW_BITS)
    is_zero = True
    if scale is not None:
        a = tl.load(scale + r * scale_step)
        sums *= a
        is_zero = a == 0
    if table is not None:
        b, entry = tl.load(coefficient + r), tl.load(index + r)
        values = tl.load(table + entry * table_pitch + c, mask=exists, other=0.0)
        sums += b * values.to(tl.float32)
        is_zero = is_zero & (b == 0)
    if factor is not None:
        g = tl.load(factor + r)
        sums += g * tl.load(row + c, mask=exists, other=0.0)
        is_zero = is_zero & (g == 0)
    if last is not None:
        sums *= tl.load(last)
    if coefficient is not None:
        sums = tl.where(is_zero, 0.0, sums)
    if SPLITS:
        upper, lower = split_pieces(sums, LOW_BITS)
        tl.store(packed + r * packed_pitch + c, upper, mask=exists)
        if LOW_BITS == 8:
            tl.store(low + r * low_pitch + c, lower.to(tl.uint8), mask=exists)
        else:
            even, odd = tl.split(tl.reshape(lower, (COLUMNS // 2, 2)))
            own = start // 2 + tl.arange(0, COLUMNS // 2)
            pair = (even | (odd << 4)).to(tl.uint8)
            tl.store(low + r * low_pitch + own, pair, mask=own < columns // 2)
    else:
        tl.store(out + r * out_pitch + c, sums.to(out.dtype.element_ty), mask=exists)


def combine(
    out: Sums,
    x: Tensor | None = None,
    *,
    joined: Sums | None = None,
    scale: Tensor | None = None,
    table: Tensor | None = None,
    index: Tensor | None = None,
    coefficient: Tensor | None = None,
    rank_one: RankOne | None = None,
    last: Tensor | None = None,
) -> None:
    """Do what `PortableGradients.combine` does, with sums in float32, and b beside a table.

    More than eight parameters: the parts of a sum, of which most calls have few.
    """
    to = out.upper
    rows, columns = to.shape
    packed, low = out if joined is None or out.low is not None else joined
    words = None if low is None else packed.view(torch.int16)
    if not rows:
        return
    arguments: Any = (
        to,
        to.stride(0),
        words,
        pitch_of(words),
        low,
        pitch_of(low),
        x,
        pitch_of(x),
        scale,
        pitch_of(scale),
        table,
        pitch_of(table),
        index,
        coefficient,
        None if rank_one is None else rank_one.factor,
        None if rank_one is None else rank_one.row,
        last,
        columns,
    )
    _combine[(rows, ceil_div(columns, COLUMNS))](
        *arguments,
        COLUMNS=COLUMNS,
        LOW_BITS=8 if low is None or low.shape[1] == columns else 4,
        JOINS=joined is not None,
        SPLITS=out.low is not None,
        enable_fp_fusion=True,
    )
