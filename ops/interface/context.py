"""What surrounds a call: an autocast region, another current device, and who looks at operators."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

_NONE = torch._C.DispatchKeySet(torch._C.DispatchKey.BackendSelect)
NO_DISPATCH_MODE = {x.raw_repr() for x in (_NONE, _NONE.add(torch._C.DispatchKey.ADInplaceOrView))}
"""The dispatcher's states, in inference mode and out of it, in which nobody looks at calls: no fake
tensors, tracer, transform or mode."""
PLAIN_TYPES = {Tensor, Parameter}
"""Types of tensors that do not look at calls themselves."""


def can_bypass_dispatcher(h: Tensor, w: Tensor, y: Tensor) -> bool:
    """Whether the dispatcher would do nothing for tensors of one device but call a kernel.

    The way through it takes a tenth of the host's time of a call.
    """
    if torch._C._dispatch_tls_local_include_set().raw_repr() not in NO_DISPATCH_MODE or h.is_meta:
        return False
    if not h.layout == w.layout == y.layout == torch.strided:
        return False
    return type(h) in PLAIN_TYPES and type(w) in PLAIN_TYPES and type(y) in PLAIN_TYPES


def is_autocasting(device: str) -> bool:
    """Whether this is an autocast region for devices of this type."""
    return _has_autocast(device) and torch.is_autocast_enabled(device)


_has_autocast = functools.cache(torch.amp.is_autocast_available)


def isolated_context(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Keep a surrounding autocast region, which casts the inputs, from casting what sums.

    Make the device of the first tensor the current one: streams and launches go by that.
    """

    @functools.wraps(kernel)
    def run(first: Tensor, *rest: Any, **more: Any) -> Any:
        device, kind = first.device, first.device.type
        if kind == "cuda" and device.index != torch.cuda.current_device():
            with torch.cuda.device(device):
                return run(first, *rest, **more)
        if not is_autocasting(kind):
            return kernel(first, *rest, **more)
        with torch.autocast(kind, enabled=False):
            return kernel(first, *rest, **more)

    return run
