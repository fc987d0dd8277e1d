"""A kernel in Triton: logits of the blocks of classes that each token chooses.

This module imports Triton.  In the shapes N is tokens, D hidden, V classes, M the blocks of a
token, and B = `BLOCK` classes of a block.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from cutefce.cute_kernels.integers import ceil_div
from cutefce.ops.primitives.triton_kernels import (
    BLOCK,
    STAGES,
    WARPS,
    Transform,
    device_of,
    load_tile,
    softcapped,
)

ROWS = 64
"""Tokens of a tile: those that choose one block are few."""


@triton.jit
def _logits_of_blocks(
    h,
    h_pitch,
    w,
    w_pitch,
    pairs,
    tile_blocks,
    tile_starts,
    ends,
    out,
    row_scale,
    bias,
    slope,
    hidden,
    classes,
    CHOSEN: tl.constexpr,
    BLOCKS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    FEATURES: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_CAP: tl.constexpr,
):
    """Compute a tile (ROWS, BLOCK): one block of classes, and some of the pairs that chose it.

    A pair is a token times CHOSEN plus a place among its blocks.  More than eight parameters:
    operands, sizes and constants of a kernel.
    """
    block = tl.load(tile_blocks + tl.program_id(0))
    if block < BLOCKS:
        first, own = block * BLOCK, tl.arange(0, BLOCK)
        i = tl.load(tile_starts + tl.program_id(0)) + tl.arange(0, ROWS)
        exists = i < tl.load(ends + block)
        pair = tl.load(pairs + i, mask=exists, other=0)
        rows, pitch = pair // CHOSEN, tl.multiple_of(h_pitch, 8)
        z = tl.zeros((ROWS, BLOCK), tl.float32)
        for step in tl.range(tl.cdiv(hidden, FEATURES)):
            k = step * FEATURES + tl.arange(0, FEATURES)
            inside = exists[:, None] & (k < tl.multiple_of(hidden, 8))[None, :]
            a = tl.load(h + rows[:, None] * pitch + k[None, :], mask=inside, other=0.0)
            k = step * FEATURES
            b = load_tile(w, w_pitch, first, k, classes, hidden, BLOCK, FEATURES, False)
            z = tl.dot(a, b.T, z)
        inside = (first + own) < classes
        if HAS_BIAS:
            z += tl.load(bias + first + own, mask=inside, other=0.0)[None, :]
        if HAS_CAP:
            z = softcapped(z, slope)
        if HAS_SCALE:
            z *= tl.load(row_scale + rows, mask=exists, other=1.0)[:, None]
        z = tl.where(inside[None, :], z, float("-inf"))
        tl.store(out + pair[:, None] * BLOCK + own[None, :], z, mask=exists[:, None])


def logits_of_blocks(h: Tensor, w: Tensor, chosen: Tensor, transform: Transform) -> Tensor:
    """Return the logits (N, M, B) in float32 of h (N, D) and blocks of w (V, D).

    `chosen` (N, M) int64 are the blocks of each token; -inf are logits beyond the last class.
    `transform` is that of `triton_kernels.project`, of all classes.
    """
    (classes, hidden), count = w.shape, ceil_div(len(w), BLOCK)
    out = h.new_empty((*chosen.shape, BLOCK), dtype=torch.float32)
    # pairs of one block after the other, cut into tiles: a GPU alone knows how many there are
    ordered, pairs = chosen.flatten().sort()
    numbers = torch.arange(count, device=h.device)
    starts = torch.searchsorted(ordered, numbers)
    ends = torch.searchsorted(ordered, numbers, right=True)
    last_tiles = ((ends - starts + ROWS - 1) // ROWS).cumsum(0)
    tiles = torch.arange(ceil_div(chosen.numel(), ROWS) + count, device=h.device)
    tile_blocks = torch.searchsorted(last_tiles, tiles, right=True)
    of_block = tile_blocks.clamp(max=count - 1)
    # the tiles of a block end with the last ones of all blocks until it
    first_tiles = last_tiles - (ends - starts + ROWS - 1) // ROWS
    tile_starts = starts[of_block] + (tiles - first_tiles[of_block]) * ROWS
    row_scale, bias, slope = transform[:3]
    arguments: Any = h, h.stride(0), w, w.stride(0), pairs, tile_blocks, tile_starts, ends, out
    _logits_of_blocks[(len(tiles),)](
        *arguments,
        out if row_scale is None else row_scale,
        out if bias is None else bias,
        slope or 0.0,
        hidden,
        classes,
        CHOSEN=chosen.shape[1],
        BLOCKS=count,
        ROWS=ROWS,
        BLOCK=BLOCK,
        FEATURES=device_of(h.device).features,
        HAS_SCALE=row_scale is not None,
        HAS_BIAS=bias is not None,
        HAS_CAP=slope is not None,
        num_stages=STAGES,
        num_warps=WARPS,
        enable_fp_fusion=True,
    )
    return out
