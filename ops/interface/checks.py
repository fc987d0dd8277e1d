"""Checks of a call's arguments, made before anything is allocated.

Other errors are raised elsewhere: placements of DTensors in `ops.parallel.dtensor`, disagreement
of ranks in `ops.parallel.shard` and `ops.parallel.consistency`, targets outside the vocabulary in
`ops.rows.targets` and, across ranks, in `ops.parallel.primitives`.
"""

from collections.abc import Sequence
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor

from cutefce.cute_kernels.problem import ITEM_BYTES
from cutefce.ops import torch_compat
from cutefce.ops.planning import budget

DTYPES = {getattr(torch, name) for name in ITEM_BYTES}
REDUCTIONS = ("mean", "sum", "none")
OUTPUTS = ("lse", "entropy", "sum_p_squared", "mean_logit", "is_top1", "argmax")
"""What `linear_log_probs` can return beside the log-probabilities."""
OF_ALL = {"entropy", "sum_p_squared"}
"""Those of sums over all classes."""
OF_OTHERS = {"is_top1", "argmax"}
"""Those of reductions over all classes but the target."""
INTEGERS = Integral, torch.SymInt
NUMBERS = Real, torch.SymInt, torch.SymFloat

ARGUMENT_TYPES: dict[str, tuple[tuple[Any, ...], str]] = {
    "input": ((Tensor,), "a tensor"),
    "linear_weight": ((Tensor,), "a tensor"),
    "target": ((Tensor,), "a tensor"),
    "target_indices": ((Tensor, type(None)), "a tensor or None"),
    "target_probs": ((Tensor, type(None)), "a tensor or None"),
    "reduction": ((str,), "a string"),
    "ignore_index": ((*INTEGERS, type(None)), "an integer or None"),
    "workspace": ((*INTEGERS, str, type(None)), 'bytes as an integer, "min", "max" or None'),
    "linear_bias": ((Tensor, type(None)), "a tensor or None"),
    "weight": ((Tensor, type(None)), "a tensor or None"),
    "token_weights": ((Tensor, type(None)), "a tensor or None"),
    "accumulate_into": ((Tensor, type(None)), "a tensor or None"),
    "grad_output": ((Tensor, *NUMBERS, type(None)), "a number, a tensor or None"),
    "temperature": ((Tensor, *NUMBERS), "a number or a tensor"),
    "denominator": ((Tensor, *NUMBERS, type(None)), "a number, a tensor or None"),
    "label_smoothing": (NUMBERS, "a number"),
    "z_loss": (NUMBERS, "a number"),
    "logit_scale": (NUMBERS, "a number"),
    "softcap": ((*NUMBERS, type(None)), "a number or None"),
    "gradient": ((str,), "a string"),
    "samples": (INTEGERS, "an integer"),
    "in_features": (INTEGERS, "an integer"),
    "num_classes": (INTEGERS, "an integer"),
    "out_features": ((Sequence,), "a tuple of integers"),
    "bias": ((bool,), "a bool"),
    "outputs": ((Sequence,), "a sequence of strings"),
    "shards": ((Sequence, type(None)), "a sequence of integers or None"),
    "sequence_parallel": ((bool,), "a bool"),
    "student_input": ((Tensor,), "a tensor"),
    "student_weight": ((Tensor,), "a tensor"),
    "teacher_input": ((Tensor,), "a tensor"),
    "teacher_weight": ((Tensor,), "a tensor"),
    "student_bias": ((Tensor, type(None)), "a tensor or None"),
    "teacher_bias": ((Tensor, type(None)), "a tensor or None"),
    "divergence": ((str,), "a string"),
    "beta": ((*NUMBERS, type(None)), "a number or None"),
    "enabled": ((bool,), "a bool"),
    "evaluation": ((bool,), "a bool"),
    "return_lse": ((bool,), "a bool"),
}
"""Types of the arguments of the public functions, and how an error names them.

`group` is checked in `ops.parallel.dtensor`.
"""

REMOVED = {
    "accum_dtype": ": sums of dW are not rounded to bfloat16 any more; a smaller `workspace` takes "
    "less memory"
}
"""Arguments of earlier versions, and what to do without them."""


def check_type(name: str, value: Any) -> None:
    """Raise TypeError unless the argument called `name` is of its type in `ARGUMENT_TYPES`.

    A name that is not there is that of no argument.
    """
    if name not in ARGUMENT_TYPES:
        raise TypeError(
            f"{name}: got {_shown(value)}, expected no such argument{REMOVED.get(name, '')}"
        )
    types, expected = ARGUMENT_TYPES[name]
    # a string is a sequence, a bool an integer
    wrong_kind = any(isinstance(value, kind) and kind not in types for kind in (bool, str))
    if wrong_kind or not isinstance(value, types):
        raise TypeError(f"{name}: got {_shown(value)}, expected {expected}")


def check_types(**arguments: Any) -> None:
    """Raise TypeError for the first argument that is not of its type."""
    for name, value in arguments.items():
        check_type(name, value)
    for rows in arguments.get("shards") or ():
        if isinstance(rows, bool) or not isinstance(rows, INTEGERS):
            raise TypeError(f"shards: got {_shown(rows)} among them, expected integers")


def type_error(**arguments: Any) -> TypeError | None:
    """Return the error of the first argument that is not of its type, None if all are."""
    try:
        check_types(**arguments)
    except TypeError as error:
        return error
    return None


def check_transform(name: str) -> None:
    """Raise NotImplementedError for a call of the function `name` under a transform.

    In a compiled call the operators do, when they run.
    """
    if not torch.compiler.is_compiling() and torch_compat.is_transformed():
        raise NotImplementedError(
            f"{name}: got a call under a transform of torch.func or in forward mode, expected "
            "torch.autograd in reverse mode"
        )


def _shown(value: Any) -> str:
    """Return a short form of a wrong argument: its value if it has a short one."""
    text = repr(value)
    kind = type(value).__name__
    return f"{text} ({kind})" if len(text) <= 40 and "\n" not in text else f"a value of type {kind}"


def check_tensors(h: Tensor, w: Tensor, y: Tensor, parts: int = 1) -> None:
    """Raise TypeError or ValueError unless h (..., D), w (V, D) and y (...) fit together.

    `parts` is the number of ranks whose h, one after another, have the tokens of y.
    """
    for name, x in (("input", h), ("linear_weight", w), ("target", y)):
        check_type(name, x)
        if torch_compat.is_dtensor(x):
            raise TypeError(
                f"{name}: got a DTensor with placements {x.placements}, expected a plain tensor; "
                f"pass {name}.full_tensor(), or call cutefce.linear_cross_entropy with a "
                "linear_weight that is sharded over the vocabulary"
            )
        check_layout(name, x)
    _check_head_dtypes(h, w)
    if y.dtype == torch.bool or y.is_floating_point() or y.is_complex():
        raise TypeError(f"target: got dtype {y.dtype}, expected integers (class indices)")
    _check_shapes(h, w, y, parts)
    _check_device("linear_weight", w, h)
    _check_device("target", y, h)


def check_head(h: Tensor, w: Tensor) -> None:
    """Raise TypeError or ValueError unless h (..., D) and w (V, D), maybe to be cast, fit."""
    for name, x in (("input", h), ("linear_weight", w)):
        check_type(name, x)
        check_layout(name, x)
    is_cast = w.dtype == torch.float32 and h.dtype.itemsize == 2
    _check_head_dtypes(h, h if is_cast else w)
    _check_widths(h, w)
    _check_device("linear_weight", w, h)


def check_accumulates(linear_weight: Tensor) -> None:
    """Raise unless the weight has a gradient that a backward can add to a buffer."""
    if not linear_weight.requires_grad:
        raise ValueError(
            "accumulate_into: got a buffer for a linear_weight that does not require grad, "
            "expected None"
        )


def check_layout(name: str, x: Tensor) -> None:
    """Raise TypeError for a nested or a sparse tensor."""
    if x.is_nested:
        raise TypeError(f"{name}: got a nested tensor, expected a plain one; pass its values")
    if x.layout != torch.strided:
        raise TypeError(f"{name}: got layout {x.layout}, expected {torch.strided}")


def _check_device(name: str, x: Tensor, h: Tensor) -> None:
    if x.device != h.device:
        raise ValueError(f"{name}: got device {x.device}, expected that of input, {h.device}")


def check_dtype(name: str, x: Tensor) -> None:
    """Raise TypeError unless x has a floating-point dtype that calls take."""
    if x.dtype not in DTYPES:
        expected = f"one of {', '.join(ITEM_BYTES)}"
        hint = f"; pass {name}.float()" if x.dtype == torch.bool else ""
        raise TypeError(f"{name}: got dtype {x.dtype}, expected {expected}{hint}")


def _check_head_dtypes(h: Tensor, w: Tensor) -> None:
    check_dtype("input", h)
    if w.dtype != h.dtype:
        raise TypeError(
            f"linear_weight: got dtype {w.dtype}, expected that of input, {h.dtype}; "
            "cast one of them, or call under torch.autocast"
        )


def _check_widths(h: Tensor, w: Tensor) -> None:
    if w.ndim != 2 or 0 in w.shape:
        raise ValueError(
            f"linear_weight: got shape {tuple(w.shape)}, expected (V, D) with V >= 1 and D >= 1; "
            "gather it first if it is a sharded parameter"
        )
    if h.ndim == 0 or not are_equal("input", h.shape[-1:], w.shape[1:]):
        if h.ndim > 0 and h.shape[-1] == w.shape[0]:
            raise ValueError(
                f"linear_weight: got shape {tuple(w.shape)}, expected (V, {h.shape[-1]}) to match "
                f"input of shape {tuple(h.shape)}; pass linear_weight.t()"
            )
        raise ValueError(
            f"input: got shape {tuple(h.shape)}, expected (..., {w.shape[1]}) "
            f"to match linear_weight of shape {tuple(w.shape)}"
        )


def _check_shapes(h: Tensor, w: Tensor, y: Tensor, parts: int) -> None:
    _check_widths(h, w)
    if parts > 1 and h.ndim == 1:
        raise ValueError(f"input: got shape {tuple(h.shape)}, expected a dimension of tokens first")
    tokens = token_shape(h, parts)
    if not are_equal("target", y.shape, tokens):
        shared = f", of which {parts} ranks hold a part each" if parts > 1 else ""
        raise ValueError(
            f"target: got shape {tuple(y.shape)}, expected {tokens} "
            f"to match input of shape {tuple(h.shape)}{shared}"
        )


def token_shape(h: Tensor, parts: int) -> tuple[int, ...]:
    """Return the shape (...) of all tokens; `parts` ranks have h (..., D), one after another."""
    return (parts * h.shape[0], *h.shape[1:-1]) if h.ndim > 1 else ()


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


def check_reduction(reduction: str) -> None:
    """Raise ValueError for an unknown reduction."""
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction: got {reduction!r}, expected one of {REDUCTIONS}")


def check_ignore_index(ignore_index: int) -> None:
    """Raise TypeError or ValueError unless it is an integer of 64 bits."""
    check_type("ignore_index", ignore_index)
    if not -(1 << 63) <= ignore_index < 1 << 63:
        raise ValueError(f"ignore_index: got {ignore_index}, expected an integer of 64 bits")


def workspace_bytes(workspace: int | str | None) -> int:
    """Return the budget in bytes that `workspace` means: bytes, "min", "max" or None."""
    check_type("workspace", workspace)
    if isinstance(workspace, str):
        named = {"min": budget.MINIMUM, "max": budget.MAXIMUM}
        if workspace not in named:
            raise ValueError(f'workspace: got {workspace!r}, expected bytes, "min", "max" or None')
        return named[workspace]
    if workspace is None:
        return budget.DEFAULT
    if not 0 <= workspace < 1 << 63:
        raise ValueError(f'workspace: got {workspace}, expected bytes from 0 to 2**63 - 1 or "max"')
    return min(workspace, budget.MAXIMUM)


def rank_count(group: str | None, shards: Sequence[int] | None, sequence_parallel: bool) -> int:
    """Return the number of ranks that share a call; raise ValueError for what needs a group."""
    if group is not None:
        return torch_compat.resolve_process_group(group).size()
    for name, value in (("shards", shards), ("sequence_parallel", sequence_parallel)):
        if value:
            raise ValueError(f"{name}: got {value} without a group, expected a group")
    return 1


def check_shards(group: str | None, shards: Sequence[int] | None, w: Tensor) -> None:
    """Raise ValueError unless `shards` are sizes of all ranks' weights, w (V_k, D) being here."""
    if group is None or shards is None:
        return
    process_group = torch_compat.resolve_process_group(group)
    rank, ranks = process_group.rank(), process_group.size()
    if len(shards) != ranks or min(shards) < 1 or shards[rank] != w.shape[0]:
        raise ValueError(
            f"shards: got {list(shards)}, expected the rows of linear_weight of {ranks} ranks, "
            f"each at least 1, and {w.shape[0]} for rank {rank}"
        )


def refuse_options(options: Any) -> None:
    """Raise NotImplementedError for chunking options of torch that ask for something."""
    if options is not None and (not isinstance(options, (int, float, tuple, list)) or options):
        raise NotImplementedError(
            f"options: got {_shown(options)}, expected None: `workspace` bounds the memory"
        )
