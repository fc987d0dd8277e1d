"""Blocks of rows, for steps that would allocate too much for all rows at once."""

from collections.abc import Iterator

from torch import Tensor

from cutefce.ops.dtypes import sum_dtype


def row_block_bytes(device: str) -> int:
    """Return the bytes of rows, in the dtype of sums, that an unfused step takes at a time."""
    return (1 if device == "cpu" else 128) << 20


def blocks(count: int, size: int) -> Iterator[slice]:
    """Cut range(count) into slices of `size`, the last one shorter."""
    return (slice(start, min(start + size, count)) for start in range(0, count, size))


def row_blocks(x: Tensor) -> Iterator[slice]:
    """Cut the rows of `x` into blocks of `row_block_bytes`."""
    return blocks(x.shape[0], row_block_size(x))


def row_block_size(x: Tensor) -> int:
    """Return how many rows of `x` are in a block."""
    row_bytes = x.shape[1] * sum_dtype(x.dtype).itemsize
    return max(1, row_block_bytes(x.device.type) // row_bytes)
