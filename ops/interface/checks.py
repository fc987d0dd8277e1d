"""Errors of one argument: its type and value, and of a tensor layout, dtype, shape and device.

They are raised before anything is allocated.  `options.py` says which of them an option has, and
`heads.py` which hidden states, weights and targets fit together.  Other errors are raised
elsewhere: placements of DTensors in `ops.parallel.dtensor`, disagreement of ranks in
`ops.parallel.shard` and `ops.parallel.consistency`, targets outside the vocabulary in
`ops.rows.targets` and, across ranks, in `ops.parallel.shard`.
"""

import math
import reprlib
import sys
from collections.abc import Sequence
from numbers import Integral, Real
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from cutefce.cute_kernels.problem import ITEM_BYTES
from cutefce.ops import torch_compat
from cutefce.ops.budgets import DEFAULT, MAXIMUM, MINIMUM
from cutefce.ops.schema import Type

DTYPES = {getattr(torch, name) for name in ITEM_BYTES}
NONE = type(None)
INTEGERS = Integral, torch.SymInt
SHORT = reprlib.Repr()
SHORT.maxlevel = 1  # of lists of lists, "[[...], [...]]"
NUMBERS = Real, torch.SymInt, torch.SymFloat

TENSOR = Type("Tensor", (Tensor,), "a tensor")
TENSOR_OR_NONE = Type("Tensor?", (Tensor, NONE), "a tensor or None")
NUMBER = Type("float", NUMBERS, "a number")
NUMBER_OR_NONE = Type("float?", (*NUMBERS, NONE), "a number or None")
INTEGER = Type("int", INTEGERS, "an integer")
NAMED_BYTES = {"min": MINIMUM, "max": MAXIMUM}
BYTES = Type("int?", (*INTEGERS, str, NONE), 'bytes as an integer, "min", "max" or None').of(
    lambda x: x is None or (x in NAMED_BYTES if isinstance(x, str) else 0 <= x < 1 << 63),
    'bytes from 0 to 2**63 - 1, "min", "max" or None',
)
STRING = Type("str", (str,), "a string")
STRINGS = Type("str", (Sequence,), "a sequence of strings")
BOOL = Type("bool", (bool,), "a bool")
BOOLS = Type("bool[]", (list,), "a list of bools")
SIZE = INTEGER.of(lambda x: x >= 1, "1 or more")
SIZES = Type("int[]", (Sequence,), "a tuple of integers").of(
    lambda x: all(size >= 1 for size in x), "sizes of 1 or more"
)
SIZES_OR_NONE = Type("int[]?", (Sequence, NONE), "a sequence of integers or None")
GROUP = Type("str?", (ProcessGroup, NONE), "a ProcessGroup that this rank is in")

FROM_0_TO_1 = NUMBER.of(lambda x: 0 <= x <= 1, "a number from 0 to 1")
FROM_0_TO_1_OR_NONE = NUMBER_OR_NONE.of(lambda x: x is None or 0 <= x <= 1, FROM_0_TO_1.values)
LARGEST = sys.float_info.max
"""The largest number that operators take; integers may be larger."""
NOT_NEGATIVE = NUMBER.of(lambda x: 0 <= x <= LARGEST, "a finite number, 0 or more")
NOT_ZERO = NUMBER.of(lambda x: 0 < abs(x) <= LARGEST, "a finite number other than 0")
POSITIVE_OR_NONE = NUMBER_OR_NONE.of(
    lambda x: x is None or 0 < x <= LARGEST, "a finite number above 0, or None"
)
# an operator takes an integer in place of None
INTEGER_OR_NONE = Type("int", (*INTEGERS, NONE), "an integer or None").of(
    lambda x: x is None or -(1 << 63) <= x < 1 << 63, "an integer of 64 bits"
)


def one_of(names: tuple[str, ...]) -> Type:
    """Return the type of an argument that names one of several things."""
    return STRING.of(lambda x: x in names, f"one of {names}")


def shown(value: Any) -> str:
    """Return the text of a wrong argument, shortened, and its type."""
    kind = type(value).__name__
    if isinstance(value, Tensor):  # whose text would be its first numbers
        return f"a value of type {kind}"
    return f"{shortened(value)} ({kind})"


def shortened(value: Any) -> str:
    """Return the text of a wrong value, shortened."""
    try:
        return SHORT.repr(value)
    except ValueError:  # an integer of more digits than Python writes
        return "an integer of thousands of digits"


def check_type(name: str, value: Any, type: Type) -> None:
    """Raise TypeError unless the argument called `name` is of its type."""
    kinds: Sequence[Any] = type.types
    if isinstance(value, (bool, str)):  # a string is a sequence, a bool an integer
        kinds = [kind for kind in (bool, str) if kind in kinds]
    for kind in kinds:  # as a graph compiler can trace
        if isinstance(value, kind):
            break
    else:
        raise TypeError(f"{name}: got {shown(value)}, expected {type.expected}")
    for x in value or () if type in (SIZES, SIZES_OR_NONE) else ():
        if isinstance(x, bool) or not isinstance(x, INTEGERS):
            raise TypeError(f"{name}: got {shown(x)} among them, expected integers")


def check_value(name: str, value: Any, type: Type) -> None:
    """Raise ValueError unless a number or a string is a right one of its type."""
    if type.contains is not None and not type.contains(value):
        raise ValueError(f"{name}: got {shortened(value)}, expected {type.values}")


def check_transform(name: str) -> None:
    """Raise NotImplementedError for a call of the function `name` under a transform.

    In a compiled call the operators do, when they run.
    """
    if not torch.compiler.is_compiling() and torch_compat.is_transformed():
        raise NotImplementedError(
            f"{name}: got a call under a transform of torch.func or in forward mode, expected "
            "torch.autograd in reverse mode"
        )


def workspace_bytes(workspace: int | str | None) -> int:
    """Return the budget in bytes that `workspace` means: bytes, "min", "max" or None."""
    if workspace is None:
        return DEFAULT
    check_type("workspace", workspace, BYTES)
    check_value("workspace", workspace, BYTES)
    return NAMED_BYTES[workspace] if isinstance(workspace, str) else min(workspace, MAXIMUM)


def check_layout(name: str, x: Tensor) -> None:
    """Raise TypeError for a nested or a sparse tensor."""
    if x.is_nested:
        raise TypeError(f"{name}: got a nested tensor, expected a plain one; pass its values")
    if x.layout != torch.strided:
        raise TypeError(f"{name}: got layout {x.layout}, expected {torch.strided}")


def check_constant(name: str, x: Tensor) -> None:
    """Raise TypeError or ValueError unless x is strided and requires no gradient."""
    check_layout(name, x)
    if x.requires_grad:
        raise ValueError(f"{name}: got one that requires grad, expected {name}.detach()")


def check_dtype(name: str, x: Tensor) -> None:
    """Raise TypeError unless x has a floating-point dtype that calls take."""
    if x.dtype not in DTYPES:
        expected = f"one of {', '.join(ITEM_BYTES)}"
        is_mask = x.dtype == torch.bool or (name == "token_weights" and has_integers(x))
        hint = f"; pass {name}.float()" if is_mask else ""
        raise TypeError(f"{name}: got dtype {x.dtype}, expected {expected}{hint}")


def has_integers(x: Tensor) -> bool:
    """Whether x has a dtype of integers, of any width."""
    return not (x.dtype == torch.bool or x.is_floating_point() or x.is_complex())


def check_device(name: str, x: Tensor, h: Tensor, of: str = "input") -> None:
    """Raise ValueError unless x is on the device of h, the argument `of`."""
    if x.device != h.device:
        raise ValueError(f"{name}: got device {x.device}, expected that of {of}, {h.device}")


def are_equal(name: str, got: tuple[int, ...], expected: tuple[int, ...]) -> bool:
    """Return whether shapes are equal; what only a run of the graph tells is checked there."""
    try:
        return got == expected
    except RuntimeError:  # of a tracer, which may not know sizes that depend on data
        pass
    if len(got) != len(expected):
        return False
    for size, other in zip(got, expected, strict=True):
        try:
            if size != other:
                return False
        except RuntimeError:
            message = f"{name}: got size {size}, expected {other} to match the other arguments"
            torch_compat.check_at_run_time(size == other, message)
    return True


class Operands(NamedTuple):
    """What the tensors among the options are checked against."""

    h: Tensor
    """(..., D) hidden states."""
    w: Tensor
    """(V, D) the weight of this rank, or (V, d_1, ..., d_K, D)."""
    tokens: tuple[int, ...]
    """The shape (...) of the targets."""
    vocab: int
    """Classes of all ranks."""
    input: str = "input"
    """The argument that h is, as errors name it."""


def check_floats(name: str, x: Tensor, of: Operands, shape: Sequence[int]) -> None:
    """Raise TypeError or ValueError unless x is a floating-point constant of a shape."""
    check_constant(name, x)
    _check_floats(name, x, of, shape)


def check_bias(name: str, x: Tensor, of: Operands) -> None:
    """Raise TypeError or ValueError unless x is floating-point, of each of this rank's classes."""
    check_layout(name, x)
    _check_floats(name, x, of, of.w.shape[:-1])


def check_temperature(name: str, x: Tensor, of: Operands) -> None:
    """Raise TypeError or ValueError unless x is one constant for all tokens, or one for each."""
    if x.ndim and tuple(x.shape) != tuple(of.tokens):
        expected = f"() or {tuple(of.tokens)}"
        raise ValueError(f"{name}: got shape {tuple(x.shape)}, expected {expected}")
    check_floats(name, x, of, x.shape)


def check_scalar(name: str, x: Tensor, of: Operands) -> None:
    """Raise TypeError or ValueError unless x is one real constant, on h's device or a CPU."""
    check_constant(name, x)
    if x.is_complex() or x.dtype == torch.bool:
        raise TypeError(f"{name}: got dtype {x.dtype}, expected a real one")
    if x.shape not in ((), (1,)):
        raise ValueError(f"{name}: got shape {tuple(x.shape)}, expected () or (1,)")
    if x.device not in (of.h.device, torch.device("cpu")):
        or_cpu = "" if of.h.device.type == "cpu" else ", or cpu"
        raise ValueError(
            f"{name}: got device {x.device}, expected that of {of.input}, {of.h.device}{or_cpu}"
        )


def check_buffer(name: str, x: Tensor, of: Operands) -> None:
    """Raise TypeError or ValueError unless the gradient of w (V, D) can be added to x."""
    check_constant(name, x)
    dtypes = dict.fromkeys((torch.promote_types(of.w.dtype, torch.float32), of.w.dtype))
    if x.dtype not in dtypes:
        raise TypeError(f"{name}: got dtype {x.dtype}, expected {' or '.join(map(str, dtypes))}")
    _check_place(name, x, of, of.w.shape)
    if not x.is_contiguous():
        raise ValueError(f"{name}: got strides {x.stride()}, expected a contiguous tensor")


def check_apart(name: str, x: Tensor, **others: Tensor) -> None:
    """Raise ValueError if x shares memory with one of the `others`, by name."""
    for other, y in others.items():
        if _overlap(x, y):
            raise ValueError(f"{name}: got the memory of {other}, expected its own")


def _overlap(a: Tensor, b: Tensor) -> bool:
    """Return whether a byte of b lies between the first and the last one of a, or the reverse."""
    if not (a.numel() and b.numel() and torch_compat.shares_memory(a, b)):
        return False
    (first_a, end_a), (first_b, end_b) = _bytes_of(a), _bytes_of(b)
    return bool(first_a < end_b and first_b < end_a)


def _bytes_of(x: Tensor) -> tuple[Any, Any]:
    """Return the first byte of x in its storage, and that behind its last one."""
    first, size = x.storage_offset(), x.element_size()
    last = first + sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True))
    return first * size, (last + 1) * size


def _check_floats(name: str, x: Tensor, of: Operands, shape: Sequence[int]) -> None:
    check_dtype(name, x)
    _check_place(name, x, of, shape)


def _check_place(name: str, x: Tensor, of: Operands, shape: Sequence[int]) -> None:
    if tuple(x.shape) != tuple(shape):
        raise ValueError(f"{name}: got shape {tuple(x.shape)}, expected {tuple(shape)}")
    check_device(name, x, of.h, of.input)


BIAS = TENSOR_OR_NONE.checked_by(check_bias)
OF_CLASSES = TENSOR_OR_NONE.checked_by(lambda name, x, of: check_floats(name, x, of, (of.vocab,)))
OF_TOKENS = TENSOR_OR_NONE.checked_by(lambda name, x, of: check_floats(name, x, of, of.tokens))
BUFFER = TENSOR_OR_NONE.checked_by(check_buffer)
TEMPERATURE = (
    Type("Tensor?", (Tensor, *NUMBERS), "a number or a tensor")
    .of(lambda x: 0 < x < math.inf, "a finite number above 0")
    .checked_by(check_temperature)
)
SCALAR = Type("Tensor?", (Tensor, *NUMBERS, NONE), "a number, a tensor or None").checked_by(
    check_scalar
)
UPSTREAM = SCALAR.of(lambda x: -math.inf < x < math.inf, "a finite number")
DIVISOR = SCALAR.of(lambda x: 0 <= x < math.inf, "a finite number, 0 or more")
