"""Memory of an emulated launch: tensors in global memory, tensor maps, swizzled shared memory."""

import bisect
import ctypes
import functools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from cutefce.cute_kernels.integers import round_up

SHARED = 1024
"""Start of shared memory; that of block i of a cluster is offset by i << 24."""
OFFSET = 0xFFFFFF
"""Bits of an address within a block's shared memory."""
UNSIGNED: dict[int, Any] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
"""Numpy's types by size."""
SWIZZLE_BITS = (0, 0x10, 0x30, 0x70)
"""Bits of an address that are flipped by those three higher: 128-byte rows are mode 3."""
ITEM_SIZES = {0: 1, 6: 2, 7: 4, 10: 2}
"""Bytes of an element, by a tensor map's code of its type: uint8, float16, float32, bfloat16."""
VARIABLE_BITS = 0xF << 7 | 3 << 13 | 1 << 21
"""Type, swizzle and whether the tensor is large, in a tensor map's second word."""


class GlobalMemory:
    """The tensors of a launch, at their addresses."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self.begins: list[int] = []
        self.ends: list[int] = []
        for begin, end in sorted(map(_span, tensors)):
            if self.ends and begin < self.ends[-1]:  # views of the same memory
                self.ends[-1] = max(end, self.ends[-1])
            elif begin < end:
                self.begins.append(begin)
                self.ends.append(end)
        self.bytes = [_bytes(begin, end) for begin, end in zip(self.begins, self.ends, strict=True)]

    def at(self, addresses: Any, size: int, count: int = 1) -> tuple[Any, Any]:
        """Return an array of `size`-byte numbers and the indices of `count` of them at addresses.

        These must be aligned and belong to one tensor.
        """
        first = int(addresses[0])
        number = bisect.bisect(self.begins, first) - 1
        assert number >= 0, f"no tensor is at {first:#x}"
        begin, end = self.begins[number], self.ends[number]
        assert begin <= addresses.min(), "an address is before its tensor"
        assert addresses.max() + size * count <= end, "an address is beyond its tensor"
        offsets = addresses - (begin & -16)
        assert not (addresses & size * count - 1).any(), "addresses are aligned"
        return self.bytes[number].view(UNSIGNED[size]), offsets // size

    def matrix(self, tensor_map: "TensorMap") -> Any:
        """Return the matrix of a tensor map, as patterns."""
        outer, inner = tensor_map.shape
        size = tensor_map.item_size
        last = tensor_map.address + (outer - 1) * tensor_map.pitch + (inner - 1) * size
        words, (start, _) = self.at(np.array([tensor_map.address, last]), size)
        strides = tensor_map.pitch, size
        return np.lib.stride_tricks.as_strided(words[start:], (outer, inner), strides)


@dataclass(frozen=True)
class TensorMap:
    """A tensor map of two dimensions."""

    address: int
    pitch: int
    """Bytes from row to row."""
    shape: tuple[int, int]
    """(rows, columns)"""
    box: tuple[int, int]
    item_size: int
    swizzle: int

    @classmethod
    def decode(cls, data: bytes) -> "TensorMap":
        """Return the tensor map of 128 bytes, as host functions write them."""
        words = np.frombuffer(data, np.uint32).tolist()
        assert words[2] & ~VARIABLE_BITS == 0x40012, "two dimensions, zeros outside"
        return cls(
            address=words[0] | words[1] << 32,
            pitch=(words[3] | (words[7] & 0xF) << 32) * 16,
            shape=(words[9] + 1, words[8] + 1),
            box=((words[14] & 0xFF) + 1, (words[13] >> 24) + 1),
            item_size=ITEM_SIZES[words[2] >> 7 & 0xF],
            swizzle=words[2] >> 13 & 3,
        )

    def places(self, begin: int) -> Any:
        """Return the indices of the box's elements in shared memory from `begin` on."""
        rows, columns = self.box
        return places(begin, rows, columns, self.item_size, columns * self.item_size, self.swizzle)


@functools.cache
def places(
    begin: int, rows: int, columns: int, size: int = 2, pitch: int = 128, swizzle: int = 3
) -> Any:
    """Return the indices of numbers of `size` bytes in swizzled rows, as TMA writes them."""
    address = begin + pitch * np.arange(rows)[:, None] + size * np.arange(columns)
    return (swizzled(address, swizzle) - SHARED) // size


def swizzled(address: Any, mode: int) -> Any:
    """Return where the bytes at an address are."""
    return address ^ (address >> 3 & SWIZZLE_BITS[mode])


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the addresses of a tensor's memory."""
    begin = tensor.data_ptr()
    if not tensor.numel():
        return begin, begin
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    items = 1 + sum((size - 1) * stride for size, stride in steps)
    return begin, begin + items * tensor.element_size()


def _bytes(begin: int, end: int) -> Any:
    """Return the memory between two addresses, in whole units of 16 bytes."""
    first = begin & -16
    size = round_up(end - first, 16)
    return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(first))
