"""Whether an integration took the fused path."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from cutefce.integrations import options


@contextmanager
def fused_calls(module: Any, name: str = "linear_cross_entropy") -> Iterator[list[dict[str, Any]]]:
    """Yield a list that gets the options of each call of the function `name` by `module`."""
    found: list[dict[str, Any]] = []
    real = getattr(module, name)

    def counted(*operands: Any, **options: Any) -> Any:
        found.append(options)
        return real(*operands, **options)

    with mock.patch.object(module, name, counted):
        yield found


@contextmanager
def sampled_calls(module: Any, name: str = "linear_cross_entropy") -> Iterator[None]:
    """Let the setting of all integrations sample gradients, and assert that each call does."""
    setting = {"gradient": "sampled", "samples": 32}
    with mock.patch.dict(options._chosen, setting), fused_calls(module, name) as calls:
        yield
    assert calls and all(setting.items() <= call.items() for call in calls)
