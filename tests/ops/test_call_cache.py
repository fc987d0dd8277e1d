"""Repeated calls skip checks and kernel lookup; calls that differ do not."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import cutefce
from cutefce.cute_kernels import process_cache
from cutefce.cute_kernels.arch.sm90 import Sm90
from cutefce.cute_kernels.gpu import Gpu
from cutefce.ops.interface import call_cache, checks
from cutefce.ops.interface.checks import check_tensors
from cutefce.ops.interface.options import LossOptions
from cutefce.ops.primitives import dispatch
from tests.support.kernel_models import use_models
from tests.support.modes import Seen
from tests.support.reference import random_case

FORWARD = torch.ops.cutefce.forward.default


@pytest.fixture(autouse=True)
def on_kernels(device: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Serve calls by the kernels; on a CPU by models of them."""
    if device == "cpu":
        pytest.importorskip("cutlass")
        use_models(monkeypatch)
        monkeypatch.setattr(dispatch, "_device_unsupported_reason", lambda device, dtype: None)
        monkeypatch.setattr(dispatch, "gpu_of", lambda device: Gpu(Sm90(), "a model", 132))
        monkeypatch.setattr(call_cache, "is_on_current_gpu", lambda x: True)
    process_cache.reset()
    yield
    process_cache.reset()


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return a list that grows with each call whose inputs are checked."""
    calls: list[Any] = []

    def note(*inputs: Any) -> None:
        calls.append(inputs)
        check_tensors(*inputs)

    monkeypatch.setattr(checks, "check_tensors", note)
    return calls


def inputs(device: str, tokens: int = 20) -> tuple[Tensor, Tensor, Tensor]:
    case = random_case(tokens, 16, 50, dtype=torch.bfloat16, device=device, ignored=0)
    return case.h, case.w, case.y


def loss(*tensors: Tensor, **options: Any) -> Tensor:
    with torch.no_grad():
        result: Tensor = torch.ops.cutefce.loss(*tensors, **options)
    return result


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("shape", [(20,), (4, 5)])
def test_a_repeat_is_not_checked(
    shape: tuple[int, ...], reduction: str, device: str, checked: list[Any]
) -> None:
    for _ in range(3):
        h, w, y = inputs(device)
        got = loss(h.reshape(*shape, 16), w, y.reshape(shape), reduction=reduction)
        assert got.shape == (shape if reduction == "none" else ())
        assert torch.equal(got.flatten(), FORWARD(h, w, y, reduction, -100).flatten())
    assert len(checked) == 1


def test_a_repeat_may_have_another_ignore_index(device: str, checked: list[Any]) -> None:
    h, w, y = inputs(device)
    for ignored in (-100, int(y[0]), int(y[1])):
        expected = FORWARD(h, w, y, "sum", ignored)
        assert torch.equal(loss(h, w, y, reduction="sum", ignore_index=ignored), expected)
    assert len(checked) == 1


def unaligned(x: Tensor) -> Tensor:
    return torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)


ALIKE = {
    "more tokens": lambda h, w, y: (h.repeat(2, 1), w, y.repeat(2)),
    "fewer classes": lambda h, w, y: (h, w[:-1], y.clamp(max=len(w) - 2)),
    "other dtypes": lambda h, w, y: (h.half(), w.half(), y),
    "wide rows": lambda h, w, y: (h.repeat(1, 2)[:, :16], w, y),
}
"""Calls that share a key, which differs from those of `inputs`."""
COPIED = {
    "narrow targets": lambda h, w, y: (h, w, y.int()),
    "spread targets": lambda h, w, y: (h, w, y.repeat_interleave(2)[::2]),
    "transposed": lambda h, w, y: (h.t().contiguous().t(), w, y),
    "unaligned": lambda h, w, y: (unaligned(h), w, y),
}
"""Calls whose inputs the kernels do not take as they are."""


@pytest.mark.parametrize("other", (ALIKE | COPIED).values(), ids=ALIKE | COPIED)
def test_other_metadata_is_no_repeat(other: Any, device: str, checked: list[Any]) -> None:
    loss(*inputs(device))
    for _ in range(2):
        tensors = other(*inputs(device))
        assert torch.equal(loss(*tensors), FORWARD(*tensors, "mean", -100))
    assert len(checked) == (2 if other in ALIKE.values() else 3)


def test_each_operand_may_be_unaligned(device: str) -> None:
    """Entries of calls whose hidden states are copied serve no weight that kernels cannot take."""
    h, w, y = inputs(device)
    wide = unaligned(torch.zeros(20, 17, dtype=h.dtype, device=device))[:, :16]
    wide.copy_(h)
    expected = loss(h, w, y)
    assert torch.equal(loss(wide, w, y), expected)
    own = torch.zeros(20, 17, dtype=h.dtype, device=device)[:, :16]
    own.copy_(h)
    key = call_cache.call_key(own, unaligned(w), y, None, LossOptions(), ())
    assert key != call_cache.call_key(wide, w, y, None, LossOptions(), ())


WRONG = {
    "target: got shape": lambda h, w, y: {"target": y[1:]},
    "target: got dtype": lambda h, w, y: {"target": y.float()},
    "linear_weight: got dtype": lambda h, w, y: {"linear_weight": w.double()},
    "input: got shape": lambda h, w, y: {"input": h[:, 8:]},
    "input: got layout": lambda h, w, y: {"input": h.to_sparse()},
    "reduction: got": lambda h, w, y: {"reduction": "all"},
    "workspace: got": lambda h, w, y: {"workspace": -1},
    "shards: got": lambda h, w, y: {"shards": [50]},
    "denominator: got": lambda h, w, y: {"denominator": y},
}


@pytest.mark.parametrize(("said", "wrong"), WRONG.items(), ids=WRONG)
def test_wrong_calls_are_found_after_right_ones(said: str, wrong: Any, device: str) -> None:
    h, w, y = inputs(device)
    loss(h, w, y)
    arguments = {"input": h, "linear_weight": w, "target": y} | wrong(h, w, y)
    with pytest.raises((TypeError, ValueError), match=said):
        loss(**arguments)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_the_forward_on_kernels_is_what_its_fake_says(reduction: str, device: str) -> None:
    torch.library.opcheck(FORWARD, (*inputs(device, 21), reduction, -100))


def test_gradients_are_no_repeat(device: str) -> None:
    h, w, y = inputs(device)
    expected = loss(h, w, y)
    got = torch.ops.cutefce.loss(h.requires_grad_(), w, y)
    got.backward()
    assert h.grad is not None and torch.isfinite(h.grad).all()
    torch.testing.assert_close(got.detach(), expected)


def test_the_cache_is_bounded(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_cache, "MAX_ENTRIES", 3)
    for tokens in range(2, 12):
        tensors = inputs(device, tokens)
        assert torch.equal(loss(*tensors), FORWARD(*tensors, "mean", -100))
        assert len(call_cache._entries) <= 3


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("device", ["cuda:1"])
def test_a_device_that_is_not_current_is_no_repeat(device: str, checked: list[Any]) -> None:
    for current in (1, 0, 1):
        with torch.cuda.device(current):
            tensors = inputs(device)
            assert torch.equal(loss(*tensors), FORWARD(*tensors, "mean", -100))
    assert len(checked) == 2


def function(*tensors: Tensor, **options: Any) -> Tensor:
    with torch.no_grad():
        result: Tensor = cutefce.linear_cross_entropy(*tensors, **options)
    return result


def test_the_function_repeats_a_call_of_the_operator(device: str, checked: list[Any]) -> None:
    h, w, y = inputs(device)
    expected = loss(h, w, y)
    for _ in range(2):
        assert torch.equal(function(h, w, y), expected)
        assert torch.equal(function(h.view(4, 5, 16), w, y.view(4, 5)), expected)
    assert len(checked) == 2, "one for each shape"


def test_modes_see_the_operator_of_a_repeat(device: str) -> None:
    h, w, y = inputs(device)
    expected = function(h, w, y)
    with Seen() as seen:
        assert torch.equal(function(h, w, y), expected)
    assert FORWARD in seen.operators


def test_a_repeat_in_an_autocast_region_is_cast(device: str) -> None:
    h, w, y = inputs(device)
    function(h, w, y)
    with torch.autocast(h.device.type, torch.float16):
        cast = function(h, w, y)
    assert torch.equal(cast, loss(h.half(), w.half(), y))


def test_numbers_that_are_equal_are_not_the_same_workspace(device: str) -> None:
    h, w, y = inputs(device)
    function(h, w, y, workspace=1)
    with pytest.raises(TypeError, match="workspace: got True"):
        function(h, w, y, workspace=True)
