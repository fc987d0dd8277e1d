"""Ambient torch state: autocast, the current device, and active dispatch modes."""

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from cutefce.ops import torch_compat

PLAIN_TYPES = {Tensor, Parameter}
"""Tensor types that do not intercept operators."""


def can_bypass_dispatcher(h: Tensor, *others: Any) -> bool:
    """Whether the dispatcher would only call the implementation, for tensors of one device.

    Calling it directly then saves CPU time.  What is no tensor does not matter.
    """
    if torch_compat.has_dispatch_mode() or h.is_meta:
        return False
    for x in (h, *others):
        if type(x) in PLAIN_TYPES:
            if x.layout is not torch.strided or x.is_neg():
                return False
        elif isinstance(x, Tensor):
            return False
    return True


def wanted_gradients(h: Tensor, w: Tensor, bias: Tensor | None) -> tuple[bool, bool, bool]:
    """Return whether autograd wants the gradients of hidden states, weight and bias."""
    if not torch.is_grad_enabled():
        return False, False, False
    return h.requires_grad, w.requires_grad, bias is not None and bias.requires_grad


def is_autocasting(device_type: str) -> bool:
    """Whether autocast is enabled for devices of this type."""
    return torch_compat.autocast_is_available(device_type) and torch.is_autocast_enabled(
        device_type
    )


def autocast(h: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """Cast as `torch.nn.functional.linear` does: all but float64, to the region's dtype."""

    def lowered(x: Tensor) -> Tensor:
        kind, is_cast = x.device.type, x.is_floating_point() and x.dtype != torch.float64
        return x.to(torch.get_autocast_dtype(kind)) if is_cast and is_autocasting(kind) else x

    return (lowered(h), lowered(w)) if is_autocasting(h.device.type) else (h, w)


def refuse_tangents() -> None:
    """Raise NotImplementedError in a compiled graph, which would lose the inputs' tangents."""
    if torch_compat.computes_tangents():
        raise NotImplementedError("cutefce: compiled calls have no forward-mode derivatives")


def outside_autocast(device_type: str) -> contextlib.AbstractContextManager[None]:
    """Return a region where operators on devices of this type do not cast their inputs."""
    off: Any = torch.autocast(device_type, enabled=False) if is_autocasting(device_type) else None
    return off or contextlib.nullcontext()


def is_mixed(h: Tensor, w: Tensor) -> bool:
    """Whether a float32 weight w is to be cast to the 16 bits of hidden states h."""
    return w.dtype == torch.float32 and h.dtype in (torch.bfloat16, torch.float16)


def isolated_context(function: Callable[..., Any]) -> Callable[..., Any]:
    """Run `function` on the device of its first tensor, outside of any autocast region.

    Streams and launches go to the current device, and autocast would cast float32 sums.
    """

    @functools.wraps(function)
    def run(first: Tensor, *rest: Any, **more: Any) -> Any:
        if first.is_cuda and first.get_device() != torch.cuda.current_device():
            with torch.cuda.device(first.device):
                return run(first, *rest, **more)
        if not is_autocasting(first.device.type):
            return function(first, *rest, **more)
        with outside_autocast(first.device.type):
            return function(first, *rest, **more)

    return run
