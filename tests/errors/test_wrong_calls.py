"""An error names the argument, what was got and what is expected, and leaves nothing behind."""

import functools
import re
import sys
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import cutefce
from tests.errors.calls import MODULE, Call, calls_on, with_gradients
from tests.errors.rows import OPERATORS, WRONG, WRONG_VALUES, Row
from tests.support.reference import are_same

NAMES = list(calls_on("cpu"))
NAMED = re.compile(r"\w+: got .+\bexpected ", re.DOTALL)
ELSEWHERE = {"device", "dtype", "model"}
"""Arguments whose errors are torch's, and those of deferral's own tests."""


def rows_of(table: dict[str, list[Row]]) -> list[Any]:
    return [
        pytest.param(argument, row, id=f"{argument}: {row.said}")
        for argument in table
        for row in table[argument]
    ]


@pytest.mark.parametrize("name", NAMES)
def test_valid_calls_are_right(name: str, device: str) -> None:
    call = calls_on(device)[name]
    expected = with_gradients(call.expected, call.leaves)
    for got, want in zip(call.right, expected[: len(call.right)], strict=True):
        if isinstance(want, Tensor):
            torch.testing.assert_close(got, want)
        else:
            assert got == want


@pytest.mark.parametrize("name", [name for name in NAMES if name not in OPERATORS])
def test_every_argument_has_a_row(name: str) -> None:
    checked = {
        argument for argument in WRONG for row in WRONG[argument] if name in row.calls(argument)
    }
    assert not calls_on("cpu")[name].names - checked - ELSEWHERE


@pytest.mark.parametrize(("argument", "row"), rows_of(WRONG))
def test_wrong_arguments(argument: str, row: Row, device: str) -> None:
    check_errors(argument, row, device)


@pytest.mark.parametrize(("argument", "row"), rows_of(WRONG_VALUES))
def test_wrong_values_of_tensors(argument: str, row: Row) -> None:
    check_errors(argument, row, "cpu")


def check_errors(argument: str, row: Row, device: str) -> None:
    """Make the wrong calls of a row, a right one after each, and a step after all."""
    calls, loss = row.calls(argument, device), calls_on(device)["loss"]
    step = loss.right
    assert calls
    for name, call in calls.items():
        result, change = call.right[0], row.change(argument, call, device)
        given = [x for x in (*call.valid.values(), *change.values()) if isinstance(x, Tensor)]
        versions, references = versions_of(given), references_of(given)
        error, message = error_of(call, change)
        assert issubclass(error, row.error), f"{name}: {error}: {message}"
        assert message.startswith(f"{argument}: {row.said}"), f"{name}: {message}"
        assert NAMED.match(message), f"{name}: {message}"
        assert versions_of(given) == versions, f"{name} writes an argument"
        new = zip(references_of(given), references, strict=True)
        assert all(now <= before for now, before in new), f"{name} keeps an argument"
        assert are_alike(call(), result), f"{name} is not right any more"
    assert all(map(are_same, loss.outcome(), step))


def error_of(call: Call, change: dict[str, Any]) -> tuple[type[Exception], str]:
    """Return the type and the message of the error of a call."""
    try:
        call(**change)
    except Exception as error:
        return type(error), str(error)
    pytest.fail(f"no error of {call.function} with {change}")


def versions_of(tensors: list[Tensor]) -> list[int]:
    """Return how often each tensor was written in place."""
    return [x._version for x in tensors]


def references_of(tensors: list[Tensor]) -> list[int]:
    return [sys.getrefcount(x) for x in tensors]


def are_alike(got: Any, want: Any) -> bool:
    return are_same(got.detach(), want) if isinstance(want, Tensor) else bool(got == want)


@pytest.mark.parametrize(
    ("function", "name", "where"),
    [
        (functools.partial(cutefce.defer, nn.Linear(8, 10)), "softcap", ": defer reads it from"),
        (functools.partial(MODULE, 8, 10), "temperature", "; pass it to the call"),
    ],
)
def test_an_argument_that_belongs_elsewhere(function: Any, name: str, where: str) -> None:
    with pytest.raises(TypeError, match=rf"^{name}: got 2.0 .*expected no such argument{where}"):
        function(**{name: 2.0})


def test_too_many_arguments_without_names(device: str) -> None:
    call = calls_on(device)["loss"]
    with pytest.raises(TypeError, match=r"^target: got 4 arguments without names, expected names"):
        call.function(*call.valid.values(), torch.ones(10))


def test_a_part_of_a_name_of_defer_is_completed() -> None:
    with pytest.raises(TypeError, match=r"^eval: got True .*; did you mean `evaluation`\?$"):
        cutefce.defer(nn.Linear(8, 10), eval=True)


TAKEN: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "workspace": ("max", (2**63 - 1,)),
    "denominator": (torch.tensor(2.0), (2, 2.0, np.float32(2), np.int64(2), np.float64(2))),
    "options": (None, (False, 0, 0.0, (), [])),
}
"""A value of an argument, and others that mean the same."""


@pytest.mark.parametrize(
    ("argument", "same", "value"),
    [(argument, same, value) for argument, (same, values) in TAKEN.items() for value in values],
)
def test_values_at_the_edge_are_taken(argument: str, same: Any, value: Any, device: str) -> None:
    calls = Row(value, TypeError, "").calls(argument, device).values()
    assert calls
    for call in calls:
        got, want = (call(**{argument: x}) for x in (value, same))
        assert are_alike(got, want.detach() if isinstance(want, Tensor) else want)


def test_a_buffer_has_none_of_the_memory_of_a_bias(device: str) -> None:
    call, sums = calls_on(device)["loss"], torch.zeros(10, 8, device=device)
    with pytest.raises(ValueError, match=r"^accumulate_into: got the memory of linear_bias, expec"):
        call(linear_bias=sums.view(-1)[5:15], accumulate_into=sums)


def test_a_buffer_has_none_of_the_memory_of_a_weight_that_is_cast(device: str) -> None:
    call, w = calls_on(device)["loss"], torch.randn(10, 8, device=device)
    h = call.valid["input"].detach()
    given = {"linear_weight": w.requires_grad_(), "accumulate_into": w.detach()}
    for dtype, is_mixed in ((torch.bfloat16, True), (torch.float32, False)):
        with (
            torch.autocast(device, torch.bfloat16, enabled=not is_mixed),
            pytest.raises(ValueError, match=r"^accumulate_into: got the memory of linear_weight"),
        ):
            call(input=h.to(dtype), **given)


def test_a_batched_backward_adds_nothing_to_a_buffer(device: str) -> None:
    call, sums = calls_on(device)["loss"], torch.zeros(10, 8, device=device)
    h = call.valid["input"].detach().requires_grad_()
    losses = call(input=h, accumulate_into=sums, reduction="none")
    upstreams = torch.eye(4, device=device)
    with pytest.raises(NotImplementedError, match=r"^cutefce: got a backward with is_grads_batch"):
        torch.autograd.grad(losses, h, upstreams, is_grads_batched=True)
    assert not sums.any()


def test_the_gradient_of_entropy_with_softcap_is_refused(device: str) -> None:
    valid = calls_on(device)["log_probs"].valid
    values = cutefce.linear_log_probs(**valid, outputs=["lse", "entropy"], softcap=3.0)
    assert values.entropy is not None and values.lse is not None
    with pytest.raises(NotImplementedError, match=r"^softcap: got one with 'entropy' in outputs"):
        (values.log_probs.sum() + values.entropy.sum()).backward(retain_graph=True)
    total = values.log_probs.sum() + values.lse.sum()
    (gradient,) = torch.autograd.grad(total, valid["input"])
    assert gradient.any()
