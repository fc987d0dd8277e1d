"""Elementwise torch functions as single GPU kernels, where Triton is installed."""

from collections.abc import Callable

from torch import Tensor

from cutefce.cute_kernels.process_cache import process_cache, warn_once
from cutefce.ops import torch_compat


def can_fuse(x: Tensor) -> bool:
    """Whether functions of the rows of x run fused: on a GPU with Triton, for two rows or more."""
    return x.is_cuda and x.shape[0] > 1 and _has_triton()


@process_cache
def fused(function: Callable[..., None]) -> Callable[..., None]:
    """Return `function`, which writes to its arguments, as one kernel for any number of rows."""
    return torch_compat.compile_pointwise(function)


@process_cache
def _has_triton() -> bool:
    if not torch_compat.has_triton():
        warn_once("no Triton; the portable path runs unfused on the GPU")
        return False
    return True
