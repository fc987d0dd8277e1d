"""What torch does around calls: modes and tracers see the operators, and loops go on as before."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo import compiled_autograd
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode

import cutefce
from cutefce.ops.interface.arguments import StepOptions
from cutefce.ops.primitives import portable_gradients, portable_projection
from tests.support.modes import Seen
from tests.support.reference import random_case
from tests.support.stand_in_gpu import select_rows, served_by_kernels
from tests.support.steps import (
    ROWS,
    WORKSPACES,
    Results,
    gradients,
    have_same_bits,
    operands,
    step,
)
from tests.support.tiers import rest_slow

OPS = torch.ops.cutefce
FORWARD = OPS.loss_forward.default

each_workspace = pytest.mark.parametrize("workspace", WORKSPACES)


@pytest.fixture
def kernels(device: str) -> Iterator[pytest.MonkeyPatch]:
    with served_by_kernels(device) as patch:
        yield patch


def loss_of(h: Tensor, w: Tensor, y: Tensor) -> Tensor:
    return cutefce.linear_cross_entropy(h, w, y)


def without_gradients(h: Tensor, w: Tensor, y: Tensor) -> Tensor:
    with torch.no_grad():
        return loss_of(h, w, y)


def dispatch_mode(h: Tensor, w: Tensor, y: Tensor, want: Results) -> None:
    with Seen() as seen:
        assert have_same_bits(step(h, w, y), want)
        assert torch.equal(without_gradients(h, w, y), want[0])
    expected = [FORWARD, OPS.loss_backward.default, FORWARD]
    assert [x for x in seen.operators if x.namespace == "cutefce"] == expected


def function_mode(h: Tensor, w: Tensor, y: Tensor, want: Results) -> None:
    functions = []

    class Functions(TorchFunctionMode):
        def __torch_function__(
            self, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            functions.append(str(function))
            return function(*args, **(kwargs or {}))

    with Functions():
        result = loss_of(h, w, y)
    assert torch.equal(result, want[0])
    assert "cutefce.loss" in functions


def tensor_subclass(h: Tensor, w: Tensor, y: Tensor, want: Results) -> None:
    functions = []

    class Watched(Tensor):
        @classmethod
        def __torch_function__(
            cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            functions.append(str(function))
            run: Any = super().__torch_function__
            return run(function, types, args, kwargs or {})

    result = loss_of(h.as_subclass(Watched), w, y)
    assert torch.equal(result.as_subclass(Tensor), want[0])
    assert "cutefce.loss" in functions


def fake_tensors(h: Tensor, w: Tensor, y: Tensor, want: Results) -> None:
    mode: Any = FakeTensorMode()
    with mode:
        results = step(mode.from_tensor(h), mode.from_tensor(w), mode.from_tensor(y))
    assert all(type(x) is FakeTensor for x in results)
    assert [x.shape for x in results] == [x.shape for x in want]
    kept = y[:, None].clamp(min=0)
    with mode:
        more: Any = {"outputs": ("lse",), "kept_classes": mode.from_tensor(kept)}
        found = cutefce.linear_log_probs(*map(mode.from_tensor, (h, w, y)), **more)
    assert type(found.log_probs) is FakeTensor and found.log_probs.shape == y.shape


def regions_without_gradients(h: Tensor, w: Tensor, y: Tensor, want: Results) -> None:
    for region in (torch.no_grad, torch.inference_mode):
        with region():
            assert torch.equal(loss_of(h, w, y), want[0])


def autocast(h: Tensor, w: Tensor, y: Tensor, want: Results) -> None:
    with torch.autocast(h.device.type, torch.bfloat16):
        assert have_same_bits(step(h, w, y), want)
        loss = loss_of(h, w, y)
    assert have_same_bits((loss, *gradients(loss, h, w)), want)
    with torch.autocast(h.device.type, torch.float16):
        cast = step(h, w, y)
    narrow = step(h.detach().half().requires_grad_(), w.detach().half().requires_grad_(), y)
    assert have_same_bits(cast, (narrow[0], *(x.bfloat16() for x in narrow[1:])))


def anomaly_detection(h: Tensor, w: Tensor, y: Tensor, want: Results) -> None:
    with torch.autograd.detect_anomaly(check_nan=True):
        assert have_same_bits(step(h, w, y), want)


def memory_that_begins_as_nan(h: Tensor, w: Tensor, y: Tensor, want: Results) -> None:
    """What torch fills with NaN in its deterministic mode has no influence on results."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        assert have_same_bits(step(h, w, y), want)
        assert torch.equal(without_gradients(h, w, y), want[0])
    finally:
        torch.use_deterministic_algorithms(False)


def leaked_tensors(h: Tensor, w: Tensor, y: Tensor, want: Results) -> None:
    """A tensor that a transform has left behind is the tensor that it wraps."""
    left: list[Tensor] = []

    def leak(a: Tensor) -> Tensor:
        left.append(y + (a.sum() * 0).long())
        return a.sum()

    torch.func.grad(leak)(torch.ones(3, device=h.device))
    for _ in range(2):
        assert have_same_bits(step(h, w, left[0]), want)
        assert torch.equal(without_gradients(h, w, left[0]), want[0])


def tracer(h: Tensor, w: Tensor, y: Tensor, want: Results) -> None:
    traced = make_fx(without_gradients)(h, w, y)
    assert "cutefce.loss_forward.default" in {str(node.target) for node in traced.graph.nodes}
    assert torch.equal(traced(h, w, y), want[0])


CONTEXTS = {
    x.__name__: x
    for x in (
        dispatch_mode,
        function_mode,
        tensor_subclass,
        fake_tensors,
        regions_without_gradients,
        autocast,
        anomaly_detection,
        memory_that_begins_as_nan,
        leaked_tensors,
        tracer,
    )
}
"""What happens between two steps, and what must come out of it, given the results of a step."""


@pytest.mark.parametrize("context", CONTEXTS.values(), ids=CONTEXTS)
@pytest.mark.parametrize("selects", ROWS.values(), ids=ROWS)
def test_steps_and_what_is_between_them(
    selects: bool, context: Callable[..., None], device: str, kernels: pytest.MonkeyPatch
) -> None:
    select_rows(kernels, selects)
    given = operands(device)
    want = step(*given)
    for _ in range(2):
        context(*given, want)
        assert have_same_bits(step(*given), want)


@pytest.mark.parametrize("workspace", rest_slow(WORKSPACES))
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("selects", rest_slow({"selected rows": True, "all rows": False}))
def test_a_graph_compiler_may_trace_the_backward(
    workspace: int | str, reduction: str, selects: bool, device: str, kernels: pytest.MonkeyPatch
) -> None:
    select_rows(kernels, selects)
    h, w, y = operands(device)
    more: dict[str, Any] = {"reduction": reduction, "workspace": workspace}
    want = step(h, w, y, **more)
    for _ in range(2):
        loss = cutefce.linear_cross_entropy(h, w, y, **more)
        with compiled_autograd._enable(torch.compile(backend="aot_eager", fullgraph=True)):
            assert have_same_bits((loss, *gradients(loss, h, w)), want)


def unaligned(x: Tensor) -> Tensor:
    """Return x at an address that no kernel takes, or with gaps between its elements."""
    if x.ndim == 1:
        return torch.stack([x, x], 1)[:, 0]
    return torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)


@each_workspace
@pytest.mark.parametrize("restored", [torch.bfloat16, torch.int64], ids=["h and w", "y"])
def test_saved_tensors_may_come_back_with_another_layout(
    restored: torch.dtype, workspace: int | str, device: str, kernels: pytest.MonkeyPatch
) -> None:
    h, w, y = operands(device)
    want = step(h, w, y, workspace=workspace)

    def unpack(x: Tensor) -> Tensor:
        return unaligned(x) if x.dtype == restored else x

    for _ in range(2):
        with saved_tensors_hooks(lambda x: x, unpack):
            loss = cutefce.linear_cross_entropy(h, w, y, workspace=workspace)
        assert have_same_bits((loss, *gradients(loss, h, w)), want)


@each_workspace
@pytest.mark.filterwarnings("ignore:cutefce. served by the portable path")
def test_a_weight_may_come_back_as_kernels_read_it(
    workspace: int | str, device: str, kernels: pytest.MonkeyPatch
) -> None:
    """Though the forward could not read it: its backward is of the same path."""
    h, w, y = operands(device)
    w = unaligned(w.detach()).requires_grad_()
    want = step(h, w, y, workspace=workspace)
    with saved_tensors_hooks(lambda x: x, lambda x: x.clone() if x.dtype == w.dtype else x):
        loss = cutefce.linear_cross_entropy(h, w, y, workspace=workspace)
    assert have_same_bits((loss, *gradients(loss, h, w)), want)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_the_forward_on_kernels_is_what_its_fake_says(
    reduction: str, device: str, kernels: pytest.MonkeyPatch
) -> None:
    h, w, y = (x.detach() for x in operands(device))
    step_options = dataclasses.astuple(StepOptions(0, False, False, False))
    torch.library.opcheck(FORWARD, (h, w, y, *step_options, reduction, -100))


# on a GPU, kernels serve bfloat16 and the portable path float32
each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


@each_dtype
@pytest.mark.parametrize("pre_dispatch", [False, True])
def test_tracers_see_the_portable_operator(
    pre_dispatch: bool, dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = random_case(20, 8, 50, dtype=dtype, device=device)
    given = case.h, case.w, case.y
    with monkeypatch.context() as as_on_a_gpu:
        for module in (portable_gradients, portable_projection):
            as_on_a_gpu.setattr(module, "can_fuse", lambda x: True)
        traced = make_fx(without_gradients, pre_dispatch=pre_dispatch)(*given)
    called = [node.target for node in traced.graph.nodes if node.op == "call_function"]
    assert any(str(target).startswith("cutefce.") for target in called)
    assert torch.equal(traced(*given), without_gradients(*given))
