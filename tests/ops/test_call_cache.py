"""The cache of plain calls, which these tests go with: repeats come from it, and it is bounded.

That calls from it have the results of other calls is in `test_repeated_steps.py`.
"""

from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch

import cutefce
from cutefce.ops.interface import call_cache, checks
from tests.support.reference import random_case
from tests.support.stand_in_gpu import served_by_kernels
from tests.support.steps import have_same_bits, operands, step


@pytest.fixture(autouse=True)
def kernels(device: str) -> Iterator[None]:
    with served_by_kernels(device):
        yield


@pytest.mark.parametrize("grad", [False, True], ids=["loss", "step"])
def test_repeats_come_from_the_cache(grad: bool, device: str) -> None:
    """So that tests of repeats see them; a call with another key is checked again."""
    h, w, y = operands(device)
    with (
        torch.set_grad_enabled(grad),
        mock.patch.object(checks, "check_tensors", wraps=checks.check_tensors) as checked,
    ):
        for reduction in ("mean", "none"):
            for _ in range(3):
                for index in (-100, 7):
                    more: dict[str, Any] = {"reduction": reduction, "ignore_index": index}
                    cutefce.linear_cross_entropy(h, w, y, **more)
                    torch.ops.cutefce.loss(h, w, y, **more)
    assert checked.call_count == 2


def test_the_cache_is_bounded(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_cache, "MAX_ENTRIES", 3)
    for tokens in range(2, 12):
        case = random_case(tokens, 16, 50, dtype=torch.bfloat16, device=device, ignored=0)
        given = case.h.requires_grad_(), case.w.requires_grad_(), case.y
        assert have_same_bits(step(*given), step(*given))
        assert len(call_cache._entries) <= 3
