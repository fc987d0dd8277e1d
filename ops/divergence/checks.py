"""Checks of a divergence's arguments, made before anything is allocated."""

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from cutefce.ops import torch_compat
from cutefce.ops.divergence.options import DIVERGENCES
from cutefce.ops.dtypes import sum_dtype
from cutefce.ops.interface import checks, option_checks
from cutefce.ops.interface.scalars import as_tensor
from cutefce.ops.operators.context import autocast
from cutefce.ops.parallel.dtensor import check_group

T = TypeVar("T")
Heads = tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Hidden states (..., D) and weight (V, D), of the student and of the teacher."""


def checked_heads(
    given: tuple[Tensor, Tensor, Tensor, Tensor],
    target: Tensor | None,
    biases: tuple[Tensor | None, Tensor | None],
    group: ProcessGroup | None,
    shards: Sequence[int] | None,
) -> tuple[Heads, str | None]:
    """Return the heads, cast as `F.linear` casts them, and the name of the group.

    Raises:
        TypeError, ValueError: for tensors that do not fit together, or a wrong group.
    """
    check_group(group)
    checks.check_type("shards", shards)
    names = "student_input", "student_weight", "teacher_input", "teacher_weight"
    for name, x in zip(names, given, strict=True):
        checks.check_type(name, x)
    heads = autocast(*given[:2]), autocast(*given[2:])
    check_heads(*heads)
    h, w = heads[0]
    named = None if group is None else group.group_name
    checks.rank_count(named, shards, False)
    checks.check_shards(named, shards, w)
    check_target(target, h)
    for name, bias in zip(("student_bias", "teacher_bias"), biases, strict=True):
        check_bias(name, bias, h, w)
    return heads, named


def checked_ignore_index(reduction: str, ignore_index: int | None) -> int:
    """Return the index of ignored targets; raise TypeError or ValueError for it or a reduction."""
    checks.check_type("reduction", reduction)
    checks.check_reduction(reduction)
    ignored = -100 if ignore_index is None else ignore_index
    checks.check_ignore_index(ignored)
    return ignored


def temperatures(temperature: Any, h: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Return those of student and teacher as () or (N,), None for 1, of h (..., D).

    Raises:
        TypeError, ValueError: for one that is neither a number above 0 nor a tensor that fits.
    """
    results: list[Tensor | None] = []
    for given in pair("temperature", temperature):
        if not isinstance(given, Tensor) and given == 1:
            results.append(None)
            continue
        x = as_tensor("temperature", given, h)
        check_temperature(x, h)
        results.append(x.reshape(-1) if x.ndim else x)
    student, teacher = results
    return student, teacher


def checked_share(divergence: str, beta: float | None) -> float:
    """Return the teacher's share of a JSD's mixture: `beta`, or 0.5 for None.

    Raises:
        TypeError, ValueError: for an unknown divergence, a share outside 0 to 1, or one of a KL.
    """
    checks.check_type("divergence", divergence)
    checks.check_type("beta", beta)
    if divergence not in DIVERGENCES:
        raise ValueError(f"divergence: got {divergence!r}, expected one of {DIVERGENCES}")
    if beta is None:
        return 0.5
    if not 0 <= beta <= 1:
        raise ValueError(f"beta: got {beta}, expected a number from 0 to 1")
    if divergence != "jsd":
        raise ValueError(
            f"beta: got {beta} with divergence={divergence!r}, expected None, or divergence='jsd'"
        )
    return beta


def form(divergence: str, share: float) -> str:
    """Return the divergence, that of a JSD whose share leaves out one side."""
    if divergence == "jsd" and share in (0, 1):
        return "reverse_kl" if share else "forward_kl"
    return divergence


def gradients(h: Tensor, w: Tensor, bias: Tensor | None) -> list[bool]:
    """Return whether the gradients of hidden states, weight and bias are computed."""
    grad = torch.is_grad_enabled()
    given = h, w, bias
    return [grad and x is not None and x.requires_grad for x in given]


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
        checks.check_type(name, x)
    return student, teacher


def check_numbers(scales: tuple[float, float], softcaps: tuple[Any, Any]) -> None:
    """Raise ValueError for a scale of 0, or a softcap that is not above 0."""
    for scale, softcap in zip(scales, softcaps, strict=True):
        option_checks.check_numbers(0.0, 0.0, scale, softcap)


def check_heads(student: tuple[Tensor, Tensor], teacher: tuple[Tensor, Tensor]) -> None:
    """Raise TypeError or ValueError unless (..., D) and (V, D) of both sides fit together."""
    for side, (h, w) in (("student", student), ("teacher", teacher)):
        _check_head(side, h, w)
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
        _check_device(name, x, h_s)


def _check_head(side: str, h: Tensor, w: Tensor) -> None:
    for name, x in ((f"{side}_input", h), (f"{side}_weight", w)):
        checks.check_type(name, x)
        if torch_compat.is_dtensor(x):
            raise TypeError(
                f"{name}: got a DTensor with placements {x.placements}, expected a plain tensor; "
                f"pass {name}.full_tensor(), or {name}.to_local() with a group"
            )
        checks.check_layout(name, x)
    checks.check_dtype(f"{side}_input", h)
    if w.dtype != h.dtype:
        raise TypeError(
            f"{side}_weight: got dtype {w.dtype}, expected that of {side}_input, {h.dtype}; "
            "cast one of them, or call under torch.autocast"
        )
    if w.ndim != 2 or 0 in w.shape:
        raise ValueError(
            f"{side}_weight: got shape {tuple(w.shape)}, expected (V, D) with V >= 1 and D >= 1; "
            "gather it first if it is a sharded parameter"
        )
    if h.ndim == 0 or h.shape[-1] != w.shape[1]:
        raise ValueError(
            f"{side}_input: got shape {tuple(h.shape)}, expected (..., {w.shape[1]}) "
            f"to match {side}_weight of shape {tuple(w.shape)}"
        )


def check_bias(name: str, bias: Tensor | None, h: Tensor, w: Tensor) -> None:
    """Raise TypeError or ValueError unless it is (V,) floating-point, of w (V, D), or None."""
    checks.check_type(name, bias)
    if bias is None:
        return
    checks.check_layout(name, bias)
    checks.check_dtype(name, bias)
    if bias.shape != w.shape[:1]:
        raise ValueError(f"{name}: got shape {tuple(bias.shape)}, expected {tuple(w.shape[:1])}")
    _check_device(name, bias, h)


def check_target(target: Tensor | None, h: Tensor) -> None:
    """Raise TypeError or ValueError unless it is integers of the shape of h's tokens, or None."""
    if target is None:
        return
    checks.check_type("target", target)
    checks.check_layout("target", target)
    if target.is_floating_point() or target.is_complex():
        raise TypeError(
            f"target: got dtype {target.dtype}, expected integers, ignore_index where a token does "
            "not count, or a mask of booleans"
        )
    if target.shape != h.shape[:-1]:
        raise ValueError(
            f"target: got shape {tuple(target.shape)}, expected {tuple(h.shape[:-1])} "
            f"to match student_input of shape {tuple(h.shape)}"
        )
    _check_device("target", target, h)


def check_temperature(temperature: Tensor, h: Tensor) -> None:
    """Raise TypeError or ValueError unless it is () or of the shape of h's tokens, a constant."""
    _check_device("temperature", temperature, h)
    option_checks.check_temperature(temperature, h, h.shape[:-1])


def check_denominator(denominator: Tensor, h: Tensor, reduction: str) -> None:
    """Raise TypeError or ValueError unless it is () or (1,), and fits `reduction`."""
    if denominator.device.type != "cpu":
        _check_device("denominator", denominator, h)
    option_checks.check_denominator(denominator, h, reduction)


def _check_device(name: str, x: Tensor, h: Tensor) -> None:
    if x.device != h.device:
        raise ValueError(
            f"{name}: got device {x.device}, expected that of student_input, {h.device}"
        )
