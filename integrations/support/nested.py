"""Arguments of functions of torch that stand for tensors, wherever they are nested."""

from collections.abc import Callable
from typing import Any


def replaced(value: Any, kind: type, make: Callable[[Any], Any]) -> Any:
    """Return `value` with `make(x)` for each x of `kind` in it: in tuples, lists and dicts."""
    if isinstance(value, kind):
        return make(value)
    if isinstance(value, dict):
        return {name: replaced(item, kind, make) for name, item in value.items()}
    if isinstance(value, (tuple, list)):
        items = [replaced(item, kind, make) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value
