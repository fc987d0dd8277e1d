"""Fast path of repeated plain calls on a GPU: reuse what was resolved for the same metadata.

Checking the inputs, planning and resolving kernels takes much of a call's CPU time, and depends
only on metadata.  Only calls whose tensors the kernels take without a copy are cached.
"""

from typing import Any

import torch
from torch import Tensor

from cutefce.cute_kernels import process_cache
from cutefce.ops import torch_compat
from cutefce.ops.interface.options import LossOptions, StepOptions
from cutefce.ops.operators.context import PLAIN_TYPES, can_bypass_dispatcher, is_autocasting
from cutefce.ops.operators.plain_step import PlainStep, resolve
from cutefce.ops.primitives.cute_projection import CuteProjection
from cutefce.ops.primitives.dispatch import primitives_for, problem_of
from cutefce.ops.primitives.interface import AnyPrimitives
from cutefce.ops.primitives.row_selection import has_aligned_rows

MAX_ENTRIES = 1024
"""Entries of the cache; it is cleared when it is full."""
BUDGETS = int, str, type(None)
"""Types of a `workspace` that may be right; others have no place in a key."""

CallKey = tuple[Any, ...]

_entries: dict[CallKey | None, AnyPrimitives | PlainStep] = {}


def call_key(
    h: Tensor,
    w: Tensor,
    y: Tensor,
    workspace: int | str | None,
    options: LossOptions,
    step: tuple[Any, ...],
) -> CallKey | None:
    """Return what the checks and the kernels of a plain call depend on, None if not cacheable.

    `step` says which gradients are computed, and which copies of h and w the call makes.
    """
    if not is_on_current_gpu(h) or type(workspace) not in BUDGETS:
        return None
    try:
        aligned = h.data_ptr() % 16 == 0, w.data_ptr() % 16 == 0
        y.data_ptr()  # raises if a transform has left it behind
        sizes = h.shape, w.shape, y.shape, h.stride(), w.stride(), y.stride()
    except RuntimeError:  # nested tensors, and those that a transform has left behind
        return None
    kinds = h.dtype, w.dtype, y.dtype, h.get_device(), w.get_device(), y.get_device()
    return *aligned, workspace, step, *sizes, *kinds, *options.key()


def is_on_current_gpu(x: Tensor) -> bool:
    """Whether streams and launches go to the device of x without switching devices."""
    return x.is_cuda and x.get_device() == torch.cuda.current_device()


def is_eager(h: Tensor, w: Tensor, y: Tensor) -> bool:
    """Whether these are plain tensors, and nothing watches or casts what is done to them.

    That is no mode, tracer, transform or autocast region.
    """
    for x in (h, w, y):
        if type(x) not in PLAIN_TYPES:
            return False
    watched = torch_compat.has_function_mode() or is_autocasting(h.device.type)
    return not watched and can_bypass_dispatcher(h, w, y)


def cached(key: CallKey | None) -> Any:
    """Return what `store` has kept for a call with this key, None if nothing yet."""
    return _entries.get(key)


def store(
    key: CallKey | None,
    h: Tensor,
    w: Tensor,
    y: Tensor,
    options: LossOptions,
    step: StepOptions | None = None,
) -> None:
    """Keep what served h (N, D), w and y (N,), if the kernels took these uncopied.

    These are the primitives of a call without gradients, or those of a training `step`.
    """
    if key is None or not has_aligned_rows(h) or y.dtype != torch.int64 or not y.is_contiguous():
        return
    entry: AnyPrimitives | PlainStep | None
    if step is not None:
        entry = resolve(h, w, step, options)
    else:
        primitives = primitives_for(h, w, problem_of(h, w, False, False))
        entry = primitives if isinstance(primitives.projection, CuteProjection) else None
    if entry is not None:
        if len(_entries) == MAX_ENTRIES:
            clear()
        _entries[key] = entry


def clear() -> None:
    """Remove all entries."""
    _entries.clear()


process_cache.on_reset(clear)
