"""Dtypes: the names that kernels' specs have for them, and those in which values are summed."""

import torch


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of `dtype` in a spec or a problem, such as "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which values of `dtype` are summed: float32, or float64 for float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32
