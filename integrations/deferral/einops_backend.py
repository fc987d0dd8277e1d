"""Deferred logits among the tensors of einops, which looks them up by type."""

from typing import Any

from cutefce.integrations.deferral.logits import DeferredLogits

_backends: list[type] = []
"""The backend that is registered: einops finds subclasses of its own, as long as they live."""


def register() -> None:
    """Let einops rearrange deferred logits, if it is installed."""
    try:
        from einops._backends import TorchBackend
    except ImportError:
        return

    class Backend(TorchBackend):
        """What torch's backend does, with methods that deferred logits have."""

        framework_name = "cutefce"

        def is_appropriate_type(self, tensor: Any) -> bool:
            """Whether this backend serves the object."""
            return isinstance(tensor, DeferredLogits)

    if not _backends:
        _backends.append(Backend)
