"""The windows of a step, as host functions read them from a table in host memory."""

from typing import Any

import cutlass.cute as cute
from cutlass import Int32, Int64, Uint8

from cutefce.cute_kernels.workspace import LOW_ALIGNMENT, ExpsMemory, Window, low_bytes


def window_table(address: Int64, windows: Int32, fields: int) -> cute.Tensor:
    """Return the table (`windows`, `fields`) of int64 at an address of host memory."""
    pointer = cute.make_ptr(Int64, address, cute.AddressSpace.generic)
    return cute.make_tensor(pointer, cute.make_layout((windows, fields), stride=(fields, 1)))


def exps_of(
    table: cute.Tensor, window: Int32, memories: dict[ExpsMemory, cute.Pointer]
) -> tuple[cute.Tensor, Int32]:
    """Return the exponentials (M, K) in the memory of a window, and its first column.

    `memories` are those that windows of the table may be in; that has M rows of K columns.
    """
    any_memory = next(iter(memories.values()))
    address = Int64(0)
    for memory, pointer in memories.items():
        address += Int64(table[window, Window.MEMORY] == memory) * pointer.toint()
    dtype = any_memory.dtype
    address += table[window, Window.OFFSET] * (dtype.width // 8)
    pointer = cute.make_ptr(dtype, address, cute.AddressSpace.gmem, assumed_align=16)
    pitch = cute.assume(table[window, Window.PITCH], divby=8)
    rows = Int32(table[window, Window.ROWS])
    layout = cute.make_layout((rows, Int32(pitch)), stride=(pitch, 1))
    return cute.make_tensor(pointer, layout), Int32(table[window, Window.FIRST])


def low_of(memory: cute.Pointer, rows: Int32, hidden: Int32, low_bits: int) -> cute.Tensor:
    """Return the low bits of (`rows`, `hidden`) kept sums in memory that starts at 16 bytes."""
    address = memory.toint()
    pointer = cute.make_ptr(Uint8, address, cute.AddressSpace.gmem, assumed_align=LOW_ALIGNMENT)
    pitch = cute.assume(Int64(low_bytes(hidden, low_bits)), divby=LOW_ALIGNMENT)
    layout = cute.make_layout((rows, hidden * low_bits // 8), stride=(pitch, 1))
    return cute.make_tensor(pointer, layout)


def columns_of(x: cute.Tensor, columns: Int32) -> cute.Tensor:
    """Return the first `columns` of x (M, N)."""
    return cute.make_tensor(x.iterator, cute.make_layout((x.shape[0], columns), stride=x.stride))


def rows_of(x: cute.Tensor, first: Int32, rows: Int32) -> cute.Tensor:
    """Return `rows` rows of x (M, N), from `first` on."""
    part = cute.domain_offset((first, 0), x)
    return cute.make_tensor(part.iterator, cute.make_layout((rows, x.shape[1]), stride=x.stride))


def vector_part(x: cute.Tensor, first: Int32, size: Int32) -> cute.Tensor:
    """Return `size` elements of the vector x, from `first` on."""
    return cute.make_tensor(x.iterator + first, cute.make_layout((size,)))


def either(first: cute.Tensor, second: cute.Tensor, is_second: Int32) -> cute.Tensor:
    """Return one of two tensors of the same layout, whose memory starts at 16 bytes or a vector."""
    address = first.iterator.toint()
    address += Int64(is_second) * (second.iterator.toint() - address)
    align = first.iterator.alignment
    pointer = cute.make_ptr(
        first.element_type, address, cute.AddressSpace.gmem, assumed_align=align
    )
    return cute.make_tensor(pointer, first.layout)


def transpose(x: cute.Tensor) -> Any:
    """Return the transpose of x (M, N)."""
    return cute.make_tensor(x.iterator, cute.select(x.layout, mode=[1, 0]))
