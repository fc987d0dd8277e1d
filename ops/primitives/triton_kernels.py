"""Kernels in Triton: exponentials of logits and their row sums, for GPUs without kernels in CuTe.

This module imports Triton, which comes with torch on Linux.  In the shapes N is tokens, D hidden,
K the columns of a window, P the blocks of columns of which each has a reference of its own.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from cutefce.cute_kernels.integers import ceil_div
from cutefce.cute_kernels.problem import SLACK
from cutefce.cute_kernels.process_cache import process_cache
from cutefce.ops.rows.partial_sums import PartialSums
from cutefce.ops.rows.selection import ROW_BLOCK, CountedRows

Transform = tuple[Any, ...]
"""What makes logits of products: see `LogitMap.columns`."""

ROWS, BLOCK = ROW_BLOCK, 128
"""Tokens and columns of a tile; a tile's columns share a reference."""
GROUP = 8
"""Row blocks that are computed together, so that their hidden states stay in the L2 cache."""
STAGES, WARPS = 3, 4
BLOCKS_PER_SM = 2
"""Thread blocks of `project` that share a multiprocessor: one multiplies while the other computes
exponentials.  Wider tiles would leave no shared memory for a second one."""
HOPPER_SHARED_BYTES, HOPPER_FEATURES = 200 << 10, 64
"""Shared memory of a thread block above which a stage has so many features: that of data-centre
GPUs since Hopper."""
TMA_CAPABILITY = 9
"""The major compute capability from which on GPUs copy tiles by descriptors."""
RESCALED_ROWS, RESCALED_BLOCKS = 8, 64
"""Rows and blocks whose references a thread block compares at a time."""


@triton.jit
def place_of(tile, row_tiles, column_tiles, GROUP: tl.constexpr):
    """Return the row and the column of a tile: GROUP rows of tiles go through all columns together.

    The cache then holds the operands that thread blocks of one time have in common.
    """
    group = tile // (GROUP * column_tiles)
    size = tl.minimum(row_tiles - group * GROUP, GROUP)
    within = tile % (GROUP * column_tiles)
    return group * GROUP + within % size, within // size


@triton.jit
def load_tile(
    x,
    pitch,
    row,
    column,
    rows,
    columns,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    IS_DESCRIPTOR: tl.constexpr,
):
    """Return a tile (ROWS, COLUMNS) of x (rows, columns), and 0 outside of it.

    x is a descriptor, or an address whose `pitch` and `columns` are multiples of 8: loads are of 16
    bytes then, which are on their way while others are multiplied.  More than eight parameters: a
    matrix, a place, and sizes.
    """
    if IS_DESCRIPTOR:
        tile = x.load([row, column])
    else:
        pitch, columns = tl.multiple_of(pitch, 8), tl.multiple_of(columns, 8)
        r, c = row + tl.arange(0, ROWS), column + tl.arange(0, COLUMNS)
        inside = (r < rows)[:, None] & (c < columns)[None, :]
        places = x + r.to(tl.int64)[:, None] * pitch + c[None, :]
        tile = tl.load(places, mask=inside, other=0.0)
    return tile


@triton.jit
def halves_of(x, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return both halves of the columns of x (ROWS, COLUMNS)."""
    return tl.split(tl.permute(tl.reshape(x, (ROWS, 2, COLUMNS // 2)), (0, 2, 1)))


@triton.jit
def softcapped(z, slope):
    """Return tanh(z slope)."""
    return 1 - 2 / (tl.exp2(z * slope * 2.8853900817779268) + 1)


@triton.jit
def _project(
    h,
    h_pitch,
    w,
    w_pitch,
    exps_tiles,
    exps,
    exps_pitch,
    reference,
    target,
    sums,
    references,
    sums_pitch,
    of_all,
    of_all_plane,
    largest,
    of_others,
    of_others_plane,
    row_scale,
    bias,
    slope,
    floor,
    count,
    skipped,
    tokens,
    hidden,
    first,
    last,
    SLACK: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    FEATURES: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCKS: tl.constexpr,
    HAS_TMA: tl.constexpr,
    IS_WHOLE: tl.constexpr,
):
    """Compute tiles (ROWS, BLOCK) of exponentials of the columns [first, last), one after another.

    `exps_tiles` (N, K) is a descriptor, as `h` (N, D) and `w` (V, D) are with HAS_TMA; the other
    tensors are those of `project`, None where there are none.  A thread block computes every
    BLOCKS-th tile, and loads the next one's operands under the epilogue of this one.  More than
    eight parameters: operands, sizes and constants of a kernel.
    """
    row_tiles, column_tiles = tl.cdiv(tokens, ROWS), tl.cdiv(last - first, BLOCK)
    if count is not None:
        row_tiles = tl.minimum(row_tiles, tl.cdiv(tl.maximum(tl.load(count) - skipped, 1), ROWS))
    steps = tl.cdiv(hidden, FEATURES)
    for tile in tl.range(tl.program_id(0), row_tiles * column_tiles, BLOCKS, flatten=True):
        row, column = place_of(tile, row_tiles, column_tiles, GROUP)
        z = tl.zeros((ROWS, BLOCK), tl.float32)
        for step in tl.range(steps):
            k = step * FEATURES
            a = load_tile(h, h_pitch, row * ROWS, k, tokens, hidden, ROWS, FEATURES, HAS_TMA)
            top = first + column * BLOCK
            b = load_tile(w, w_pitch, top, k, last, hidden, BLOCK, FEATURES, HAS_TMA)
            z = tl.dot(a, b.T, z)
        rows, own = row * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK)
        exists = rows < tokens
        classes = first + column * BLOCK + own
        if bias is not None:
            z += tl.load(bias + column * BLOCK + own, mask=classes < last, other=0.0)[None, :]
        if slope is not None:
            z = softcapped(z, slope)
            derivative = 1 - z * z
        if row_scale is not None:
            z *= tl.load(row_scale + rows, mask=exists, other=1.0)[:, None]
        if not IS_WHOLE:
            z = tl.where((classes < last)[None, :], z, float("-inf"))
        y = tl.load(target + rows, mask=exists, other=-1) - (first + column * BLOCK)
        y = tl.where((y < 0) | (y >= BLOCK), -1, y).to(tl.int32)
        if floor is not None:
            lowest = tl.load(floor + rows, mask=exists, other=float("-inf"))
            is_out = (z < lowest[:, None]) & (own[None, :] != y[:, None])
            z = tl.where(is_out, float("-inf"), z)
        place = rows.to(tl.int64) * sums_pitch + column
        if of_all is not None:
            most, at = tl.max(z, 1, return_indices=True)
            base = tl.where(most == float("-inf"), 0.0, most)
            d = tl.where(own[None, :] == at[:, None], float("-inf"), z - base[:, None])
            x, to = tl.exp(d), of_all + place
            tl.store(to, most, mask=exists)
            to += of_all_plane  # a multiple of it may not fit 32 bits
            tl.store(to, tl.sum(x, 1), mask=exists)
            to += of_all_plane
            tl.store(to, tl.sum(tl.maximum(d, -1e30) * x, 1), mask=exists)
            to += of_all_plane
            tl.store(to, tl.sum(x * x, 1), mask=exists)
        # the target's logit, rounded as by a GEMM, must not become the reference of the others
        z = tl.where(own[None, :] == y[:, None], float("-inf"), z)
        r = tl.load(reference + rows, mask=exists, other=0.0)
        if of_others is not None:
            highest, at = tl.max(z, 1, return_indices=True)
            to = of_others + place
            at = (first + column * BLOCK + at).to(tl.float32)
            tl.store(to, at, mask=exists)
            to += of_others_plane
            tl.store(to, tl.sum(tl.where(z > r[:, None], 1.0, 0.0), 1), mask=exists)
        elif sums is not None:
            highest = tl.max(z, 1)
        if largest is not None:
            tl.store(largest + place, highest, mask=exists)
        if sums is not None:
            r = tl.where(highest - r > SLACK, highest, r)
            tl.store(references + place, r, mask=exists)
        r = tl.where(r == float("-inf"), 0.0, r)  # -inf - -inf is NaN
        # the difference is exact where they are close, however large they are
        e = tl.exp2((z - r[:, None]) * 1.4426950408889634)
        if sums is not None:
            tl.store(sums + place, tl.sum(e, 1), mask=exists)
        if exps is not None:
            if slope is not None:
                e *= derivative
            if exps_tiles is not None:
                parts, left = halves_of(e, ROWS, BLOCK), column * BLOCK
                for part in tl.static_range(2):
                    exps_tiles.store([row * ROWS, left], parts[part].to(exps_tiles.dtype))
                    left += BLOCK // 2
            else:
                to = (
                    exps + rows.to(tl.int64)[:, None] * exps_pitch + (column * BLOCK + own)[None, :]
                )
                written = exists[:, None] & (classes < last)[None, :]
                tl.store(to, e.to(exps.dtype.element_ty), mask=written)


def project(
    h: Tensor,
    w: Tensor,
    window: tuple[int, int],
    reference: Tensor,
    target: Tensor,
    exps: Tensor | None,
    out: PartialSums | None = None,
    transform: Transform = (None, None, None),
    counted: CountedRows | None = None,
) -> None:
    """Compute e = exp(u - ρ) of the logits u of h (N, D) @ w (V, D)ᵀ, 0 at the `target` (N,).

    They are those of the columns of `window`, [first, last).  `exps` (N, K), if given, receives e,
    times du/dt if logits are bounded.  `out`, if given, receives the row sums and what else it has.
    e is relative to `reference` (N,); with `out`, a block of `BLOCK` columns whose largest logit is
    more than `SLACK` above it takes that logit instead, and tells so in `out.references`.  Results
    of row blocks that have no `counted` row are not written, but for those of the first block.
    More than eight parameters: operands, results and what makes logits of products.
    """
    tokens, hidden = h.shape
    device = device_of(h.device)
    blocks, features = BLOCKS_PER_SM * device.blocks, device.features
    first, last = window
    columns = last - first
    tiles = ceil_div(tokens, ROWS) * ceil_div(columns, BLOCK)
    # a tile of exponentials beside the next one's operands takes more memory than other GPUs share
    stores_tiles = exps is not None and features == HOPPER_FEATURES and is_aligned(exps)
    row_scale, bias, slope, *floors = transform
    sums, references, of_all, largest, of_others = out or (None,) * 5
    arguments: Any = (
        device.operand(h, [ROWS, features]),
        h.stride(0),
        device.operand(w, [BLOCK, features]),
        w.stride(0),
        TensorDescriptor.from_tensor(exps, [ROWS, BLOCK // 2]) if stores_tiles else None,
        exps,
        pitch_of(exps),
        reference,
        target,
        sums,
        references,
        pitch_of(sums),
        of_all,
        pitch_of(of_all),
        largest,
        of_others,
        pitch_of(of_others),
        row_scale,
        bias,
        slope,
        floors[0] if floors else None,
        *numbers_of(counted),
        tokens,
        hidden,
        first,
        last,
    )
    _project[(min(blocks, tiles),)](
        *arguments,
        SLACK=SLACK,
        ROWS=ROWS,
        BLOCK=BLOCK,
        FEATURES=features,
        GROUP=GROUP,
        BLOCKS=blocks,
        HAS_TMA=device.has_tma,
        IS_WHOLE=columns % BLOCK == 0,
        num_stages=STAGES,
        num_warps=WARPS,
        enable_fp_fusion=True,
    )


@triton.jit
def _rescale(
    exps,
    pitch,
    references,
    references_pitch,
    reference,
    count,
    skipped,
    tokens,
    columns,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Make ROWS rows of `exps` relative to `reference` (N,), where they are not yet: few blocks.

    More than eight parameters: operands, sizes and constants of a kernel.
    """
    rows, blocks = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.cdiv(columns, BLOCK)
    if count is not None:
        tokens = tl.minimum(tokens, tl.load(count) - skipped)
    exists, r = rows < tokens, rows.to(tl.int64)
    new = tl.load(reference + rows, mask=exists, other=0.0)
    for first in range(0, blocks, BLOCKS):
        own = first + tl.arange(0, BLOCKS)
        exist = exists[:, None] & (own < blocks)[None, :]
        places = references + r[:, None] * references_pitch + own[None, :]
        olds = tl.load(places, mask=exist, other=0.0)
        differs = exist & (olds != new[:, None])
        if tl.max(tl.max(differs.to(tl.int32), 1), 0) > 0:
            for block in range(first, tl.minimum(first + BLOCKS, blocks)):
                old = tl.load(references + r * references_pitch + block, mask=exists, other=0.0)
                if tl.max((exists & (old != new)).to(tl.int32), 0) > 0:
                    factor = tl.where(old == new, 1.0, tl.exp(old - new))
                    c = block * BLOCK + tl.arange(0, BLOCK)
                    inside = exists[:, None] & (c < columns)[None, :]
                    to = exps + r[:, None] * pitch + c[None, :]
                    e = tl.load(to, mask=inside, other=0.0).to(tl.float32) * factor[:, None]
                    tl.store(to, e.to(exps.dtype.element_ty), mask=inside)


def rescale(
    exps: Tensor, references: Tensor, reference: Tensor, counted: CountedRows | None = None
) -> None:
    """Make `exps` (N, K), relative to `references` (N, P) in blocks, so to `reference` (N,).

    Those of rows that are not `counted` may stay as they are.
    """
    tokens, columns = exps.shape
    given: Any = exps, exps.stride(0), references, references.stride(0), reference
    _rescale[(ceil_div(tokens, RESCALED_ROWS),)](
        *given,
        *numbers_of(counted),
        tokens,
        columns,
        ROWS=RESCALED_ROWS,
        BLOCK=BLOCK,
        BLOCKS=RESCALED_BLOCKS,
        enable_fp_fusion=True,
    )


def pitch_of(x: Tensor | None) -> int:
    """Return how many elements the first index of x steps over; 0 without one."""
    return 0 if x is None else x.stride(0)


def numbers_of(counted: CountedRows | None) -> tuple[Tensor | None, int]:
    """Return a kernel's `count`, None if all rows count, and how many of these are `skipped`."""
    return (None, 0) if counted is None else (counted.count, counted.first)


def is_aligned(x: Tensor) -> bool:
    """Whether descriptors address x (N, K): rows begin at multiples of 16 bytes."""
    pitch, unit = x.stride()
    return unit == 1 and x.data_ptr() % 16 == 0 and pitch * x.element_size() % 16 == 0


@dataclass(frozen=True)
class Device:
    """What launches depend on."""

    blocks: int
    """Multiprocessors: thread blocks that run at a time, one on each."""
    features: int
    """Features, or tokens, of a stage."""
    has_tma: bool
    """Whether a thread loads tiles: Hopper and later; else each thread loads its part."""

    def operand(self, x: Tensor, tile: list[int]) -> Any:
        """Return what a kernel loads tiles of x (N, D) from."""
        return TensorDescriptor.from_tensor(x, tile) if self.has_tma else x


@process_cache
def device_of(device: torch.device) -> Device:
    """Return what launches on a GPU depend on."""
    properties = torch.cuda.get_device_properties(device)
    shared: int = getattr(properties, "shared_memory_per_block_optin", 0)
    has_tma = properties.major >= TMA_CAPABILITY
    return Device(properties.multi_processor_count, features_of(shared), has_tma)


def features_of(shared_bytes: int) -> int:
    """Return the features of a stage for so much shared memory of a thread block."""
    return HOPPER_FEATURES if shared_bytes > HOPPER_SHARED_BYTES else 32
