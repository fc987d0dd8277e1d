"""Elementwise torch functions as single GPU kernels, where Triton is installed."""

import functools
import warnings
from collections.abc import Callable

from torch import Tensor

from cutefce.ops import torch_compat


def can_fuse(x: Tensor) -> bool:
    """Whether functions of the rows of x run fused: on a GPU with Triton, for two rows or more."""
    return x.is_cuda and x.shape[0] > 1 and _has_triton()


@functools.cache
def fused(function: Callable[..., None]) -> Callable[..., None]:
    """Return `function`, which writes to its arguments, as one kernel for any number of rows."""
    return torch_compat.compile_pointwise(function)


@functools.cache
def _has_triton() -> bool:
    if not torch_compat.has_triton():
        warnings.warn("cutefce: no Triton; the portable path runs unfused on the GPU", stacklevel=2)
        return False
    return True
