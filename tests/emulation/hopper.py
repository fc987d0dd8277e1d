"""Instructions of Hopper: wgmma and stmatrix."""

from typing import Any

import numpy as np

from tests.emulation.core import LANES, Block, Pause, Warp
from tests.emulation.instructions import floats_of, halves_of, handles, own_offsets
from tests.emulation.launch import run
from tests.emulation.memory import SHARED, swizzled

__all__ = ["run"]

UNKNOWN = 0x7FFFFFFF
"""NaN, in accumulators until their MMA is complete."""


class Product:
    """One MMA of a warpgroup, which its four warps issue."""

    def __init__(self, block: Block, number: Any, columns: int, operands: tuple[int, ...]) -> None:
        self.block, self.number, self.columns, self.operands = block, number, columns, operands
        self.accumulators: dict[int, tuple[list[Any] | None, Any]] = {}
        """Initial and resulting accumulators of each warp; None is 0."""

    def matrix(self, descriptor: int, rows: int, is_transposed: int) -> Any:
        """Return the (rows, 16) matrix of a descriptor."""
        swizzle = 4 - (descriptor >> 62 & 3)
        assert swizzle < 4, "lines are swizzled"
        line = 16 << swizzle
        begin, leading, stride = ((descriptor >> i & 0x3FFF) << 4 for i in (0, 16, 32))
        row, column = np.arange(rows)[:, None], np.arange(16)
        if is_transposed:  # lines are along the outer dimension
            block, place = divmod(2 * row, line)
            place = place + leading * block + line * (column % 8) + stride * (column // 8)
        else:
            place = 2 * column + line * (row % 8) + stride * (row // 8)
        at = (swizzled(begin + place, swizzle) - SHARED) // 2
        return self.number(self.block.words(2, at)[at])

    def happen(self) -> None:
        """Multiply and set the accumulators."""
        a, b, transposed_a, transposed_b = self.operands
        x, y = self.matrix(a, 64, transposed_a), self.matrix(b, self.columns, transposed_b)
        product = np.einsum("ik,jk->ij", x, y)  # BLAS would start threads
        for warp, (initial, result) in self.accumulators.items():
            # (half, row, column / 8, pair, v) to (column / 8, half, v, row, pair)
            rows = product[16 * warp : 16 * warp + 16].reshape(2, 8, -1, 4, 2)
            values = rows.transpose(2, 0, 4, 1, 3).reshape(-1, LANES)
            if initial is not None:
                values = values + np.stack(initial).view(np.float32)
            result[:] = values.view(np.int32)


@handles("wgmma.mma_async")
def multiply(warp: Warp, mask: Any, line: str, operands: list[str]) -> None:
    """Issue an MMA; its accumulators have no value before it is complete."""
    assert mask.all(), "whole warps multiply"
    *registers, a, b, adds, scale_a, scale_b, transposed_a, transposed_b = operands
    assert (scale_a, scale_b) == ("1", "1"), "nothing is negated"
    values = tuple(warp.one(each, mask) & (1 << 64) - 1 for each in (a, b))
    values = *values, int(transposed_a), int(transposed_b)
    group, rank = divmod(warp.number, 4)
    key = group, warp.issued
    product = warp.block.products.get(key)
    if product is None:
        number = floats_of if line.split(" ")[0].endswith("bf16") else halves_of
        product = Product(warp.block, number, 2 * len(registers), values)
        warp.block.products[key] = product
    assert product.operands == values, "warps issue the same MMA"
    initial = [warp.value(register) for register in registers] if warp.one(adds, mask) else None
    result = np.full((len(registers), LANES), UNKNOWN, np.int32)
    for register, values_of_lanes in zip(registers, result, strict=True):
        warp.registers[register] = values_of_lanes
    product.accumulators[rank] = initial, result
    warp.issued += 1
    if len(product.accumulators) == 4:

        def happen() -> None:
            product.happen()
            del warp.block.products[key]

        warp.block.queue(group).append(happen)


@handles("wgmma.fence", "setmaxnreg")
def nothing(warp: Warp, mask: Any, line: str, operands: list[str]) -> None:
    """Do nothing: registers are in order and enough here."""


@handles("wgmma.commit_group")
def commit(warp: Warp, mask: Any, line: str, operands: list[str]) -> None:
    warp.committed.append(warp.issued)


@handles("wgmma.wait_group")
def wait(warp: Warp, mask: Any, line: str, operands: list[str]) -> Pause | None:
    pending = int(operands[0])
    if len(warp.committed) <= pending:
        return None
    last = warp.committed[-1 - pending]
    group = warp.number // 4
    incomplete = (number for of, number in warp.block.products if of == group)
    return Pause.WAIT if min(incomplete, default=last) < last else None


@handles("stmatrix.sync.aligned.m8n8")
def store_matrices(warp: Warp, mask: Any, line: str, operands: list[str]) -> None:
    assert mask.all(), "a whole warp stores"
    place, *registers = operands
    offsets = own_offsets(warp, warp.value(place))
    assert not (offsets & 15).any(), "addresses are aligned"
    for i, register in enumerate(registers):
        pairs = warp.value(register).astype(np.uint32).view(np.uint16).reshape(8, 8)
        matrix = pairs.T if ".trans" in line else pairs
        at = offsets[8 * i : 8 * i + 8, None] // 2 + np.arange(8)
        warp.block.words(2, at)[at] = matrix
