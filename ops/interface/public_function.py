"""What public functions do before their bodies, and with their errors.

A function declares its signature alone.  `options.py` says what its arguments may be.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast

from cutefce.ops.interface.options import LOSS_OPTIONS, check_types, refuse
from cutefce.ops.parallel.consistency import report_errors

P = ParamSpec("P")
R = TypeVar("R")


def runs(run: Callable[..., R]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return a decorator that makes `run` the body of a function which has none.

    The function has the signature that users, editors and type checkers see.  `run` gets the
    positional arguments as they are, and of those by name the ones that are not at their defaults:
    a call without options pays for none.  An error is raised on all ranks of the call's group; one
    of a positional argument of another type names it, which an error of the dispatcher does not.
    Other names are refused; if it declares `**`, options of the loss are not.
    """

    def decorator(declaration: Callable[P, R]) -> Callable[P, R]:
        parameters = inspect.signature(declaration).parameters.values()
        defaults = {x.name: x.default for x in parameters if x.kind is not x.VAR_KEYWORD}
        names = [x.name for x in parameters if x.kind is x.POSITIONAL_OR_KEYWORD]
        takes_others = any(x.kind is x.VAR_KEYWORD for x in parameters)
        known = {*defaults, *(LOSS_OPTIONS if takes_others else ())}
        run.__qualname__ = declaration.__qualname__  # python's errors name it

        @functools.wraps(declaration)
        def call(*operands: Any, **arguments: Any) -> R:
            given = {}
            for name, x in arguments.items():
                default = defaults.get(name, inspect.Parameter.empty)
                if type(x) is not type(default) or x != default:
                    given[name] = x
            weight = operands[1] if len(operands) > 1 else given.get("linear_weight")
            with report_errors(given.get("group"), weight):
                try:
                    for name in given:
                        if name not in known:
                            refuse({name: given[name]})
                    return run(*operands, **given)
                except Exception:
                    named = given | dict(zip(names, operands, strict=False))
                    own = [x for x in names if x in named and named[x] is not defaults[x]]
                    wrong = _type_error({name: named[name] for name in own})
                    if wrong is None:
                        raise
                    try:
                        raise wrong from None
                    finally:
                        del wrong  # it would be in a reference cycle, which holds the group

        return cast(Callable[P, R], call)

    return decorator


def _type_error(arguments: dict[str, Any]) -> TypeError | None:
    """Return the error of the first argument that is not of its type, None if all are."""
    try:
        check_types(**arguments)
    except TypeError as error:
        return error
    return None
