"""Options that the losses of all integrations have in common: one setting of the process.

    from cutefce.integrations.options import set_options

    set_options(workspace="min")  # before or after an integration is enabled

`cutefce.defer`, Automodel's loss and Axolotl's configuration have options of these names instead.
"""

from typing import Any

from cutefce.ops.interface.arguments import check_arguments, refuse

DEFAULTS: dict[str, Any] = {"gradient": "exact", "samples": 256, "workspace": None}
_chosen: dict[str, Any] = {}


def set_options(**options: Any) -> None:
    """Choose options of the calls of enabled integrations, from now on.

    Those that a call does not name stay as they are.

    Args:
        **options: `gradient`, "exact" or "sampled"; `samples`, an integer; `workspace`, bytes,
            "min", "max" or None: as of `linear_cross_entropy`.  Gradients of divergences and of
            soft targets are exact.

    Raises:
        TypeError, ValueError: naming the argument.
    """
    _chosen.update(checked_options(**DEFAULTS | _chosen | options))


def checked_options(
    gradient: str, samples: int, workspace: int | str | None, **removed: Any
) -> dict[str, Any]:
    """Return the arguments of `linear_cross_entropy` with these names.

    Raises:
        TypeError, ValueError: naming the argument.
    """
    refuse(removed, DEFAULTS)
    options = {"gradient": gradient, "samples": samples, "workspace": workspace}
    check_arguments(options)
    return options


def loss_options() -> dict[str, Any]:
    """Return the choice as arguments of `linear_cross_entropy` or `linear_log_probs`."""
    return dict(_chosen)


def workspace_options() -> dict[str, Any]:
    """Return the choice as arguments of calls that have no gradients to sample."""
    return {name: x for name, x in _chosen.items() if name == "workspace"}
