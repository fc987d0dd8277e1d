"""Arguments of functions of torch that stand for tensors, wherever they are nested."""

from collections.abc import Callable
from typing import Any


def replaced(value: Any, kind: type, make: Callable[[Any], Any]) -> Any:
    """Return `value` with `make(x)` for each x of `kind` in it: in tuples, lists and dicts.

    A dict of another class, such as the outputs of a model of transformers, is changed in place.
    """
    if isinstance(value, kind):
        return make(value)
    if isinstance(value, dict):
        items = {name: replaced(item, kind, make) for name, item in value.items()}
        if type(value) is dict:
            return items
        for name, item in items.items():
            value[name] = item
    elif isinstance(value, (tuple, list)):
        made = [replaced(item, kind, make) for item in value]
        if any(a is not b for a, b in zip(made, value, strict=True)):
            return type(value)(*made) if hasattr(value, "_fields") else type(value)(made)
    return value
