"""What is known of deferred logits, and the operations on them that can be recorded."""

import dataclasses
import functools
import inspect
import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from cutefce.integrations.deferral.head_call import Compute, HeadCall, Memory, is_inference_mode
from cutefce.integrations.deferral.indexing import row_sizes, select
from cutefce.integrations.support.nested import replaced
from cutefce.ops import torch_compat
from cutefce.ops.interface.checks import DTYPES
from cutefce.ops.operators.context import PLAIN_TYPES

Step = tuple[str, Any]
"""A method of tensors that changes logits element by element, and its argument.

That of "add" is a tensor (V,) of the classes of the logits, on the hidden states' device.
"""
RECORDED: list[str] = []
"""The names of the methods that are recorded."""
BINARY = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor")
"""Names of operators."""
WRITES = {"__setitem__", *(f"__i{word}__" for word in BINARY)}
"""Operators that change a tensor in place."""


def recorded(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method of logits, whose result None says that the logits must be asked instead."""
    parameters = inspect.signature(method).parameters.values()
    known = {each.name for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD}
    name = method.__name__
    RECORDED.append(name)

    @functools.wraps(method)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        is_known = self.is_recorded and kwargs.keys() <= known
        found = method(self, *args, **kwargs) if is_known else None
        return self.ask(name, *args, **kwargs) if found is None else found

    return run


@dataclass(eq=False, repr=False)
class LogitsRecord:
    """Which logits of a head's call these are, and what was done to them.

    Selections and views of rows are applied to the hidden states, which have the shape of the
    logits but for the dimension of classes; selections of classes to the weight; the rest is a
    list of steps.  The methods are those of tensors.

    It is a dataclass since FSDP, DDP and Lightning look for tensors in those, among the outputs of
    modules.  They may cast the states, which stands for a cast of the logits.
    """

    call: HeadCall
    hidden: Tensor
    class_dim: int
    class_range: tuple[int, int]
    steps: tuple[Step, ...]
    recorded_dtype: torch.dtype
    memory: Memory
    place: torch.device | None = None
    """Where they were moved to; None for the device of the hidden states."""
    made: Tensor | None = None
    """The logits themselves, once something has needed them."""
    graph: tuple[Tensor, ...] = ()
    """Those of the call, which has them where DDP looks for parameters in the outputs' graphs."""

    def __post_init__(self) -> None:
        self.graph = self.graph or self.call.graph
        dtype = self.hidden.dtype
        if dtype != self.call.dtype:
            self.hidden, self.recorded_dtype = self.states, dtype
            self.steps = (*self.steps, ("to", dtype))

    # what is known without the logits
    @property
    def classes(self) -> int:
        """V, or how many of them were selected."""
        start, stop = self.class_range
        return stop - start

    @property
    def shape(self) -> torch.Size:
        sizes = list(self.hidden.shape)
        sizes[self.class_dim] = self.classes
        return torch.Size(sizes)

    @property
    def dtype(self) -> torch.dtype:
        is_cast = self.hidden.dtype != self.call.dtype
        return self.hidden.dtype if is_cast else self.recorded_dtype

    @property
    def states(self) -> Tensor:
        """The hidden states as the head got them."""
        return self.hidden.to(self.call.dtype)

    @property
    def ndim(self) -> int:
        return self.hidden.ndim

    @property
    def device(self) -> torch.device:
        return self.place or self.hidden.device

    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"

    @property
    def requires_grad(self) -> bool:
        _, *others = self.call.watched
        given = self.hidden, *(x for _, x, _ in others)
        return self.call.grad and any(x.requires_grad for x in given)

    @property
    def is_deferred(self) -> bool:
        """Whether a loss can be fused: in the mode of gradients that the head was called in."""
        return self.made is None and torch.is_grad_enabled() == self.call.grad

    @property
    def is_recorded(self) -> bool:
        """Whether an operation can be recorded: then, or on states without a graph."""
        is_frozen = not self.call.grad and not self.hidden.requires_grad
        return self.is_deferred or (self.made is None and is_frozen)

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        return self.ndim

    def numel(self) -> int:
        return math.prod(self.shape)

    def is_floating_point(self) -> bool:
        return True

    def __len__(self) -> int:
        return self.shape[0]

    def of_classes(self, x: Any) -> Any:
        """Return the rows of a weight or bias x (V, ...) that belong to the classes, or None."""
        if x is None or self.classes == self.call.classes:
            return x
        return x[slice(*self.class_range)]

    def evaluate(self, compute: Compute) -> Tensor:
        """Return `compute` of the hidden states (..., D), and of the head's weight and bias."""
        hidden = self.states.movedim(self.class_dim, -1)
        self.memory.check()
        return self.call.evaluate(compute, hidden)

    def tensor(self, reason: str) -> Tensor:
        """Return the logits, as the head and the model would have made them.

        Args:
            reason: what needs them, for the report.
        """
        self.call.check_function()
        if self.made is None:
            self.call.check_watched()
            is_left = is_inference_mode() and not self.call.inference
            mode = torch.inference_mode(False) if is_left else nullcontext()
            with mode, torch.set_grad_enabled(self.call.grad):
                made = self.evaluate(self._compute).movedim(-1, self.class_dim)
            self.memory.note_made(made)
            self.call.counts.add(reason)
            self.made = made
        else:
            self.memory.check(self.made)
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
        # a copy that is not recorded may be changed in place; tanh's backward reads its result
        return logits.clone() if self.steps and self.steps[-1][0] == "tanh" else logits

    def ask(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Return what the method `name` of the logits themselves returns."""
        args, kwargs = made_all(name, args), made_all(name, kwargs)
        result = getattr(self.tensor(name), name)(*args, **kwargs)
        if is_write(name):
            self.leave_memory()
        return result

    def leave_memory(self) -> None:
        """Have memory of its own after a change, and others that had the same not used again."""
        self.memory.is_changed = True
        self.memory = Memory()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self.hidden) in memo:  # of one who then replaces the fields
            return self.derived()
        return self.ask("__deepcopy__", memo)

    def derived(self, **changes: Any) -> Any:
        """Return other logits of the same call: these, but for some arguments of __init__."""
        return dataclasses.replace(self, **changes)

    def tensors(self) -> list[Tensor]:
        """Return what torch finds among the outputs of a module: the states, and made logits."""
        return [self.hidden, *self.graph, *(() if self.made is None else (self.made,))]

    def with_tensors(self, *tensors: Any) -> Any:
        """Return these logits with what a function has made of `tensors`.

        Raises:
            TypeError: if shape, device or the need of a gradient has changed.
        """
        for own, x in zip(self.tensors(), tensors, strict=True):
            facts = own.shape, own.device, own.requires_grad
            if not isinstance(x, Tensor) or (x.shape, x.device, x.requires_grad) != facts:
                raise TypeError(
                    "logits: got a function that was mapped over deferred ones, which it does not "
                    "see, expected one that returns its tensors; map it over logits + 0"
                )
        graph, made = tensors[1 : 1 + len(self.graph)], tensors[1 + len(self.graph) :]
        return self.derived(hidden=tensors[0], graph=graph, made=made[0] if made else None)

    def to(self, *args: Any, **kwargs: Any) -> Any:
        given = [*args, *(kwargs[name] for name in ("device", "dtype") if name in kwargs)]
        dtypes = [x for x in given if isinstance(x, torch.dtype)]
        devices = [torch.device(x) for x in given if isinstance(x, (torch.device, str))]
        flags = [x for x in given if x is None or isinstance(x, bool)]
        moves = [device for device in devices if device != self.device]
        is_known = len(dtypes) + len(devices) + len(flags) == len(given)
        is_known &= {*dtypes} <= DTYPES and not kwargs.get("copy")
        is_known &= all(x.index is not None or x.type == "cpu" for x in moves)
        if not is_known or not (self.is_recorded or not (dtypes or moves)):
            return self.ask("to", *args, **kwargs)
        moved = self
        for device in moves:
            moved = self._step("to", device, place=device)
        for dtype in dtypes:
            if dtype != moved.dtype:
                moved = moved._step("to", dtype, recorded_dtype=dtype)
        return moved

    def _step(self, name: str, value: Any = None, **changes: Any) -> Any:
        self.memory.check()
        own = self.derived()  # with a cast among its steps
        return own.derived(steps=(*own.steps, (name, value)), memory=Memory(), **changes)

    def _scale(self, name: str, number: Any) -> Any:
        if isinstance(number, Tensor) and _is_readable(number):
            number = number.item()
        is_number = isinstance(number, (int, float)) and not isinstance(number, bool)
        is_served = is_number and math.isfinite(number) and number != 0
        return self._step(name, number) if is_served else None

    def _is_bias(self, x: Any) -> bool:
        """Whether x (V,), or with dimensions of 1 before, has a number for each class."""
        if type(x) not in PLAIN_TYPES or x.dtype not in DTYPES or x.device != self.device:
            return False
        gains_grad = x.requires_grad and not self.call.grad and torch.is_grad_enabled()
        if gains_grad or x.is_inference() or torch_compat.is_transformed():
            return False
        return bool(0 < x.ndim <= self.ndim and x.numel() == x.shape[-1] == self.classes)

    def _dim(self, dim: Any, ndim: int | None = None) -> int | None:
        """Return a dimension counted from 0, None if it is none."""
        ndim = self.ndim if ndim is None else ndim
        if not isinstance(dim, int) or not -ndim <= dim < ndim:
            return None
        return dim % ndim

    # element by element
    @recorded
    def mul(self, other: Any) -> Any:
        return self._scale("mul", other)

    @recorded
    def div(self, other: Any) -> Any:
        return self._scale("div", other)

    @recorded
    def add(self, other: Any) -> Any:
        if self.class_dim != self.ndim - 1 or not self._is_bias(other):
            return None
        self.call.add(other)
        dtype = torch.promote_types(self.dtype, other.dtype)
        value = other.reshape(-1).to(self.hidden.device)
        return self._step("add", value, recorded_dtype=dtype)

    __mul__ = __rmul__ = mul
    __truediv__ = div
    __add__ = __radd__ = add

    @recorded
    def mul_(self, other: Any) -> Any:
        return self._become(self._scale("mul", other))

    @recorded
    def div_(self, other: Any) -> Any:
        return self._become(self._scale("div", other))

    __imul__, __itruediv__ = mul_, div_

    def _become(self, changed: Any) -> Any:
        """Be what a step in place has made."""
        if changed is not None:
            self.leave_memory()
            self.hidden, self.recorded_dtype = changed.hidden, changed.recorded_dtype
            self.steps = changed.steps
        return changed if changed is None else self

    @recorded
    def tanh(self) -> Any:
        return self._step("tanh")

    @recorded
    def contiguous(self) -> Any:
        is_last = self.class_dim == self.ndim - 1
        is_whole = is_last and self.classes == self.call.classes
        return self if is_whole and self.hidden.is_contiguous() else self.derived()

    @recorded
    def clone(self) -> Any:
        self.memory.check()
        return self.derived(memory=Memory())

    # rows and classes
    @recorded
    def __getitem__(self, index: Any) -> Any:
        found = select(index, self.ndim, self.classes)
        if found is None or self.class_dim != self.ndim - 1:
            return None
        rows, chosen = found
        hidden, first = self.hidden[rows], self.class_range[0]
        cut = slice(chosen.start, chosen.stop)
        return self.derived(
            hidden=hidden,
            class_dim=hidden.ndim - 1,
            class_range=(first + chosen.start, first + chosen.stop),
            steps=tuple((n, x[cut] if n == "add" else x) for n, x in self.steps),
        )

    @recorded
    def view(self, *shape: Any) -> Any:
        return self._of_shape(shape)

    @recorded
    def reshape(self, *shape: Any) -> Any:
        return self._of_shape(shape)

    def _of_shape(self, shape: tuple[Any, ...]) -> Any:
        sizes = row_sizes(shape, self.numel() // self.classes, self.classes)
        if sizes is None or self.class_dim != self.ndim - 1:
            return None
        hidden = self.hidden.reshape(*sizes, self.hidden.shape[-1])
        return self.derived(hidden=hidden, class_dim=hidden.ndim - 1)

    @recorded
    def flatten(self, start_dim: int = 0, end_dim: int = -1) -> Any:
        start, end = self._dim(start_dim), self._dim(end_dim)
        if start is None or end is None or start > end or start <= self.class_dim <= end:
            return None
        merged = end - start if self.class_dim > end else 0
        hidden = self.hidden.flatten(start, end)
        return self.derived(hidden=hidden, class_dim=self.class_dim - merged)

    @recorded
    def unsqueeze(self, dim: int) -> Any:
        place = self._dim(dim, self.ndim + 1)
        if place is None:
            return None
        moved = self.class_dim + (place <= self.class_dim)
        return self.derived(hidden=self.hidden.unsqueeze(place), class_dim=moved)

    @recorded
    def squeeze(self, *dims: Any) -> Any:
        place = self._dim(dims[0]) if len(dims) == 1 else None
        if place is None or place == self.class_dim:
            return None
        hidden = self.hidden.squeeze(place)
        gone = hidden.ndim < self.ndim and place < self.class_dim
        return self.derived(hidden=hidden, class_dim=self.class_dim - gone)

    @recorded
    def transpose(self, dim0: int, dim1: int) -> Any:
        first, second = self._dim(dim0), self._dim(dim1)
        if first is None or second is None:
            return None
        order = [*range(self.ndim)]
        order[first], order[second] = second, first
        return self.permute(order)

    @recorded
    def permute(self, *dims: Any) -> Any:
        given = dims[0] if len(dims) == 1 and isinstance(dims[0], (tuple, list)) else dims
        order = [self._dim(dim) for dim in given]
        if {*order} != {*range(self.ndim)} or len(order) != self.ndim:
            return None
        hidden = self.hidden.permute(*given)
        return self.derived(hidden=hidden, class_dim=order.index(self.class_dim))

    @recorded
    def split(self, split_size: Any, dim: int = 0) -> Any:
        return self._parts(self.hidden.split, split_size, dim)

    @recorded
    def chunk(self, chunks: int, dim: int = 0) -> Any:
        return self._parts(self.hidden.chunk, chunks, dim)

    def _parts(self, cut: Callable[..., Sequence[Tensor]], count: Any, dim: int) -> Any:
        if self._dim(dim) in (None, self.class_dim):
            return None
        return tuple(self.derived(hidden=x) for x in cut(count, dim))


def is_write(name: str) -> bool:
    """Whether the method or function `name` changes its first argument in place."""
    is_method = name.endswith("_") and not name.endswith("__") and name != "requires_grad_"
    return is_method or name in WRITES


def made_all(reason: str, value: Any) -> Any:
    """Return `value`, which may be nested, with the logits instead of all deferred ones."""
    return replaced(value, LogitsRecord, lambda x: x.tensor(reason))


def _is_readable(x: Tensor) -> bool:
    """Whether x is a number that needs no gradient, and can be read here."""
    if x.ndim or x.requires_grad or x.is_meta or torch.compiler.is_compiling():
        return False
    if torch_compat.is_transformed():
        return False
    return not (x.is_cuda and torch.cuda.is_current_stream_capturing())
