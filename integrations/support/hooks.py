"""Replacing a function of a framework, after a check that it is the one expected."""

import inspect
import warnings
from collections.abc import Sequence
from importlib import import_module, metadata
from operator import attrgetter
from typing import Any

_MARK = "_is_from_cutefce"


def replace(
    path: str,
    replacement: Any,
    *,
    parameters: Sequence[str],
    tested: str,
    found: str | None = None,
    signature: str | None = None,
) -> Any:
    """Replace a function or class of a framework; return the one that was there.

    Args:
        path: where its users look it up, as "package.module:name" or "package.module:Class.name".
        replacement: a function or class that can be called in the same way.
        parameters: the names of the parameters that the replaced one must have, in order.
        tested: the distribution and the versions that the integration was tested with, as
            "trl 1.16.0".  Another version warns once.
        found: the version in use, of a distribution that may be a source tree.
        signature: where the function is whose parameters are compared; None is `path`.  The
            `apply` of an autograd function has those of its `forward`.

    Raises:
        ImportError: if the distribution or the module is not installed.
        RuntimeError: if it was replaced before, or does not have these parameters.
    """
    check_version(tested, found)
    owner, last, current = _find(path, tested)
    if getattr(current, _MARK, False):
        raise RuntimeError(f"{path}: the integration is enabled already")
    described = current if signature is None else _find(signature, tested)[2]
    check_parameters(signature or path, described, parameters, tested)
    setattr(replacement, _MARK, True)
    is_static = isinstance(vars(owner).get(last), staticmethod)
    setattr(owner, last, staticmethod(replacement) if is_static else replacement)
    return current


def is_replaced(path: str, tested: str) -> bool:
    """Whether `replace` has replaced what is at `path` already."""
    return getattr(_find(path, tested)[2], _MARK, False)


def _find(path: str, tested: str) -> tuple[Any, str, Any]:
    """Return the owner of what is at `path`, its name there, and itself."""
    module, _, name = path.partition(":")
    *owners, last = name.split(".")
    owner = import_module(module)
    owner = attrgetter(".".join(owners))(owner) if owners else owner
    current = getattr(owner, last, None)
    if current is None:
        raise RuntimeError(f"{path}: not found, expected that of {tested}")
    return owner, last, current


def check_parameters(path: str, function: Any, parameters: Sequence[str], tested: str) -> None:
    """Raise RuntimeError unless the parameters of `function` have these names, in order."""
    found = [*inspect.signature(function).parameters]
    if found != [*parameters]:
        raise RuntimeError(
            f"{path}: got parameters ({', '.join(found)}), expected those of {tested}, "
            f"({', '.join(parameters)})"
        )


def check_version(tested: str, found: str | None = None) -> None:
    """Warn if another version than those of `tested`, as "trl 1.16.0", is in use.

    Args:
        tested: the distribution, and the versions.
        found: the version in use; None is that of the installed distribution.

    Raises:
        ImportError: if none is installed.
    """
    distribution, *versions = tested.split()
    try:
        found = (found or metadata.version(distribution)).partition("+")[0]  # not its commit
    except metadata.PackageNotFoundError:
        raise ImportError(f"{distribution}: not installed, expected {tested}") from None
    if found not in versions:
        with_ = ", ".join(versions)
        text = f"{distribution}: got version {found}; the integration was tested with {with_}"
        warnings.warn(text, stacklevel=3)
