"""Numbers among the arguments, as tensors."""

from typing import Any

import torch
from torch import Tensor

from cutefce.ops.interface import checks, option_checks
from cutefce.ops.parallel.dtensor import replicated


def with_tensors(given: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Return options by name, those that may be numbers as tensors."""
    result = dict(given)
    for name in ("denominator", "grad_output"):
        if name in given:
            result[name] = as_tensor(name, given[name], device)
    temperature: Any = given.get("temperature")
    if "temperature" in given and not isinstance(temperature, Tensor):
        result["temperature"] = as_tensor("temperature", temperature, device)
    return result


def as_tensor(name: str, value: Tensor | float, device: torch.device) -> Tensor:
    """Return the argument `name` as a tensor, a number's on `device`.

    Raises:
        TypeError, ValueError: for another type, or a number out of the argument's range.
    """
    checks.check_type(name, value)
    if isinstance(value, Tensor):
        return replicated(name, value)
    option_checks.check_range(name, value)
    if torch.compiler.is_compiling():  # a constant would be compiled for each value
        return torch.ones((), dtype=torch.float64, device=device) * value
    try:
        return torch.full((), float(value), dtype=torch.float64, device=device)
    except OverflowError:
        raise ValueError(f"{name}: got an integer beyond the range of a float") from None
