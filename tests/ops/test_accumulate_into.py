"""dW added to a buffer of the caller's: its value, its memory, and what is refused."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

import cutefce
from cutefce.cute_kernels.config import PortableTiles
from cutefce.ops.planning import step_memory
from cutefce.ops.program import weight as weight_gradient
from tests.support.backends import Backend, on_backends
from tests.support.layouts import LAYOUTS, Layout, pinned
from tests.support.memory import peaks
from tests.support.options import OPTIONS, REFUSED_PAIR, exact, options_case
from tests.support.reference import Case, Result, random_case
from tests.support.reference import exact as exact_of_case
from tests.support.tiers import pairwise, rest_slow

SERVED = {name: layout for name, layout in LAYOUTS.items() if not layout.aliased}
"""Layouts of calls with a buffer: there is no dW whose memory exponentials could use."""
PAIRS = [
    (torch.bfloat16, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.float16, torch.float32),
    (torch.float16, torch.float16),
    (torch.float32, torch.float32),
    (torch.float64, torch.float64),
]
pairs = pytest.mark.parametrize(("dtype", "sums"), PAIRS, ids=str)


def rounding(dtype: torch.dtype) -> float:
    return float(torch.finfo(dtype).eps)


def with_factors(case: Case, factors: Tensor) -> Result:
    """Return the exact results for these upstream gradients (N,) of the tokens' losses."""
    return exact_of_case(dataclasses.replace(case, upstream=factors))


def assert_added(buffer: Tensor, before: Tensor, dw: Tensor, dtype: torch.dtype) -> None:
    """Assert that dW, of operands of `dtype`, was added, and sums of 16 bits rounded once."""
    want = before.double() + dw
    error = (buffer.double() - want).norm()
    # a GEMM may add its products to wider sums block by block
    roundings = 1 if buffer.dtype.itemsize == 2 else 16
    assert error <= rounding(dtype) * dw.norm() + roundings * rounding(buffer.dtype) * want.norm()


@pairwise(pair=PAIRS, reduction=["mean", "sum", "none"], workspace=["min", 200 << 10, "max", None])
def test_dw_is_added(
    pair: tuple[torch.dtype, torch.dtype],
    reduction: str,
    workspace: int | str | None,
    small_tiles: PortableTiles,
    device: str,
) -> None:
    dtype, sums = pair
    case = random_case(150, 48, 333, dtype=dtype, device=device)
    h, w = case.h.clone().requires_grad_(), case.w.clone().requires_grad_()
    before = torch.randn(333, 48, device=device).to(sums)
    buffer = before.clone()
    options: dict[str, Any] = {"reduction": reduction, "workspace": workspace}
    loss = cutefce.linear_cross_entropy(h, w, case.y, accumulate_into=buffer, **options)
    assert torch.equal(buffer, before), "a forward changes nothing"
    upstream = case.upstream if reduction == "none" else torch.tensor(3.0, device=device)
    loss.backward(upstream.to(loss.dtype))
    assert w.grad is None
    plain = cutefce.linear_cross_entropy(h, w, case.y, **options)
    if device == "cuda" and dtype.itemsize > 2:
        # plans may differ, cuBLAS's kernels for windows of other widths, and fused ones, which
        # depend on what was compiled before
        torch.testing.assert_close(loss, plain, rtol=8 * rounding(dtype), atol=0)
    else:
        assert torch.equal(loss, plain)
    factors = torch.full_like(case.upstream, 3.0) if reduction != "none" else case.upstream
    if reduction == "mean":
        factors = factors / (case.y >= 0).sum()
    want = with_factors(case, factors)
    assert h.grad is not None
    roundings = 2 if dtype.itemsize == 2 else 16  # of the exponentials and dX; of sums
    assert (h.grad.double() - want.dx).norm() <= roundings * rounding(dtype) * want.dx.norm()
    assert_added(buffer, before, want.dw, dtype)


@on_backends(layout=SERVED, sums=[torch.float32, torch.bfloat16])
def test_every_layout(
    layout: Layout, sums: torch.dtype, backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_memory, "MIN_ADDED_ROWS", 40)
    monkeypatch.setattr(step_memory, "row_block_bytes", lambda _: 1)
    how: dict[str, Any] = {"dtype": backend.dtype, "device": backend.device}
    case = random_case(150, 48, 333, ignored=0.4, **how)
    want = with_factors(case, torch.ones_like(case.upstream))
    backend.hide_ignored(case)
    h, w = case.h.clone().requires_grad_(), case.w.clone().requires_grad_()
    buffer = torch.ones(*w.shape, dtype=sums, device=backend.device)
    options: dict[str, Any] = {"accumulate_into": buffer, "reduction": "sum"}
    with pinned(layout):
        loss = cutefce.linear_cross_entropy(h, w, case.y, **options)
        loss.backward()
    assert w.grad is None and h.grad is not None
    torch.testing.assert_close(loss.detach().double(), want.loss.sum(), rtol=1e-5, atol=0)
    assert (h.grad.double() - want.dx).norm() <= 2**-7 * want.dx.norm()
    assert_added(buffer, torch.ones_like(buffer), want.dw, torch.bfloat16)


@pairs
def test_microbatches_add_up(dtype: torch.dtype, sums: torch.dtype, device: str) -> None:
    case = random_case(400, 64, 1000, dtype=dtype, device=device)
    w, buffer = case.w.clone().requires_grad_(), torch.zeros(1000, 64, dtype=sums, device=device)
    options: dict[str, Any] = {"accumulate_into": buffer, "denominator": 400.0}
    losses = [  # as in a pipeline, where forwards run ahead of backwards
        cutefce.linear_cross_entropy(h.clone().requires_grad_(), w, y, **options)
        for h, y in zip(case.h.split(50), case.y.split(50), strict=True)
    ]
    for loss in losses:
        loss.backward()
    want = with_factors(case, torch.full_like(case.upstream, 1 / 400))
    # each of the eight rounds the sum
    error, roundings = (buffer.double() - want.dw).norm(), rounding(dtype) + 8 * rounding(sums)
    assert error <= roundings * want.dw.norm()


@pytest.mark.parametrize("layout", ["nothing kept", "everything kept", "in chunks"])
@pytest.mark.parametrize("factor", [1.0, 0.5])
def test_each_backward_of_a_frozen_input_adds(
    layout: str, factor: float, small_tiles: PortableTiles
) -> None:
    """Though one that multiplies sums in their place leaves none to the next."""
    case = random_case(150, 48, 333)
    w, buffer = case.w.requires_grad_(), torch.zeros(333, 48)
    with pinned(LAYOUTS[layout]):
        loss = cutefce.linear_cross_entropy(
            case.h, w, case.y, reduction="sum", accumulate_into=buffer
        )
        for count in (1, 2, 3):
            loss.backward(torch.tensor(factor), retain_graph=True)
            if count == 1:
                once = buffer.clone()
            torch.testing.assert_close(buffer, count * once, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("workspace", ["min", "max"])
def test_backwards_of_one_graph_each_add(workspace: str) -> None:
    case = random_case(60, 16, 100)
    w, buffer = case.w.requires_grad_(), torch.zeros(100, 16)
    h = case.h.requires_grad_()
    loss = cutefce.linear_cross_entropy(h, w, case.y, accumulate_into=buffer, workspace=workspace)
    version = buffer._version
    loss.backward(retain_graph=True)
    assert buffer._version > version, "autograd knows that the buffer was written"
    once = buffer.clone()
    loss.backward()
    torch.testing.assert_close(buffer, 2 * once, rtol=1e-6, atol=0)
    (h_alone,) = torch.autograd.grad(
        cutefce.linear_cross_entropy(h, w, case.y, accumulate_into=buffer, workspace=workspace), h
    )
    torch.testing.assert_close(buffer, 3 * once, rtol=1e-6, atol=0)
    assert h.grad is not None
    torch.testing.assert_close(h.grad, 2 * h_alone)


@pytest.mark.parametrize("name", [*OPTIONS, "all", "entropy"])
def test_every_option(name: str, small_tiles: PortableTiles) -> None:
    names = [each for each in OPTIONS if each not in ("softcap", "temperature")]
    case = options_case(names if name == "all" else [name] if name in OPTIONS else [], 70, 32, 333)
    leaves, buffer = case.leaves, torch.zeros(333, 32)
    options = case.with_leaves(leaves) | {"accumulate_into": buffer}
    h, w, y = leaves[0], leaves[1], case.case.y
    if name == "entropy":
        found = cutefce.linear_log_probs(h, w, y, outputs=("entropy",), accumulate_into=buffer)
        other = case.case.w.clone().requires_grad_()
        want = cutefce.linear_log_probs(case.case.h, other, y, outputs=("entropy",))
        for result in (found, want):
            assert result.entropy is not None
            (result.entropy.sum() + result.log_probs.sum()).backward()
        assert w.grad is None
        torch.testing.assert_close(buffer, other.grad)
        return
    loss = cutefce.linear_cross_entropy(h, w, y, reduction="none", **options)
    loss.backward(case.case.upstream)
    _, dx, dw, *dbias = exact(case)
    assert h.grad is not None and w.grad is None
    torch.testing.assert_close(h.grad.double(), dx, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(buffer.double(), dw, rtol=1e-4, atol=1e-5)
    for bias, gradient in zip(leaves[2:], dbias, strict=True):
        assert bias.grad is not None
        torch.testing.assert_close(bias.grad.double(), gradient, rtol=1e-4, atol=1e-5)


def test_all_options_can_be_together() -> None:
    assert {"label_smoothing", "softcap"} == REFUSED_PAIR


@pytest.mark.slow
@pytest.mark.parametrize(
    ("workspace", "backend"),
    [
        ("min", "aot_eager"),
        ("max", "aot_eager"),
        ("min", "inductor"),
    ],
)
def test_compiled(workspace: str, backend: str) -> None:
    def loss_of(h: Tensor, w: Tensor, y: Tensor, buffer: Tensor) -> Tensor:
        options: dict[str, Any] = {"accumulate_into": buffer, "workspace": workspace}
        loss: Tensor = cutefce.linear_cross_entropy(h * 2, w, y, **options)
        return loss + 1

    torch.compiler.reset()
    compiled = torch.compile(loss_of, fullgraph=True, backend=backend)
    found = []
    for function in (compiled, loss_of):
        buffer = torch.ones(100, 16)
        for tokens in (40, 70):
            case = random_case(tokens, 16, 100)
            h, w = case.h.requires_grad_(), case.w.requires_grad_()
            function(h, w, case.y, buffer).backward()
            assert w.grad is None
            found.append(h.grad)
        found.append(buffer)
    for a, b in zip(found[:3], found[3:], strict=True):
        torch.testing.assert_close(a, b)


def test_opcheck() -> None:
    case = random_case(20, 8, 50)
    arguments = case.h.requires_grad_(), case.w.requires_grad_(), case.y
    options = {"accumulate_into": torch.zeros(50, 8)}
    torch.library.opcheck(torch.ops.cutefce.loss.default, arguments, options)


def test_a_module_and_autocast() -> None:
    head = cutefce.LinearCrossEntropyLoss(16, 100)
    x, y = torch.randn(40, 16), torch.randint(100, (40,))
    buffer, weight = torch.zeros(100, 16), head.linear.weight
    with torch.autocast("cpu", torch.bfloat16):
        head(x.requires_grad_(), y, accumulate_into=buffer).backward()
        assert weight.grad is None
        head(x, y).backward()
    assert weight.grad is not None
    assert (buffer - weight.grad).norm() <= 2**-8 * buffer.norm()


def test_a_float32_weight_beside_16_bits() -> None:
    case = random_case(90, 32, 200, dtype=torch.bfloat16)
    found = []
    for buffer in (torch.zeros(200, 32), None):
        w = case.w.float().requires_grad_()
        cutefce.linear_cross_entropy(case.h, w, case.y, accumulate_into=buffer).backward()
        found.append(w.grad if buffer is None else buffer)
    torch.testing.assert_close(*found)


def test_the_existing_gradient_is_a_buffer() -> None:
    case = random_case(60, 16, 100)
    w = case.w.requires_grad_()
    cutefce.linear_cross_entropy(case.h, w, case.y).backward()
    assert w.grad is not None
    once = w.grad.clone()
    cutefce.linear_cross_entropy(case.h, w, case.y, accumulate_into=w.grad).backward()
    torch.testing.assert_close(w.grad, 2 * once)


def test_without_gradients_nothing_is_added() -> None:
    case, buffer = random_case(60, 16, 100), torch.zeros(100, 16)
    with torch.no_grad():
        loss = cutefce.linear_cross_entropy(
            case.h, case.w.requires_grad_(), case.y, accumulate_into=buffer
        )
    assert torch.equal(loss, cutefce.linear_cross_entropy(case.h, case.w.detach(), case.y))
    assert not buffer.any()


OF_CALLS = [
    (torch.bfloat16, torch.bfloat16, "min", "mean"),
    *((*pair, "min", "mean") for pair in PAIRS),
    *((*pair, "max", "none") for pair in PAIRS),
    (torch.bfloat16, torch.float32, 4 << 20, "mean"),
    (torch.float32, torch.float32, "min", "none"),
]


@pytest.mark.parametrize("given", rest_slow([*dict.fromkeys(OF_CALLS)]))
def test_peak_is_predicted(given: tuple[torch.dtype, torch.dtype, int | str, str]) -> None:
    dtype, sums, workspace, reduction = given
    for shape in ((512, 128, 16001), (3000, 128, 4000)):
        case = random_case(*shape, dtype=dtype, ignored=0)
        h, w = case.h.requires_grad_(), case.w.requires_grad_()
        buffer = torch.zeros(shape[2], shape[1], dtype=sums)
        options: dict[str, Any] = {"reduction": reduction, "workspace": workspace}
        options["accumulate_into"] = buffer

        def step(
            h: Tensor = h, w: Tensor = w, y: Tensor = case.y, options: dict[str, Any] = options
        ) -> None:
            loss = cutefce.linear_cross_entropy(h, w, y, **options)
            torch.autograd.grad(loss, h, torch.ones_like(loss))

        step()
        predicted = cutefce.plan(h, w, **options).workspace_bytes
        taken = peaks([step])[0] - h.numel() * h.element_size()
        assert taken <= predicted + (1 << 20)
        assert predicted <= 1.1 * taken + (3 << 20)


def test_a_buffer_needs_less_memory_than_a_gradient() -> None:
    h, w = torch.empty(256, 512, requires_grad=True), torch.empty(50000, 512, requires_grad=True)
    least = cutefce.plan(h, w, workspace=0, accumulate_into=torch.empty(50000, 512))
    assert least.workspace_bytes < w.numel() * w.element_size() / 10
    assert not least.in_forward


def test_which_buffers_gemms_add_to() -> None:
    can_add = weight_gradient.can_add_in_place
    sums = torch.float32
    assert can_add(torch.empty(4, 8), torch.bfloat16, sums)
    assert not can_add(torch.empty(4, 8, dtype=torch.bfloat16), torch.bfloat16, sums)
    assert not can_add(torch.empty(4, 8), torch.float16, sums)


def test_a_buffer_may_lie_beside_the_weight() -> None:
    rows = torch.randn(20, 8)
    w, sums = rows[:10].requires_grad_(), rows.detach()[10:].zero_()
    x, y, before = torch.randn(4, 8), torch.arange(4), w.detach().clone().requires_grad_()
    cutefce.linear_cross_entropy(x, w, y, accumulate_into=sums).backward()
    (expected,) = torch.autograd.grad(torch.nn.functional.cross_entropy(x @ before.t(), y), before)
    torch.testing.assert_close(sums, expected)
    assert torch.equal(w, before)
