"""The plain object that stands for logits, until something but a cross entropy needs them."""

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cutefce.integrations.deferral import runners
from cutefce.integrations.deferral.head_call import WATCHING, HeadCall, is_inference_mode
from cutefce.integrations.deferral.loss import cross_entropy
from cutefce.integrations.deferral.record import METHODS, LogitsRecord
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
    __hash__ = object.__hash__

    def tensor(self, reason: str) -> Tensor:
        """Return the logits, as the head and the model would have made them.

        Args:
            reason: what needs them, for the report.
        """
        self.call.check_function()
        if self.made is None:
            self.call.check_watched()
            with left_inference_mode(self.call.inference), torch.set_grad_enabled(self.call.grad):
                hidden = self.states.movedim(self.class_dim, -1)
                made = self.call.evaluate(self._compute, hidden, self.memory)
                made = made.movedim(-1, self.class_dim)
            self.call.note_made(self.memory, made)
            self.call.counts.add(reason)
            self.made = made
        else:
            self.call.check_others(self.memory, self.made)
        return self.made

    def _compute(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        w, b = self.of_classes(weight), self.of_classes(bias)
        logits = F.linear(hidden, w.to(hidden.dtype), b if b is None else b.to(hidden.dtype))
        for name, value in self.steps:
            if name == "tanh":
                logits = logits.tanh()
            elif name == "add":
                logits = logits + value.to(logits.device)
            else:
                logits = getattr(logits, name)(value)
        return logits

    def ask(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Return what the method `name` of the logits returns."""
        args, kwargs = made_all(name, args), made_all(name, kwargs)
        return getattr(self.tensor(name), name)(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or not hasattr(Tensor, name):
            raise AttributeError(f"DeferredLogits: got no attribute {name!r}, as of a tensor")
        logits = self.tensor(name)
        if name in WATCHING:
            self.call.watch(name)
        return getattr(logits, name)

    def __dlpack__(self, **options: Any) -> Any:
        if self.requires_grad:
            raise RuntimeError(
                "logits: got a conversion that would lose their gradient, as by torch.as_tensor; "
                "expected logits + 0"
            )
        return self.ask("__dlpack__", **options)

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
                return cross_entropy(first, *made_all(name, rest), **made_all(name, kwargs))
            if name in WATCHING:
                return getattr(first, name)(*rest, **kwargs)
            if name in METHODS and func is getattr(torch, name) and not kwargs.keys() & OWN_NAMES:
                return getattr(first, name)(*rest, **kwargs)
        return func(*made_all(name, args), **made_all(name, kwargs))


def deferred(call: HeadCall, hidden: Tensor) -> Any:
    """Return the logits (..., V) of a call of a head with hidden states (..., D)."""
    return DeferredLogits(call, hidden, hidden.ndim - 1, (0, call.classes), (), hidden.dtype)


def make_outputs(model: nn.Module, arguments: Any, outputs: Any) -> Any:
    """Return the outputs of a model with logits where tensors are looked for: a forward hook.

    Backward hooks of the model look for them, and DeepSpeed's engine under ZeRO-3, which computes a
    backward from the tensors that the model returned.  A loss that is fused in the model's forward
    is one of these; for another, the logits have to be.
    """
    is_hooked = bool(model._backward_hooks or model._backward_pre_hooks)
    if not is_hooked and runners.deepspeed_engine() is None:
        return None  # as they are

    def made(x: Any) -> Any:
        if isinstance(x, dict):  # in place, as outputs of transformers are dicts with more
            for name, item in x.items():
                x[name] = made(item)
        elif isinstance(x, (tuple, list)):
            items = [made(item) for item in x]
            is_changed = any(a is not b for a, b in zip(items, x, strict=True))
            named = hasattr(x, "_fields")
            return (type(x)(*items) if named else type(x)(items)) if is_changed else x
        elif isinstance(x, DeferredLogits) and is_hooked and not x.call.is_fused:
            return x.tensor("backward hooks of the model")
        elif isinstance(x, DeferredLogits) and x.call.is_lost_by_engine():
            return x.tensor("DeepSpeed ZeRO-3: a loss outside of the model")
        return x

    return made(outputs)


def made_all(reason: str, value: Any) -> Any:
    """Return `value`, which may be nested, with the logits instead of all deferred ones."""
    return replaced(value, DeferredLogits, lambda x: x.tensor(reason))


def left_inference_mode(enabled: bool) -> AbstractContextManager[Any]:
    """Leave inference mode, unless it was `enabled` where the head was called."""
    is_on = is_inference_mode() and not enabled
    return torch.inference_mode(False) if is_on else nullcontext()


def _asked(name: str) -> Callable[..., Any]:
    def method(self: DeferredLogits, *args: Any, **kwargs: Any) -> Any:
        return self.ask(name, *args, **kwargs)

    method.__name__ = name
    return method


OWN_NAMES = {"out", "split_size_or_sections", "alpha"}
"""Parameters of torch's functions that its methods do not have, or have by another name."""
CASTS = {
    "float": torch.float32,
    "double": torch.float64,
    "half": torch.float16,
    "bfloat16": torch.bfloat16,
}
BINARY = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor")
OTHERS = (
    *("eq", "ne", "lt", "le", "gt", "ge", "neg", "pos", "abs", "invert", "setitem", "iter"),
    *("contains", "bool", "int", "float", "complex", "index", "array", "format"),
    *("reduce_ex", "dlpack_device"),
)


def _recorded(name: str, asked: str = "") -> Callable[..., Any]:
    """Return the method `name` of the record; the logits are asked for what it does not know.

    They are asked for their method `asked`, if it has another name.
    """
    method = getattr(LogitsRecord, name)
    kinds = inspect.signature(method).parameters.values()
    known = {each.name for each in kinds if each.kind is each.POSITIONAL_OR_KEYWORD}

    def run(self: DeferredLogits, *args: Any, **kwargs: Any) -> Any:
        is_known = self.is_recorded and kwargs.keys() <= known
        found = method(self, *args, **kwargs) if is_known else None
        return self.ask(asked or name, *args, **kwargs) if found is None else found

    return run


def _cast(name: str, dtype: torch.dtype) -> Callable[..., Any]:
    def run(self: DeferredLogits, **kwargs: Any) -> Any:
        return self.ask(name, **kwargs) if kwargs else self.to(dtype)

    return run


for word in (*METHODS, "mul_", "div_", "contiguous", "__getitem__"):
    setattr(DeferredLogits, word, _recorded(word))
for word, name in (("__mul__", "mul"), ("__rmul__", "mul"), ("__truediv__", "div")):
    setattr(DeferredLogits, word, _recorded(name))
for word, name in (
    *(("__add__", "add"), ("__radd__", "add"), ("view", "reshape")),
    *(("__imul__", "mul_"), ("__itruediv__", "div_")),
):
    setattr(DeferredLogits, word, _recorded(name, asked=word))
for word, dtype in CASTS.items():
    setattr(DeferredLogits, word, _cast(word, dtype))
for word in (*BINARY, *(f"{side}{word}" for side in "ri" for word in BINARY), *OTHERS):
    own = f"__{word}__"
    if hasattr(Tensor, own) and own not in {**vars(LogitsRecord), **vars(DeferredLogits)}:
        setattr(DeferredLogits, own, _asked(own))
