"""Numbers among the arguments, as tensors."""

import ctypes
from typing import Any

import torch
from torch import Tensor

from cutefce.ops.dtypes import sum_dtype
from cutefce.ops.interface.arguments import ARGUMENTS

SMALLEST = 2.0**-149
"""The smallest float32 above 0."""


def with_tensors(given: dict[str, Any], h: Tensor) -> dict[str, Any]:
    """Return options by name, those that may be numbers as tensors; h (..., D) is the input."""
    return {
        name: as_tensor(name, x, h) if ARGUMENTS[name].type.schema == "Tensor?" else x
        for name, x in given.items()
    }


def as_tensor(name: str, value: Tensor | float, h: Tensor) -> Tensor:
    """Return the argument `name` as a tensor, a number's on h's device in the dtype of h's sums.

    Some devices have no float64, so that a number is rounded before it gets there.

    Raises:
        ValueError: for a number that is no float.
    """
    if isinstance(value, Tensor):
        return value
    dtype = sum_dtype(h.dtype)
    if name == "denominator" and 0 < value < SMALLEST and dtype != torch.float64:
        value = SMALLEST  # 0 stands for no token; the reciprocals of both are infinite
    if torch.compiler.is_compiling():  # a constant would be compiled for each value
        return torch.ones((), dtype=dtype, device=h.device) * value
    try:
        number = float(value)
    except OverflowError:
        raise ValueError(
            f"{name}: got an integer beyond the range of a float, expected a finite number"
        ) from None
    if dtype != torch.float64:
        number = ctypes.c_float(number).value  # infinite beyond its range, where torch raises
    return torch.full((), number, dtype=dtype, device=h.device)
