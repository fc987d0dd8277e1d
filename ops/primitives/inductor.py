"""Torch functions as single GPU kernels, where Triton is there to build them."""

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

SETTINGS = {"recompile_limit": 64, "error_on_nested_fx_trace": False}
"""Of torch.compile: several heads and dtypes in one process each take a kernel or two; while FX
traces real tensors, which it does not do with compiled functions, they run as they are written."""


def can_fuse(x: Tensor) -> bool:
    """Whether functions of x's rows run fused: on a GPU, and for more than one row."""
    return x.is_cuda and x.shape[0] > 1 and _has_triton()


@functools.cache
def fused(function: Callable[..., None]) -> Callable[..., None]:
    """Return `function` as one kernel, for any number of rows.

    The function writes to its arguments.  The first dimension of each tensor is compiled as a
    symbol, the others as the numbers that they are.
    """
    # a tuned kernel could sum in another order in the next process
    options: dict[str, Any] = {"triton.autotune_pointwise": False}
    compiled = torch.compile(function, dynamic=True, options=options)

    def run(*arguments: Any) -> None:
        for x in arguments:
            for dim in range(1, x.ndim) if isinstance(x, Tensor) else ():
                torch._dynamo.mark_static(x, dim)
        with torch._dynamo.config.patch(SETTINGS):
            compiled(*arguments)

    return run


@functools.cache
def _has_triton() -> bool:
    from torch.utils._triton import has_triton

    if not has_triton():
        warnings.warn("cutefce: no Triton; the portable path runs unfused on the GPU", stacklevel=2)
        return False
    return True
