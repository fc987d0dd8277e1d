"""Dispatch modes that watch what is called."""

from collections.abc import Callable, Sequence
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

NO_LAUNCH = (
    "aten.empty",
    "aten.new_empty",
    "aten.promote_types",
    "aten._local_scalar_dense",
)


class Seen(TorchDispatchMode):
    """What is called."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operators: list[Any] = []

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.operators.append(operator)
        return operator(*args, **(kwargs or {}))


def launches(operators: Sequence[Any]) -> list[str]:
    """Return the names of those that a GPU launches a kernel for: no views, empty tensors, dtypes.

    A CPU needs some more, to check targets.
    """
    names = [str(x) for x in operators if not x.is_view]
    return [name for name in names if not name.startswith(NO_LAUNCH)]


def unseen(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function`, hidden from modes."""

    def run(*arguments: Any) -> Any:
        with _disable_current_modes():
            return function(*arguments)

    return run
