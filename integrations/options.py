"""Options that the losses of all integrations have in common: one setting of the process.

    from cutefce.integrations.options import set_options

    set_options(workspace="min")  # before or after an integration is enabled

`cutefce.defer`, Automodel's loss and Axolotl's configuration have options of these names instead.
"""

from typing import Any

from cutefce.ops.interface.arguments import check_arguments, refuse

_chosen: dict[str, Any] = {}


def set_options(
    *,
    gradient: str = "exact",
    samples: int = 256,
    workspace: int | str | None = None,
    **removed: Any,
) -> None:
    """Choose options of the calls of enabled integrations, from now on.

    Each call chooses all of them: those that it leaves out are at their defaults.

    Args:
        gradient: "exact" or "sampled", as of `linear_cross_entropy`; those of divergences and of
            soft targets are exact.
        samples: expected number of entries of a token, at most, with sampled gradients.
        workspace: peak memory in bytes, "min", "max" or None, as of `linear_cross_entropy`.
        **removed: arguments of earlier versions, which are refused.

    Raises:
        TypeError, ValueError: naming the argument.
    """
    _chosen.update(checked_options(gradient, samples, workspace, **removed))


def checked_options(
    gradient: str, samples: int, workspace: int | str | None, **removed: Any
) -> dict[str, Any]:
    """Return the arguments of `linear_cross_entropy` with these names.

    Raises:
        TypeError, ValueError: naming the argument.
    """
    refuse(removed)
    options = {"gradient": gradient, "samples": samples, "workspace": workspace}
    check_arguments(options)
    return options


def loss_options() -> dict[str, Any]:
    """Return the choice as arguments of `linear_cross_entropy` or `linear_log_probs`."""
    return dict(_chosen)


def workspace_options() -> dict[str, Any]:
    """Return the choice as arguments of calls that have no gradients to sample."""
    return {name: x for name, x in _chosen.items() if name == "workspace"}
