"""What public functions do before their bodies, and with their errors.

A function declares its signature alone.  `options.py` says what its arguments may be.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast

from torch import Tensor

from cutefce.ops import torch_compat
from cutefce.ops.interface.arguments import ARGUMENTS, LOSS_OPTIONS, refuse
from cutefce.ops.interface.checks import check_layout, check_type
from cutefce.ops.parallel.consistency import report_errors

P = ParamSpec("P")
R = TypeVar("R")


def runs(
    run: Callable[..., R], *, meets_ranks: bool = True
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return a decorator that makes `run` the body of a function which has none.

    The function has the signature that users, editors and type checkers see.  `run` gets the
    positional arguments as they are, and of those by name the ones that are not at their defaults:
    a call without options pays for none.  The former are of their types in `options.py`.  An error
    is raised on all ranks of the call's group, if these meet in it.  Other names are refused; if it
    declares `**`, options of the loss are not.
    """

    def decorator(declaration: Callable[P, R]) -> Callable[P, R]:
        parameters = inspect.signature(declaration).parameters.values()
        defaults = {x.name: x.default for x in parameters if x.kind is not x.VAR_KEYWORD}
        names = [x.name for x in parameters if x.kind is x.POSITIONAL_OR_KEYWORD]
        takes_others = any(x.kind is x.VAR_KEYWORD for x in parameters)
        known = defaults | dict.fromkeys(LOSS_OPTIONS if takes_others else ())
        run.__qualname__ = declaration.__qualname__  # python's errors name it

        @functools.wraps(declaration)
        def call(*operands: Any, **arguments: Any) -> R:
            given = {}
            for name, x in arguments.items():
                default = defaults.get(name, inspect.Parameter.empty)
                if type(x) is not type(default) or x != default:
                    given[name] = x
            weight = operands[1] if len(operands) > 1 else given.get("linear_weight")
            group, report = given.get("group"), None
            if meets_ranks and (group is not None or torch_compat.is_dtensor(weight)):
                report = report_errors(group, weight)
            try:
                if len(operands) > len(names):
                    got = f"{len(operands)} arguments without names"
                    raise TypeError(f"{names[-1]}: got {got}, expected names of those after it")
                for name, x in (*zip(names, operands, strict=False), *given.items()):
                    if name in names and x is not defaults[name]:
                        check_type(name, x, ARGUMENTS[name].type)
                    if isinstance(x, Tensor):  # others have no shape to be read
                        check_layout(name, x)
                for name in given:
                    if name not in known:
                        refuse({name: given[name]}, known)
                return run(*operands, **given)
            except Exception as error:
                if report is not None:
                    report.publish(error)
                raise

        return cast(Callable[P, R], call)

    return decorator
