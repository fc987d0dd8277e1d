"""How the losses of all integrations compute gradients: one setting of the process.

    from cutefce.integrations.gradients import set_gradients

    set_gradients("sampled", samples=256)  # before or after an integration is enabled

`cutefce.defer`, Automodel's loss and Axolotl's configuration have options of these names instead.
"""

from typing import Any

import torch
from torch import Tensor

from cutefce.ops.interface.checks import check_type
from cutefce.ops.interface.option_checks import check_accum_dtype, check_sampling
from cutefce.ops.operators.context import autocast_dtype

_chosen: dict[str, Any] = {}


def set_gradients(
    gradient: str = "exact", *, samples: int = 256, accum_dtype: torch.dtype | None = None
) -> None:
    """Choose how the calls of enabled integrations compute their gradients, from now on.

    Args:
        gradient: "exact" or "sampled", as of `linear_cross_entropy`.
        samples: expected number of entries of a token, at most, with sampled gradients.
        accum_dtype: torch.bfloat16 lets reduced losses keep sums of dW in bfloat16, where hidden
            states and weight are bfloat16, and has no effect elsewhere; None keeps more bits.

    Raises:
        TypeError, ValueError: for another `gradient` or `accum_dtype`, or `samples` out of their
            range.
    """
    check_type("accum_dtype", accum_dtype)
    _chosen.update(gradient_options(gradient, samples, accum_dtype))


def gradient_options(
    gradient: str, samples: int, accum_dtype: torch.dtype | str | None
) -> dict[str, Any]:
    """Return the arguments of `linear_cross_entropy` with these names.

    Args:
        gradient: as of `set_gradients`.
        samples: the same.
        accum_dtype: the same, or "bfloat16", as in a file.

    Raises:
        TypeError, ValueError: as `set_gradients`.
    """
    dtype: Any = torch.bfloat16 if accum_dtype == "bfloat16" else accum_dtype
    options = {"gradient": gradient, "samples": samples, "accum_dtype": dtype}
    for name, value in options.items():
        check_type(name, value)
    check_sampling(gradient, samples)
    check_accum_dtype(dtype)
    return options


def loss_options(input: Tensor, linear_weight: Tensor) -> dict[str, Any]:
    """Return the choice as arguments of a `linear_cross_entropy` of these that is reduced."""
    return fitting(_chosen, input, linear_weight)


def fitting(options: dict[str, Any], input: Tensor, linear_weight: Tensor) -> dict[str, Any]:
    """Return `options` without an `accum_dtype` that these operands of the call do not have."""
    dtype = options.get("accum_dtype")
    if all(autocast_dtype(x) == dtype for x in (input, linear_weight)):
        return dict(options)
    return {name: value for name, value in options.items() if name != "accum_dtype"}


def row_options() -> dict[str, Any]:
    """Return it as arguments of `linear_log_probs`, or of a loss for each token."""
    return {name: x for name, x in _chosen.items() if name != "accum_dtype"}
