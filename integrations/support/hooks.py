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
    unused: Sequence[str] | None = (),
    is_counted: bool = True,
) -> None:
    """Replace a function of a framework by one with the same parameters, but for `unused`.

    If `replacement` raises NotServedError, the one that was there is called instead.  That is also
    what the replacement gets as `own`, if it has such a parameter: a function that repeats the call
    with other values of the parameters that it is given by name; `inspect.unwrap` of it holds no
    arguments.  A second call changes nothing.

    Args:
        path: where its users look it up, as "package.module:name" or "package.module:Class.name".
        replacement: a function whose parameters have the names of those of the replaced one.
        tested: the distribution and the versions that the integration was tested with, as
            "trl 1.16.0".  Another version warns once.
        importers: what the names of modules begin with, in lower case, that may have imported the
            function by name; it is replaced there too.
        unused: parameters that change no result, which the replacement does not get; None stands
            for all that it does not have.
        is_counted: whether `integration_report` counts its calls: not where it only makes models.

    Raises:
        ImportError: if the distribution is not installed, or the module cannot be imported.
        RuntimeError: if it does not have these parameters.
    """
    owner, last, current = _find(path, tested)
    if hasattr(current, _MARK):
        return
    wanted = [*inspect.signature(replacement).parameters]
    own_parameters = [name for name in wanted if name != "own"]
    signature = check(path, own_parameters, tested, unused)
    names = [*signature.parameters]

    @functools.wraps(replacement)
    def call(*arguments: Any, **named: Any) -> Any:
        is_fused = True
        signature.bind(*arguments, **named)  # a TypeError of what the framework does not take

        def own(**changes: Any) -> Any:
            nonlocal is_fused
            is_fused = False
            given = [changes.pop(name, x) for name, x in zip(names, arguments, strict=False)]
            return current(*given, *arguments[len(names) :], **(named | changes))

        vars(own)["__wrapped__"] = current
        given = dict(zip(names, arguments, strict=False)) | named | {"own": own}
        try:
            result = replacement(**{name: given[name] for name in wanted if name in given})
        except NotServedError:
            pass  # its errors are not caused by this one
        else:
            if is_counted:
                note_call(path, is_fused=is_fused)
            return result
        result = own()
        note_call(path, is_fused=False)
        return result

    vars(call).update({_MARK: True, "__signature__": inspect.signature(current)})
    is_static = isinstance(vars(owner).get(last), staticmethod)
    setattr(owner, last, staticmethod(call) if is_static else call)
    for module, found in [*sys.modules.items()] if importers else []:
        if module.lower().startswith(importers):
            for name in [key for key, x in vars(found).items() if x is current]:
                setattr(found, name, call)


def _find(path: str, tested: str) -> tuple[Any, str, Any]:
    """Return the owner of what is at `path`, its name there, and itself.

    Raises:
        ImportError: if its module cannot be imported; one that is not installed names `tested`.
    """
    module, _, name = path.partition(":")
    *owners, last = name.split(".")
    try:
        owner = import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module.partition(".")[0]:
            raise
        message = f"{error.name}: not installed, expected {tested}"
        raise ModuleNotFoundError(message, name=error.name) from error
    owner = attrgetter(".".join(owners))(owner) if owners else owner
    return owner, last, getattr(owner, last, None)


def check(
    path: str,
    parameters: Sequence[str],
    tested: str,
    unused: Sequence[str] | None = (),
    version: str | None = None,
) -> inspect.Signature:
    """Return the signature of what is at `path`, and warn of another version.

    Those of the `apply` of an autograd function are its `forward`'s, after the context.

    Raises:
        ImportError: if the distribution is not installed, or the module cannot be imported.
        RuntimeError: unless they are `parameters`, in order, and `unused` anywhere between.
    """
    check_version(tested, version)
    owner, last, current = _find(path, tested)
    if current is None:
        raise RuntimeError(f"{path}: not found, expected that of {tested}")
    function = owner if last == "apply" else getattr(current, "__self__", None)
    is_function = isinstance(function, type) and issubclass(function, Function)
    forward: Any = getattr(function, "forward", None) if is_function else current
    found = inspect.signature(forward)
    found = found.replace(parameters=[*found.parameters.values()][is_function:])
    names = [*found.parameters]
    if unused is not None and [x for x in names if x not in unused] != [*parameters]:
        raise RuntimeError(
            f"{path}: got parameters ({', '.join(names)}), expected those of {tested}, "
            f"({', '.join((*parameters, *unused))})"
        )
    return found


def check_version(tested: str, found: str | None = None) -> None:
    """Warn if another version than those of `tested`, as "trl 1.16.0", is in use.

    Args:
        tested: the distribution, and the versions.
        found: the version in use; None is that of the installed distribution.
    """
    distribution, *versions = tested.split()
    try:
        found = (found or metadata.version(distribution)).partition("+")[0]  # not its commit
    except metadata.PackageNotFoundError:
        found = "unknown"  # of sources that are imported without an installation
    if found not in versions:
        with_ = ", ".join(versions)
        text = f"{distribution}: got version {found}; the integration was tested with {with_}"
        warnings.warn(text, stacklevel=3)
