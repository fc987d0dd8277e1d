"""How the losses of all integrations compute gradients: one setting of the process.

    from cutefce.integrations.gradients import set_gradients

    set_gradients("sampled", samples=256)  # before or after an integration is enabled

`cutefce.defer`, Automodel's loss and Axolotl's configuration have options of these names instead.
"""

from typing import Any

from cutefce.ops.interface.options import check_arguments, refuse

_chosen: dict[str, Any] = {}


def set_gradients(gradient: str = "exact", *, samples: int = 256, **removed: Any) -> None:
    """Choose how the calls of enabled integrations compute their gradients, from now on.

    Args:
        gradient: "exact" or "sampled", as of `linear_cross_entropy`.
        samples: expected number of entries of a token, at most, with sampled gradients.
        **removed: arguments of earlier versions, which are refused.

    Raises:
        TypeError, ValueError: for another `gradient`, or `samples` out of their range.
    """
    _chosen.update(gradient_options(gradient, samples, **removed))


def gradient_options(gradient: str, samples: int, **removed: Any) -> dict[str, Any]:
    """Return the arguments of `linear_cross_entropy` with these names.

    Args:
        gradient: as of `set_gradients`.
        samples: the same.
        **removed: the same.

    Raises:
        TypeError, ValueError: as `set_gradients`.
    """
    options = {"gradient": gradient, "samples": samples}
    refuse(removed)
    check_arguments(options)
    return options


def loss_options() -> dict[str, Any]:
    """Return the choice as arguments of `linear_cross_entropy` or `linear_log_probs`."""
    return dict(_chosen)
