"""Calls without gradients bypass torch's dispatcher unless a dispatch mode or tracer is active."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.profiler import ProfilerActivity, profile

from cutefce.cute_kernels.config import PortableTiles
from cutefce.ops.primitives import portable_gradients, portable_projection
from tests.support.modes import Seen
from tests.support.reference import random_case

FORWARD = torch.ops.cutefce.forward.default

# on a GPU, kernels serve bfloat16 and the portable path float32
each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


def loss(h: Tensor, w: Tensor, y: Tensor) -> Tensor:
    with torch.no_grad():
        result: Tensor = torch.ops.cutefce.loss(h, w, y)
    return result


@each_dtype
@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_a_plain_call_is_direct(
    context: Callable[[], AbstractContextManager[None]], dtype: torch.dtype, device: str
) -> None:
    case = random_case(20, 8, 50, dtype=dtype, device=device)
    w = nn.Parameter(case.w)
    with profile(activities=[ProfilerActivity.CPU]) as profiler, context():
        result = torch.ops.cutefce.loss(case.h, w, case.y)
    names = {event.name for event in profiler.events()}
    assert "cutefce::loss" in names and "cutefce::forward" not in names
    assert torch.equal(result, FORWARD(case.h, case.w, case.y, "mean", -100))


@each_dtype
def test_modes_see_the_operator(dtype: torch.dtype, device: str) -> None:
    case = random_case(20, 8, 50, dtype=dtype, device=device)
    with Seen() as seen:
        result = loss(case.h, case.w, case.y)
    assert FORWARD in seen.operators
    assert torch.equal(result, loss(case.h, case.w, case.y))


@each_dtype
@pytest.mark.parametrize("pre_dispatch", [False, True])
def test_tracers_see_an_operator(
    pre_dispatch: bool, dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = random_case(20, 8, 50, dtype=dtype, device=device)
    inputs = case.h, case.w, case.y
    with monkeypatch.context() as as_on_a_gpu:
        for module in (portable_gradients, portable_projection):
            as_on_a_gpu.setattr(module, "can_fuse", lambda x: True)
        traced = make_fx(loss, pre_dispatch=pre_dispatch)(*inputs)
    called = [node.target for node in traced.graph.nodes if node.op == "call_function"]
    assert any(str(target).startswith("cutefce.") for target in called)
    assert torch.equal(traced(*inputs), loss(*inputs))


@pytest.mark.parametrize("without", [FakeTensorMode, lambda: torch.device("meta")])
def test_tensors_without_numbers_stay_without(without: Callable[[], Any]) -> None:
    with without():
        h, w, y = torch.empty(20, 8), torch.empty(50, 8), torch.empty(20, dtype=torch.long)
        result = loss(h, w, y)
    assert type(result) is type(h) and result.device == h.device
    assert result.shape == () and result.dtype == torch.float32


@each_dtype
def test_compiled_without_gradients_equals_eager(
    dtype: torch.dtype, small_tiles: PortableTiles, device: str
) -> None:
    torch.compiler.reset()
    backend = "aot_eager" if device == "cpu" else "inductor"
    compiled = torch.compile(loss, fullgraph=True, backend=backend)
    case = random_case(40, 16, 333, dtype=dtype, device=device)
    compiled(case.h, case.w, case.y)  # the run that compiles may take the portable path unfused
    assert torch.equal(compiled(case.h, case.w, case.y), loss(case.h, case.w, case.y))
