"""The public functions that show and enforce which implementation serves a call."""

from typing import Any

import pytest
import torch

import cutefce
from cutefce.cute_kernels.process_cache import reset
from cutefce.ops.primitives import dispatch

H, W = torch.randn(4, 8), torch.randn(10, 8)


@pytest.mark.parametrize("shape", [(8,), (4, 8), (2, 3, 8), (0, 8)])
def test_what_calls_take_has_a_backend(shape: tuple[int, ...]) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        # a float32 weight beside 16 bits is cast by the call
        w = W.double() if dtype == torch.float64 else W
        assert cutefce.backend_for(torch.zeros(shape, dtype=dtype), w).name == "torch"


@pytest.mark.parametrize("capability", [(9, 4), (9, 0), (11, 0)])
def test_gpus_of_amd_run_neither_kernels_nor_triton(
    capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their capabilities are those of other NVIDIA GPUs."""
    monkeypatch.setattr(torch.version, "hip", "6.4")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    reset()
    device = torch.device("cuda", 0)
    reason = dispatch.device_unsupported_reason(device, torch.bfloat16)
    assert reason == "input: got a GPU of AMD, expected one of NVIDIA"
    assert not dispatch.has_triton(device)
    reset()


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
