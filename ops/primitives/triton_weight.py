"""A kernel in Triton for rows of dW: their GEMM, the terms of targets, and packed sums.

This module imports Triton, which comes with torch on Linux.  In the shapes N is tokens, D hidden,
K the rows of dW, which are the columns of a window of exponentials.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from cutefce.cute_kernels.integers import ceil_div, round_up
from cutefce.ops.primitives.block_sizes import WEIGHT_FEATURES
from cutefce.ops.primitives.triton_kernels import (
    GROUP,
    STAGES,
    device_of,
    halves_of,
    is_aligned,
    load_tile,
    numbers_of,
    pitch_of,
    place_of,
)
from cutefce.ops.primitives.triton_rows import join_pieces, split_pieces
from cutefce.ops.rows.coefficients import RankOne
from cutefce.ops.rows.packed_sums import Sums
from cutefce.ops.rows.selection import CountedRows

ROWS, BLOCK = 128, WEIGHT_FEATURES
"""Classes and features of a tile."""
WARPS = 8
PARTS = 4
"""Parts of a tile that are written one after the other."""
COLUMNS = 1024
"""Columns of a row to which a thread block adds terms of targets."""


@dataclass(frozen=True)
class Listed:
    """The terms of targets in rows of dW: c_i h_i of tokens i, in the order of their targets."""

    order: Tensor
    """(N,) int64: the tokens."""
    target: Tensor
    """(N,) int32: their targets, in order; V for tokens without a term."""
    bounds: Tensor
    """(V + 1,) int32: where each class's tokens begin."""
    coefficient: Tensor
    """(N,) float32: c, in the same order."""
    h: Tensor
    """(N, D)"""

    @staticmethod
    def of(h: Tensor, target: Tensor, coefficient: Tensor, vocab: int) -> "Listed":
        """List tokens by their `target` (N,) in [0, V); those whose coefficient is 0 at the end."""
        listed = torch.where(coefficient == 0, vocab, target).int()
        target, order = listed.sort(stable=True)  # int32 takes half the time
        classes = torch.arange(vocab + 1, dtype=torch.int32, device=target.device)
        bounds = torch.searchsorted(target, classes, out_int32=True)
        return Listed(order, target, bounds, coefficient[order], h)


@triton.jit
def _weight(
    exps,
    exps_pitch,
    states,
    states_pitch,
    out_tiles,
    out,
    out_pitch,
    low_tiles,
    low,
    low_pitch,
    bounds,
    factor,
    row,
    last,
    count,
    skipped,
    tokens,
    classes,
    hidden,
    first,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    TOKENS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCKS: tl.constexpr,
    DTYPE: tl.constexpr,
    LOW_BITS: tl.constexpr,
    ACCUMULATES: tl.constexpr,
    HAS_TMA: tl.constexpr,
    PARTS: tl.constexpr,
    HAS_TARGETS: tl.constexpr,
    BY_TOKEN: tl.constexpr,
):
    """Compute tiles (ROWS, BLOCK) of dW's rows, one after another.

    `exps` (N, K) and `states` (N, D) are descriptors with HAS_TMA, as `out_tiles` (K, D) and
    `low_tiles` are; the other tensors are those of `weight_product`, None if not given.  A thread
    block computes every BLOCKS-th tile, and loads the next one's operands under the epilogue of
    this one.
    With HAS_TARGETS, rows with terms of targets are written as pieces, which `_add_terms` finishes:
    eight low bits to the row of `low` of their number, or BY_TOKEN of that of their first token.
    16-bit results beside low bits are int16.
    More than eight parameters: operands, sizes and constants of a kernel.
    """
    row_tiles, column_tiles = tl.cdiv(classes, ROWS), tl.cdiv(hidden, BLOCK)
    if count is not None:
        tokens = tl.minimum(tokens, tl.maximum(tl.load(count) - skipped, 1))
    steps = tl.cdiv(tokens, TOKENS)
    COLUMNS: tl.constexpr = BLOCK // PARTS
    BYTES: tl.constexpr = COLUMNS * LOW_BITS // 8
    stored = tl.cdiv(classes, 8) * 8  # columns of exponentials: those of no class are not written
    for tile in tl.range(tl.program_id(0), row_tiles * column_tiles, BLOCKS, flatten=True):
        top, column = place_of(tile, row_tiles, column_tiles, GROUP)
        sums = tl.zeros((ROWS, BLOCK), tl.float32)
        for step in tl.range(steps):
            k, left = step * TOKENS, column * BLOCK
            e = load_tile(exps, exps_pitch, k, top * ROWS, tokens, stored, TOKENS, ROWS, HAS_TMA)
            x = load_tile(states, states_pitch, k, left, tokens, hidden, TOKENS, BLOCK, HAS_TMA)
            sums = tl.dot(e.T, x, sums)
        rows, own = top * ROWS + tl.arange(0, ROWS), column * BLOCK + tl.arange(0, BLOCK)
        if HAS_TARGETS:
            exists = rows < classes
            begin = tl.load(bounds + first + rows, mask=exists, other=0)
            is_listed = tl.load(bounds + first + rows + 1, mask=exists, other=0) > begin
            slots = (begin if BY_TOKEN else rows).to(tl.int64) * low_pitch
        if factor is not None:
            f = tl.load(factor + rows, mask=rows < classes, other=0.0)
            sums += f[:, None] * tl.load(row + own, mask=own < hidden, other=0.0)[None, :]
        # a part of the features after the other: registers hold few tiles
        halves, left = halves_of(sums, ROWS, BLOCK), column * BLOCK
        for half in tl.static_range(2):
            parts = halves_of(halves[half], ROWS, BLOCK // 2)
            for part in tl.static_range(2):
                z, c = parts[part], left + tl.arange(0, COLUMNS)
                exist = (rows < classes)[:, None] & (c < hidden)[None, :]
                to = out + rows.to(tl.int64)[:, None] * out_pitch + c[None, :]
                if HAS_TARGETS:
                    # pieces are cut, not rounded, and `low` has whole tiles: this is half the work
                    bits = z.to(tl.int32, bitcast=True)
                    places = low + slots[:, None] + c[None, :]
                    tl.store(places, (bits >> 8).to(tl.uint8), mask=is_listed[:, None])
                    rounded = (z * tl.load(last) if last is not None else z).to(DTYPE)
                    rounded = rounded.to(tl.int16, bitcast=True)
                    result = tl.where(is_listed[:, None], (bits >> 16).to(tl.int16), rounded)
                elif LOW_BITS == 0:
                    result = z * tl.load(last) if last is not None else z
                    if ACCUMULATES:
                        if out_tiles is not None:
                            result += out_tiles.load([top * ROWS, left])
                        else:
                            result += tl.load(to, mask=exist, other=0.0)
                    result = result.to(DTYPE)
                else:
                    # of two columns in a byte, the first has the lower bits
                    first_byte = left * LOW_BITS // 8
                    byte = first_byte + tl.arange(0, BYTES)
                    have = (rows < classes)[:, None] & (byte < hidden * LOW_BITS // 8)[None, :]
                    bytes_to = low + rows.to(tl.int64)[:, None] * low_pitch + byte[None, :]
                    if ACCUMULATES:
                        if out_tiles is not None:
                            upper = out_tiles.load([top * ROWS, left])
                            lower = low_tiles.load([top * ROWS, first_byte])
                        else:
                            upper = tl.load(to, mask=exist, other=0)
                            lower = tl.load(bytes_to, mask=have, other=0)
                        if LOW_BITS == 4:
                            lower = tl.reshape(tl.join(lower & 15, lower >> 4), (ROWS, COLUMNS))
                        z += join_pieces(upper, lower, LOW_BITS)
                    result, lower = split_pieces(z, LOW_BITS)
                    if LOW_BITS == 4:
                        even, odd = tl.split(tl.reshape(lower, (ROWS, BYTES, 2)))
                        lower = even | (odd << 4)
                    if low_tiles is not None:
                        low_tiles.store([top * ROWS, first_byte], lower.to(tl.uint8))
                    else:
                        tl.store(bytes_to, lower.to(tl.uint8), mask=have)
                if out_tiles is not None:
                    out_tiles.store([top * ROWS, left], result)
                else:
                    tl.store(to, result, mask=exist)
                left += COLUMNS


@triton.jit
def _add_terms(
    out,
    out_pitch,
    low,
    low_pitch,
    order,
    target,
    bounds,
    coefficient,
    h,
    h_pitch,
    last,
    first,
    classes,
    hidden,
    COLUMNS: tl.constexpr,
    DTYPE: tl.constexpr,
    LOW_BITS: tl.constexpr,
    PACKS: tl.constexpr,
    BY_TOKEN: tl.constexpr,
):
    """Add the terms of targets to some columns of the row of a class, where its first token is.

    The row has sums in float32, without LOW_BITS, or in pieces; it packs these (PACKS), or, of
    pieces that were cut, is multiplied by `last`, and rounded.  More than eight parameters:
    operands, pitches and constants of a kernel.
    """
    place, start = tl.program_id(0), tl.program_id(1) * COLUMNS
    row = (tl.load(target + place) - first).to(tl.int64)
    if (row < 0) | (row >= classes):
        return
    if tl.load(bounds + first + row) != place:
        return
    c = start + tl.arange(0, COLUMNS)
    exists = c < hidden
    to = out + row * out_pitch + c
    sums = tl.load(to, mask=exists, other=0)
    slot = place.to(tl.int64) if BY_TOKEN else row
    if LOW_BITS > 0:
        bytes_to = low + slot * low_pitch + c * LOW_BITS // 8
        lower = tl.load(bytes_to, mask=exists, other=0)
        if LOW_BITS == 4:
            lower = (lower >> (4 * (c & 1)).to(tl.uint8)) & 15
        sums = join_pieces(sums, lower, LOW_BITS)
        if not PACKS:  # pieces were cut: on average, half of the last bit is missing
            middle = (sums.to(tl.int32, bitcast=True) | 0x80).to(tl.float32, bitcast=True)
            sums = tl.where(tl.abs(sums) == float("inf"), sums, middle)
    for at in range(place, tl.load(bounds + first + row + 1)):
        x = tl.load(h + tl.load(order + at) * h_pitch + c, mask=exists, other=0.0)
        sums += tl.load(coefficient + at) * x.to(tl.float32)
    if last is not None:
        sums *= tl.load(last)
    if PACKS:
        upper, lower = split_pieces(sums, LOW_BITS)
        tl.store(to, upper, mask=exists)
        if LOW_BITS == 4:
            even, odd = tl.split(tl.reshape(lower, (COLUMNS // 2, 2)))
            c = start + 2 * tl.arange(0, COLUMNS // 2)
            bytes_to = low + slot * low_pitch + c // 2
            lower, exists = even | (odd << 4), c < hidden
        tl.store(bytes_to, lower.to(tl.uint8), mask=exists)
    elif LOW_BITS > 0:
        tl.store(to, sums.to(DTYPE).to(tl.int16, bitcast=True), mask=exists)
    else:
        tl.store(to, sums, mask=exists)


def weight_product(
    out: Sums,
    exps: Tensor,
    states: Tensor,
    first: int,
    listed: Listed | None,
    *,
    accumulate: bool = False,
    last: Tensor | None = None,
    rank_one: RankOne | None = None,
    counted: CountedRows | None = None,
) -> None:
    """Write (expsᵀ @ states + terms of targets + `rank_one`) last to `out` (K, D), rounded once.

    Or add it to `out`, if `accumulate`.  In 16-bit rows with terms of targets, the product has 16
    significant bits when these are added.  More than eight parameters: the parts of a sum.

    Args:
        out: (K, D) of the dtype of `exps`; or sums, float32 or packed, with a `last` of 1.
        exps: (N, K) 16-bit, 0 at targets; rows begin at multiples of 16 bytes.
        states: (N, D) as `exps`.
        first: the class of the first row of `out`.
        listed: the terms of targets; None for none.
        accumulate: whether to add to `out`, which are sums.
        last: () float32; None for 1.
        rank_one: (K, D); None for 0.
        counted: which of the first rows of `exps` count; None for all.
    """
    to, low = out
    packs = low is not None
    (tokens, classes), hidden = exps.shape, states.shape[1]
    device, is_wide = device_of(exps.device), to.dtype == torch.float32
    in_kernel, by_token = listed is not None and not (packs or is_wide), False
    low_bits = 0 if low is None else 8 * low.shape[1] // hidden
    if listed is not None and in_kernel:
        by_token, low_bits = len(listed.order) < classes, 8
        room = min(len(listed.order), classes), round_up(hidden, BLOCK)
        low = to.new_empty(room, dtype=torch.uint8)
    words = to.view(torch.int16) if low_bits else to
    tiles = device.has_tma and is_aligned(to) and (low is None or is_aligned(low))
    low_tile = [ROWS, BLOCK // PARTS * low_bits // 8]
    dtype = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
    outs: Any = words, words.stride(0)
    lows: Any = low, pitch_of(low)
    count = ceil_div(classes, ROWS) * ceil_div(hidden, BLOCK)
    _weight[(min(device.blocks, count),)](
        device.operand(exps, [device.features, ROWS]),
        exps.stride(0),
        device.operand(states, [device.features, BLOCK]),
        states.stride(0),
        TensorDescriptor.from_tensor(words, [ROWS, BLOCK // PARTS]) if tiles else None,
        *outs,
        TensorDescriptor.from_tensor(low, low_tile) if tiles and packs else None,
        *lows,
        None if listed is None else listed.bounds,
        None if rank_one is None else rank_one.factor,
        None if rank_one is None else rank_one.row,
        last,
        *numbers_of(counted),
        tokens,
        classes,
        hidden,
        first,
        ROWS=ROWS,
        BLOCK=BLOCK,
        TOKENS=device.features,
        GROUP=GROUP,
        BLOCKS=device.blocks,
        DTYPE=dtype[to.dtype],
        LOW_BITS=low_bits,
        ACCUMULATES=accumulate,
        HAS_TMA=device.has_tma,
        PARTS=PARTS,
        HAS_TARGETS=in_kernel,
        BY_TOKEN=by_token,
        num_stages=STAGES,
        num_warps=WARPS,
        enable_fp_fusion=True,
    )
    if listed is None or not len(listed.order):
        return
    _add_terms[(len(listed.order), ceil_div(hidden, COLUMNS))](
        *outs,
        *lows,
        listed.order,
        listed.target,
        listed.bounds,
        listed.coefficient,
        listed.h,
        listed.h.stride(0),
        last,
        first,
        classes,
        hidden,
        COLUMNS=COLUMNS,
        DTYPE=dtype[to.dtype],
        LOW_BITS=low_bits,
        PACKS=packs,
        BY_TOKEN=by_token,
    )
