"""The public functions that show and enforce which implementation serves a call."""

from typing import Any

import pytest
import torch

import cutefce
from cutefce.ops.primitives import dispatch

H, W = torch.randn(4, 8), torch.randn(10, 8)
WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "an array": (
        {"input": H.numpy()},
        TypeError,
        "input: got a value of type ndarray,",
    ),
    "no weight": ({"linear_weight": None}, TypeError, r"linear_weight: got None \(NoneType\)"),
    "a sparse weight": ({"linear_weight": W.to_sparse()}, TypeError, "linear_weight: got layout"),
    "an integer input": ({"input": H.long()}, TypeError, "input: got dtype torch.int64, expected"),
    "a wider weight": (
        {"linear_weight": W.double()},
        TypeError,
        "linear_weight: got dtype torch.fl",
    ),
    "an integer weight": ({"linear_weight": W.long()}, TypeError, "linear_weight: got dtype torch"),
    "a vector": ({"linear_weight": W[0]}, ValueError, r"linear_weight: got shape \(8,\), expected"),
    "a number": ({"input": H[0, 0]}, ValueError, r"input: got shape \(\), expected \(..., 8\)"),
    "a transposed weight": (
        {"linear_weight": W.t()},
        ValueError,
        r"linear_weight: got shape \(8, 10\), expected \(V, 8\).*pass linear_weight.t\(\)",
    ),
    "another width": ({"input": H[:, :6]}, ValueError, r"input: got shape \(4, 6\), expected"),
    "another device": (
        {"linear_weight": W.to("meta")},
        ValueError,
        "linear_weight: got device meta, expected that of input, cpu",
    ),
}


@pytest.mark.parametrize(("change", "kind", "message"), WRONG.values(), ids=WRONG)
def test_operands_are_checked_by_name(
    change: dict[str, Any], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=f"^{message}"):
        cutefce.backend_for(**{"input": H, "linear_weight": W, **change})


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


@pytest.mark.parametrize("enabled", [1, None, "yes"])
def test_strictness_is_a_bool(enabled: Any) -> None:
    with pytest.raises(TypeError, match=r"^enabled: got .*, expected a bool"):
        cutefce.set_strict(enabled)
    cutefce.linear_cross_entropy(H, W, torch.arange(4))  # as before
