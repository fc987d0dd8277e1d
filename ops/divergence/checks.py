"""Checks of a divergence's arguments, made before anything is allocated."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cutefce.ops.dtypes import sum_dtype
from cutefce.ops.interface import checks
from cutefce.ops.interface.arguments import (
    LossOptions,
    Sharding,
    check_arguments,
    check_divides,
    check_tensors,
    scalar_beside,
)
from cutefce.ops.interface.checks import Operands
from cutefce.ops.interface.heads import check_head, check_plain, check_targets
from cutefce.ops.interface.scalars import as_tensor
from cutefce.ops.operators.context import autocast, wanted_gradients
from cutefce.ops.parallel.dtensor import replicated

NAMES = "student_input", "student_weight", "teacher_input", "teacher_weight"
DEFAULTS = LossOptions()
PAIRS: dict[str, Any] = {"logit_scale": 1.0, "softcap": None, "temperature": 1.0}
"""Options that the sides may have different values of, with their defaults."""
Heads = Sequence[tuple[Tensor, Tensor]]
"""Hidden states and weight, of the student and of the teacher."""


class DivergenceCall(NamedTuple):
    """A call whose arguments are right, as the operator takes them."""

    heads: Heads
    """(N, D) and (V, D)"""
    target: Tensor | None
    """(N,) int64"""
    arguments: dict[str, Any]
    """The others by name: the fields of `options.RECORDS`."""
    tokens: tuple[int, ...]
    """The shape (...) of the tokens."""


def checked_call(
    sides: Sequence[Tensor], target: Tensor | None, given: dict[str, Any]
) -> DivergenceCall:
    """Return a call of the tensors `NAMES`; raise an error that names an argument.

    `given` are the other arguments of `linear_divergence`, by name.
    """
    check_arguments({name: x for name, x in given.items() if name not in PAIRS})
    pairs: dict[str, Sequence[Any]] = {
        name: pair(name, given.get(name, default)) for name, default in PAIRS.items()
    }
    heads = autocast(*sides[:2]), autocast(*sides[2:])
    check_heads(*heads)
    h, w = heads[0]
    sharding = Sharding.of(given)
    sharding.check(w)
    of = Operands(h, w, h.shape[:-1], sharding.vocab(w), "student_input")
    check_target(target, of)
    biases = given.get("student_bias"), given.get("teacher_bias")
    check_tensors(dict(zip(("student_bias", "teacher_bias"), biases, strict=True)), of)
    divergence, share = checked_form(given.get("divergence", "forward_kl"), given.get("beta"))
    reduction = given.get("reduction", DEFAULTS.reduction)
    ignored = given.get("ignore_index", DEFAULTS.ignore_index)
    denominator = checked("denominator", given.get("denominator"), of)
    if denominator is not None:
        check_divides(reduction)
        denominator = scalar_beside(denominator, h)
    arguments = {  # no record, whose methods a graph compiler cannot trace
        "denominator": denominator,
        "divergence": divergence,
        "beta": share,
        "reduction": reduction,
        "ignore_index": ignored,
        "workspace": checks.workspace_bytes(given.get("workspace")),
        "trained": [x for i in (0, 1) for x in wanted_gradients(*heads[i], biases[i])],
        "group": sharding.group,
        "shards": sharding.shards,
    }
    pairs["temperature"] = [
        None if not isinstance(x, Tensor) and x == 1 else checked("temperature", x, of)
        for x in pairs["temperature"]
    ]
    for name, values in (pairs | {"bias": biases}).items():
        arguments |= {f"student_{name}": values[0], f"teacher_{name}": values[1]}
    if target is not None:
        if target.dtype == torch.bool:
            target = torch.where(target, ignored ^ 1, ignored)
        target = target.reshape(-1).long()
    flat = [(h.reshape(-1, h.shape[-1]), w) for h, w in heads]
    return DivergenceCall(flat, target, arguments, of.tokens)


def checked(name: str, value: Tensor | float | None, of: Operands) -> Tensor | None:
    """Return the argument `name`, a number or a tensor, as a tensor () or (N,) that fits the call.

    Raises:
        TypeError, ValueError: for a tensor that does not.
    """
    if value is None:
        return None
    x = replicated(name, as_tensor(name, value, of.h))
    check_tensors({name: x}, of)
    return x.reshape(-1) if x.ndim else x


def checked_form(divergence: str, beta: float | None) -> tuple[str, float]:
    """Return the divergence, and the teacher's share of a JSD's mixture: 0.5 if `beta` is None.

    A JSD whose share leaves out one side is another divergence.

    Raises:
        ValueError: for a `beta` beside a divergence other than "jsd".
    """
    if beta is not None and divergence != "jsd":
        raise ValueError(
            f"beta: got {beta} with divergence={divergence!r}, expected None, or divergence='jsd'"
        )
    share = 0.5 if beta is None else beta
    if divergence == "jsd" and share in (0, 1):
        divergence = "reverse_kl" if share else "forward_kl"
    return divergence, share


def pair(name: str, value: Any) -> tuple[Any, Any]:
    """Return the values of student and teacher of an option: a pair, or one value for both.

    Raises:
        TypeError, ValueError: for a pair of another length, or of values of another type.
    """
    if isinstance(value, Sequence) and not isinstance(value, str):
        if len(value) != 2:
            raise ValueError(
                f"{name}: got a sequence of {len(value)}, expected a number, or two: those of "
                "student and teacher"
            )
        student, teacher = value
    else:
        student = teacher = value
    for x in (student, teacher):
        check_arguments({name: x})
    return student, teacher


def check_heads(student: tuple[Tensor, Tensor], teacher: tuple[Tensor, Tensor]) -> None:
    """Raise TypeError or ValueError unless (..., D) and (V, D) of both sides fit together."""
    for names, (h, w) in ((NAMES[:2], student), (NAMES[2:], teacher)):
        check_head(h, w, names, "{}.to_local() with a group")
    (h_s, w_s), (h_t, w_t) = student, teacher
    if h_t.shape[:-1] != h_s.shape[:-1]:
        raise ValueError(
            f"teacher_input: got shape {tuple(h_t.shape)}, expected "
            f"{(*h_s.shape[:-1], h_t.shape[-1])} to match student_input of shape "
            f"{tuple(h_s.shape)}"
        )
    if w_t.shape[0] != w_s.shape[0]:
        raise ValueError(
            f"teacher_weight: got {w_t.shape[0]} rows, expected {w_s.shape[0]}, the classes of "
            "student_weight; pass the rows of the classes that both have"
        )
    if sum_dtype(h_t.dtype) != sum_dtype(h_s.dtype):
        raise TypeError(
            f"teacher_input: got dtype {h_t.dtype} beside a student_input of {h_s.dtype}, expected "
            "both or none to be float64"
        )
    for name, x in (("student_weight", w_s), ("teacher_input", h_t), ("teacher_weight", w_t)):
        checks.check_device(name, x, h_s, "student_input")


def check_target(target: Tensor | None, of: Operands) -> None:
    """Raise TypeError or ValueError unless it is integers of the shape of the tokens, or None."""
    if target is None:
        return
    check_plain("target", target, "{}.to_local() with a group")
    if not checks.has_integers(target) and target.dtype != torch.bool:
        raise TypeError(
            f"target: got dtype {target.dtype}, expected integers, ignore_index where a token does "
            "not count, or a mask of booleans"
        )
    check_targets(target, of.tokens, of.h, of.input)
