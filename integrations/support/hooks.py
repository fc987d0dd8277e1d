"""Replacing a function of a framework, after a check that it is the one expected."""

import functools
import inspect
import sys
import warnings
from collections.abc import Callable, Sequence
from importlib import import_module, metadata
from operator import attrgetter
from typing import Any

from torch.autograd import Function

from cutefce.integrations.report import note_call

_MARK = "_is_from_cutefce"


class NotServedError(Exception):
    """Raised by a replacement for a call that is left to the framework's own function."""


def replace(
    path: str,
    replacement: Callable[..., Any],
    *,
    tested: str,
    importers: str = "",
    is_repeated: bool = False,
) -> None:
    """Replace a function of a framework by one with the same parameters.

    If `replacement` raises NotServedError, the one that was there is called instead.  It is also
    what the replacement gets as `own`, if it has such a parameter.  One with `*arguments` and
    `**named` hands on all of them, whatever they are called.

    Args:
        path: where its users look it up, as "package.module:name" or "package.module:Class.name".
        replacement: a function whose parameters have the names of those of the replaced one.
        tested: the distribution and the versions that the integration was tested with, as
            "trl 1.16.0".  Another version warns once.
        importers: what the names of modules begin with, in lower case, that may have imported the
            function by name; it is replaced there too.
        is_repeated: whether it may have been replaced before, by the same function.

    Raises:
        ImportError: if the distribution is not installed, or the module cannot be imported.
        RuntimeError: if it was replaced before, or does not have these parameters.
    """
    check_version(tested)
    owner, last, current = _find(path, tested)
    if getattr(current, _MARK, False):
        if is_repeated:
            return
        raise RuntimeError(f"{path}: the integration is enabled already")
    parameters = inspect.signature(replacement).parameters
    if not any(x.kind is x.VAR_POSITIONAL for x in parameters.values()):
        check_parameters(path, [name for name in parameters if name != "own"], tested)

    @functools.wraps(replacement)
    def call(*arguments: Any, **named: Any) -> Any:
        is_fused = True

        def own(*given: Any, **more: Any) -> Any:
            nonlocal is_fused
            is_fused = False
            return current(*given, **more)

        try:
            result = replacement(
                *arguments, **({"own": own} if "own" in parameters else {}), **named
            )
        except NotServedError:
            pass  # its errors are not caused by this one
        else:
            note_call(path, is_fused=is_fused)
            return result
        note_call(path, is_fused=False)
        return current(*arguments, **named)

    setattr(call, _MARK, True)
    is_static = isinstance(vars(owner).get(last), staticmethod)
    setattr(owner, last, staticmethod(call) if is_static else call)
    for module, found in [*sys.modules.items()] if importers else []:
        if module.lower().startswith(importers):
            for name in [key for key, x in vars(found).items() if x is current]:
                setattr(found, name, call)


def _find(path: str, tested: str) -> tuple[Any, str, Any]:
    """Return the owner of what is at `path`, its name there, and itself."""
    module, _, name = path.partition(":")
    *owners, last = name.split(".")
    try:
        owner = import_module(module)
    except ImportError as error:
        raise ImportError(f"{module}: cannot be imported, expected {tested}: {error}") from error
    owner = attrgetter(".".join(owners))(owner) if owners else owner
    current = getattr(owner, last, None)
    if current is None:
        raise RuntimeError(f"{path}: not found, expected that of {tested}")
    return owner, last, current


def check_parameters(path: str, parameters: Sequence[str], tested: str) -> None:
    """Raise RuntimeError unless the parameters of what is at `path` have these names, in order.

    Those of the `apply` of an autograd function are its `forward`'s, after the context.
    """
    owner, last, current = _find(path, tested)
    function = owner if last == "apply" else getattr(current, "__self__", None)
    if isinstance(function, type) and issubclass(function, Function):
        path = f"{function.__module__}:{function.__qualname__}.forward"
        current, parameters = function.forward, ("ctx", *parameters)
    found = [*inspect.signature(current).parameters]
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
