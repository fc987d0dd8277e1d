"""The plain object that stands for logits, until something but a cross entropy needs them."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cutefce.integrations.deferral import runners
from cutefce.integrations.deferral.head_call import WATCHING
from cutefce.integrations.deferral.loss import cross_entropy
from cutefce.integrations.deferral.record import BINARY, RECORDED, LogitsRecord, is_write, made_all
from cutefce.integrations.support.nested import replaced
from cutefce.ops import torch_compat


@torch_compat.register_node
class DeferredLogits(LogitsRecord):
    """Logits that are recorded and not computed.

    Whatever but a recorded operation or a cross entropy is asked of the object, functions of torch
    included, makes the logits, once, and is asked of them.  It is not a subclass of Tensor, which
    would break compiled graphs.
    """

    __array_ufunc__ = None  # so that numbers of NumPy leave products to this class

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or not hasattr(Tensor, name):
            raise AttributeError(f"DeferredLogits: got no attribute {name!r}, as of a tensor")
        logits = self.tensor(name)
        if name in WATCHING:
            self.call.watch(name)
        if is_write(name):
            self.leave_memory()
        return getattr(logits, name)

    def __repr__(self) -> str:
        return f"DeferredLogits(shape={tuple(self.shape)}, dtype={self.dtype})"

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", type(func).__name__)
        if name in ("add", "mul") and not kwargs and not isinstance(args[0], cls):
            return getattr(args[1], name)(args[0])  # of either order
        if func is torch.autograd.grad:
            replaced(args[1], cls, lambda x: x.call.watch("torch.autograd.grad"))
        if args and isinstance(args[0], cls):
            first, rest = args[0], args[1:]
            if func is F.cross_entropy:
                loss = cross_entropy(first, *made_all(name, rest), **made_all(name, kwargs))
                if loss is not None:
                    return loss
            is_recorded = name in RECORDED and func is getattr(torch, name, None)
            if name in WATCHING or (is_recorded and not kwargs.keys() & OWN_NAMES):
                return getattr(first, name)(*rest, **kwargs)
        result = func(*made_all(name, args), **made_all(name, kwargs))
        changed = args[:1] if is_write(name) or kwargs.get("inplace") else ()
        replaced((changed, kwargs.get("out")), cls, cls.leave_memory)
        return result


def make_outputs(model: nn.Module, arguments: Any, outputs: Any) -> Any:
    """Return the outputs of a model with logits where tensors are looked for: a forward hook.

    Backward hooks of the model look for them, and DeepSpeed's engine under ZeRO-3, which computes a
    backward from the tensors that the model returned.  A loss that is fused in the model's forward
    is one of these; for another, the logits have to be.
    """
    is_hooked = bool(model._backward_hooks or model._backward_pre_hooks)
    if not is_hooked and runners.deepspeed_engine() is None:
        return None  # as they are

    def made(x: DeferredLogits) -> Any:
        if is_hooked and not x.call.is_fused:
            return x.tensor("backward hooks of the model")
        if x.call.is_lost_by_engine():
            return x.tensor("DeepSpeed ZeRO-3: a loss outside of the model")
        return x

    return replaced(outputs, DeferredLogits, made)


def _asked(name: str) -> Callable[..., Any]:
    return lambda self, *args, **kwargs: self.ask(name, *args, **kwargs)


OWN_NAMES = {"out", "split_size_or_sections", "alpha"}
"""Parameters of torch's functions that its methods do not have, or have by another name."""
CASTS = {
    "float": torch.float32,
    "double": torch.float64,
    "half": torch.float16,
    "bfloat16": torch.bfloat16,
}
OTHERS = (
    *("eq", "ne", "lt", "le", "gt", "ge", "neg", "pos", "abs", "invert", "setitem", "iter"),
    *("contains", "bool", "int", "float", "complex", "index", "array", "format"),
    *("reduce_ex", "dlpack", "dlpack_device"),
)


def _cast(dtype: torch.dtype) -> Callable[..., Any]:
    return lambda self, **kwargs: self.to(dtype, **kwargs)


for word, dtype in CASTS.items():
    setattr(DeferredLogits, word, _cast(dtype))
for word in (*BINARY, *(f"{side}{word}" for side in "ri" for word in BINARY), *OTHERS):
    own = f"__{word}__"
    if hasattr(Tensor, own) and own not in {**vars(LogitsRecord), **vars(DeferredLogits)}:
        setattr(DeferredLogits, own, _asked(own))
