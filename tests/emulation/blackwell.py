"""Instructions of Blackwell: tcgen05, and its tensor memory."""

import functools
from typing import Any

import numpy as np

from tests.emulation.core import Block, Warp
from tests.emulation.instructions import floats_of, halves_of, handles
from tests.emulation.launch import run
from tests.emulation.memory import OFFSET, SHARED, places

__all__ = ["run"]

K_MAJOR = 1 << 16 | (1024 >> 4) << 32 | 1 << 46 | 2 << 61
"""A matrix descriptor without its address: swizzled rows of 128 bytes in groups of 8."""

FLOAT32 = 1 << 4
"""The type of accumulators, in an instruction descriptor."""


@handles("tcgen05.fence", "tcgen05.wait", "tcgen05.relinquish")
def nothing(warp: Warp, mask: Any, line: str, operands: list[str]) -> None:
    """Do nothing: memory operations complete in order here."""


@handles("tcgen05.alloc", "tcgen05.dealloc")
def allocate(warp: Warp, mask: Any, line: str, operands: list[str]) -> None:
    assert mask.all(), "a whole warp allocates"
    columns = warp.one(operands[1], mask)
    if "dealloc" in line:
        assert columns == warp.block.columns
        warp.block.columns = 0
        warp.grid.columns -= columns
        return
    at = ((warp.one(operands[0], mask) & OFFSET) - SHARED) // 4
    warp.block.words(4, at)[at] = 0
    warp.block.columns = columns
    warp.grid.columns += columns


@handles("tcgen05.mma")
def issue(warp: Warp, mask: Any, line: str, operands: list[str]) -> None:
    assert mask.sum() == 1, "one lane issues products"
    pair, block = 2 if "cta_group::2" in line else 1, warp.block
    values = tuple(warp.one(o, mask) & (1 << 64) - 1 for o in (*operands[:4], operands[-1]))
    block.queue().append(lambda: multiply(block, pair, values))


def multiply(block: Block, pair: int, operands: tuple[int, ...]) -> None:
    """Execute one MMA."""
    target, a, b, kind, adds = operands
    assert kind & 0x7F == FLOAT32 and kind >> 10 & 7 == kind >> 7 & 7, "operands have one type"
    rows, columns = (kind >> 24 & 0x1F) << 4, (kind >> 17 & 0x3F) << 3
    number = floats_of if kind >> 7 & 7 == 1 else halves_of
    members = block.cluster.blocks[block.rank : block.rank + pair]
    w = np.concatenate([number(matrix(m, b, columns // pair)) for m in members])
    column = target & 0xFFFF
    assert column + columns <= block.columns, "tensor memory is allocated"
    for member in members:
        x = number(matrix(member, a, rows // pair))
        product = np.einsum("ik,jk->ij", x, w)  # BLAS would start threads
        place = member.tensor[:, column : column + columns]
        place[:] = product + (place if adds else 0)


def matrix(block: Block, descriptor: int, rows: int) -> Any:
    """Return the (rows, 16) matrix of a descriptor, as 16-bit patterns."""
    assert descriptor & -1 << 14 == K_MAJOR
    at = places((descriptor & 0x3FFF) << 4, rows, 16)
    return block.words(2, at)[at]


@handles("tcgen05.commit")
def commit(warp: Warp, mask: Any, line: str, operands: list[str]) -> None:
    assert mask.sum() == 1, "one lane commits"
    place = warp.one(operands[0], mask) & OFFSET
    bits = warp.one(operands[1], mask) if "multicast" in line else 1 << warp.block.rank
    cluster = warp.block.cluster
    reached = [block for block in cluster.blocks if bits >> block.rank & 1]

    def take_off() -> None:
        signals = (block.barrier(place | block.rank << 24).signal for block in reached)
        cluster.grid.flights += [functools.partial(signal, 1) for signal in signals]

    warp.block.queue().append(take_off)


@handles("tcgen05.ld")
def read(warp: Warp, mask: Any, line: str, operands: list[str]) -> None:
    assert mask.all(), "a whole warp reads"
    place = warp.one(operands[-1], mask)
    lane, column = place >> 16, place & 0xFFFF
    assert lane == 32 * (warp.number % 4), "a warp reads its own lanes"
    assert column + 64 <= warp.block.columns, "tensor memory is allocated"
    values = warp.block.tensor[lane : lane + 32, column : column + 64].view(np.int32)
    for i, register in enumerate(operands[:-1]):
        warp.put(register, values[:, i].copy(), mask)
