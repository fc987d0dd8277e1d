"""Kernels in Triton: the largest of each row, and those of the blocks that each token chooses.

This module imports Triton.  In the shapes N is tokens, D hidden, V classes, M the blocks of a
token, and k the largest logits of a block that are returned.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from cutefce.cute_kernels.integers import ceil_div
from cutefce.ops.primitives.triton_kernels import (
    STAGES,
    Transform,
    device_of,
    load_tile,
    softcapped,
)

ROWS, WARPS = 128, 8
"""Tokens of a tile: on Hopper each warp has all classes of 16 of them, and finds the largest alone.
"""


@triton.jit
def _largest_of_rows(x, pitch, values, places, columns, K: tl.constexpr, COLUMNS: tl.constexpr):
    """Find the K largest of one row of x (N, columns), which COLUMNS is no less than."""
    LEAST: tl.constexpr = -3.4e38
    row, c = tl.program_id(0).to(tl.int64), tl.arange(0, COLUMNS)
    own = tl.load(x + row * pitch + c, mask=c < columns, other=0.0)
    # each is found once: what was found, or is beyond the row, counts less than -inf of the row
    own = tl.where(own == own, tl.maximum(own, LEAST), float("inf"))
    own = tl.where(c < columns, own, float("-inf"))
    for place in tl.range(K):
        _, at = tl.max(own, 0, return_indices=True)
        tl.store(values + row * K + place, tl.load(x + row * pitch + at))
        tl.store(places + row * K + place, at.to(tl.int64))
        own = tl.where(c == at, float("-inf"), own)


def largest_of_rows(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the k largest of each row of x (N, M) float32, the largest first, and their columns.

    Both are (N, k), and k is at most M.  Of equal ones the first are found; NaN is the largest.
    """
    (rows, columns), x = x.shape, x.contiguous()
    values = x.new_empty(rows, k)
    places = torch.empty_like(values, dtype=torch.int64)
    width = triton.next_power_of_2(columns)
    _largest_of_rows[(rows,)](x, x.stride(0), values, places, columns, K=k, COLUMNS=width)
    return values, places


@triton.jit
def _top_of_blocks(
    h,
    h_pitch,
    w,
    w_pitch,
    pairs,
    starts,
    last_tiles,
    values,
    found,
    row_scale,
    bias,
    slope,
    floor,
    target,
    hidden,
    classes,
    K: tl.constexpr,
    CHOSEN: tl.constexpr,
    BLOCKS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    FEATURES: tl.constexpr,
    HAS_TMA: tl.constexpr,
):
    """Compute a tile (ROWS, BLOCK): one block of classes, and some of the pairs that chose it.

    A pair is a token times CHOSEN plus a place among its blocks.  Those of a block begin at its one
    of `starts` (BLOCKS + 1,) among `pairs`, and its tiles end at its one of `last_tiles` (BLOCKS,).
    `values` and `found` (pairs, K) receive the largest logits and their classes.  `w` is a
    descriptor with HAS_TMA.  More than eight parameters: operands, sizes and constants of a kernel.
    """
    tile = tl.program_id(0)
    if tile < tl.load(last_tiles + BLOCKS - 1):
        block, end = 0, BLOCKS  # the first block whose tiles end behind this one is among these
        while block < end:
            middle = (block + end) // 2
            ends_before = tl.load(last_tiles + middle) <= tile
            block = tl.where(ends_before, middle + 1, block)
            end = tl.where(ends_before, end, middle)
        first, own = block * BLOCK, tl.arange(0, BLOCK)
        before = tl.load(last_tiles + block - 1, mask=block > 0, other=0)
        i = tl.load(starts + block) + (tile - before) * ROWS + tl.arange(0, ROWS)
        exists = i < tl.load(starts + block + 1)
        pair = tl.load(pairs + i, mask=exists, other=0)
        rows, pitch = pair // CHOSEN, tl.multiple_of(h_pitch, 8)
        z = tl.zeros((ROWS, BLOCK), tl.float32)
        for step in tl.range(tl.cdiv(hidden, FEATURES)):
            begin = step * FEATURES
            c = begin + tl.arange(0, FEATURES)
            inside = exists[:, None] & (c < tl.multiple_of(hidden, 8))[None, :]
            a = tl.load(h + rows[:, None] * pitch + c[None, :], mask=inside, other=0.0)
            b = load_tile(w, w_pitch, first, begin, classes, hidden, BLOCK, FEATURES, HAS_TMA)
            z = tl.dot(a, b.T, z)
        inside = first + own < classes
        if bias is not None:
            z += tl.load(bias + first + own, mask=inside, other=0.0)[None, :]
        if slope is not None:
            z = softcapped(z, slope)
        if row_scale is not None:
            z *= tl.load(row_scale + rows, mask=exists, other=1.0)[:, None]
        y = tl.load(target + rows, mask=exists, other=-1) - first
        z = tl.where(inside[None, :] & (own[None, :] != y[:, None]), z, float("-inf"))
        if floor is not None:
            lowest = tl.load(floor + rows, mask=exists, other=float("-inf"))
            z = tl.where(z < lowest[:, None], float("-inf"), z)
        for place in tl.range(K):
            most, at = tl.max(z, 1, return_indices=True)
            tl.store(values + pair * K + place, most, mask=exists)
            tl.store(found + pair * K + place, first + at, mask=exists)
            z = tl.where(own[None, :] == at[:, None], float("-inf"), z)


def top_of_blocks(
    h: Tensor, w: Tensor, chosen: Tensor, block: int, k: int, target: Tensor, transform: Transform
) -> tuple[Tensor, Tensor]:
    """Return the largest logits, float32, of blocks of w (V, D) and their classes, (N, M, k) both.

    They leave out the `target` (N,).  `chosen` (N, M) int64 are the blocks of each token of
    h (N, D), of `block` classes, a power of 2 that k is no larger than.  Of fewer classes than k,
    and of a block beyond w, logits of -inf follow.  `transform` is that of
    `triton_kernels.project`, of all classes.
    """
    (classes, hidden), count = w.shape, ceil_div(len(w), block)
    values = h.new_full((*chosen.shape, k), -torch.inf, dtype=torch.float32)
    found = torch.zeros_like(values, dtype=torch.int64)
    # pairs of one block after the other, cut into tiles: a GPU alone knows how many there are
    ordered, pairs = chosen.flatten().int().sort()
    numbers = torch.arange(count + 1, dtype=ordered.dtype, device=h.device)
    starts = torch.searchsorted(ordered, numbers)
    last_tiles = starts.diff().add_(ROWS - 1).floor_divide_(ROWS).cumsum(0)
    device = device_of(h.device)
    row_scale, bias, slope, *floors = transform
    arguments: Any = (
        h,
        h.stride(0),
        device.operand(w, [block, device.features]),
        w.stride(0),
        pairs,
        starts,
        last_tiles,
        values,
        found,
        row_scale,
        bias,
        slope,
        floors[0] if floors else None,
        target,
        hidden,
        classes,
    )
    _top_of_blocks[(ceil_div(chosen.numel(), ROWS) + count,)](
        *arguments,
        K=k,
        CHOSEN=chosen.shape[1],
        BLOCKS=count,
        ROWS=ROWS,
        BLOCK=block,
        FEATURES=device.features,
        HAS_TMA=device.has_tma,
        num_stages=STAGES,
        num_warps=WARPS,
        enable_fp_fusion=True,
    )
    return values, found
