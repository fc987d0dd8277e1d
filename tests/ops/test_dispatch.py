"""The public functions that show and enforce which implementation serves a call."""

from typing import Any

import pytest
import torch

import cutefce
from cutefce.ops.primitives import dispatch

H, W = torch.randn(4, 8), torch.randn(10, 8)


@pytest.mark.parametrize("shape", [(8,), (4, 8), (2, 3, 8), (0, 8)])
def test_what_calls_take_has_a_backend(shape: tuple[int, ...]) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        # a float32 weight beside 16 bits is cast by the call
        w = W.double() if dtype == torch.float64 else W
        assert cutefce.backend_for(torch.zeros(shape, dtype=dtype), w).name == "torch"


def test_the_backend_is_that_of_the_tensors_that_a_call_multiplies(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They are cast in an autocast region, and a float32 weight beside 16 bits everywhere."""
    seen: list[torch.dtype] = []
    real = dispatch.backend_of

    def backend_of(h: torch.Tensor, w: torch.Tensor) -> Any:
        seen.extend((h.dtype, w.dtype))
        return real(h, w)

    monkeypatch.setattr(dispatch, "backend_of", backend_of)
    h = torch.zeros(4, 8)
    with torch.autocast("cpu", torch.bfloat16):
        cutefce.backend_for(h, W)
        cutefce.backend_for(h, W.bfloat16())
    cutefce.backend_for(h.half(), W)
    cutefce.backend_for(h, W)
    assert seen == [torch.bfloat16] * 4 + [torch.float16] * 2 + [torch.float32] * 2
