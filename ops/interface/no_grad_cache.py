"""Calls without gradients that look like one before, for which nothing is found out again.

To check the inputs and to find the kernels that serve them takes the host half as long as the rest
of such a call.  All of it depends on how the inputs look, not on their numbers.
"""

from typing import Any

import torch
from torch import Tensor

from cutefce.ops.primitives.cute import CutePrimitives, has_aligned_rows
from cutefce.ops.primitives.dispatch import primitives_for, problem_of

MAX_ENTRIES = 1024
"""CallKey that are remembered."""

CallKey = tuple[Any, ...]

_entries: dict[CallKey | None, CutePrimitives] = {}


def call_key(h: Tensor, w: Tensor, y: Tensor, *options: Any) -> CallKey | None:
    """Return what a call on the current GPU depends on, None for one on another device."""
    if not is_on_current_gpu(h):
        return None
    aligned = (h.data_ptr() | w.data_ptr()) % 16 == 0
    sizes = h.shape, w.shape, y.shape, h.stride(), w.stride(), y.stride()
    kinds = h.dtype, w.dtype, y.dtype, h.get_device(), w.get_device(), y.get_device()
    return aligned, *sizes, *kinds, *options


def is_on_current_gpu(x: Tensor) -> bool:
    """Whether streams and launches go to the device of x without asking for it."""
    return x.is_cuda and x.get_device() == torch.cuda.current_device()


def cached_primitives(key: CallKey | None) -> CutePrimitives | None:
    """Return what served a call of these key, and takes its tensors as they are."""
    return _entries.get(key)


def store(key: CallKey | None, h: Tensor, w: Tensor, y: Tensor) -> None:
    """Remember what served h (N, D), w and y (N,), if it took them as they are."""
    if key is None:
        return
    if not has_aligned_rows(h) or y.dtype != torch.int64 or not y.is_contiguous():
        return
    primitives = primitives_for(h, w, problem_of(h, w, False, False))
    if isinstance(primitives, CutePrimitives):
        if len(_entries) == MAX_ENTRIES:
            clear()
        _entries[key] = primitives


def clear() -> None:
    """Find out everything again."""
    _entries.clear()
