"""dW added to a buffer of the caller's: in the backward, or in the forward of a known gradient."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

import cutefce
from cutefce.cute_kernels.config import PortableTiles
from cutefce.ops.budgets import MINIMUM
from cutefce.ops.interface.arguments import (
    LossCall,
    LossOptions,
    Sharding,
    StepOptions,
    TensorOptions,
)
from cutefce.ops.operators import agreement, saved
from cutefce.ops.operators.plans import plan_for
from cutefce.ops.primitives import block_sizes
from tests.support.backends import Backend, on_backends
from tests.support.layouts import LAYOUTS, Layout, pinned
from tests.support.options import LOSSES, OptionsCase
from tests.support.reference import Case, Result, exact, random_case
from tests.support.tiers import pairwise, rest_slow

PAIRS = [
    (torch.bfloat16, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.float16, torch.float32),
    (torch.float16, torch.float16),
    (torch.float32, torch.float32),
    (torch.float64, torch.float64),
]
"""Dtypes of the operands and of the buffer."""
SERVED = {name: layout for name, layout in LAYOUTS.items() if not layout.aliased}
"""Layouts of calls with a buffer: there is no dW whose memory exponentials could use."""
IN_FORWARD = 1
"""A workspace too small for any plan: the smallest one has chunks if tokens are many."""
PROMISED = 0.375
GIVEN: dict[str, dict[str, Any]] = {"unknown": {}, "known": {"grad_output": PROMISED}}
"""Whether a call knows the gradient of its loss."""


def rounding(dtype: torch.dtype) -> float:
    return float(torch.finfo(dtype).eps)


def wanted(case: Case, factor: Tensor | float) -> Result:
    """Return the exact results for the upstream gradient `factor` of each token's loss."""
    ones = torch.ones_like(case.upstream)
    return exact(dataclasses.replace(case, upstream=factor * ones))


def plan_of(case: Case, buffer: Tensor, workspace: int | str | None, **given: Any) -> Any:
    h, w = case.h.detach().requires_grad_(), case.w.detach().requires_grad_()
    return cutefce.plan(h, w, workspace=workspace, accumulate_into=buffer, **given)


def assert_added(buffer: Tensor, before: Tensor, dw: Tensor, dtype: torch.dtype) -> None:
    """Assert that dW, of operands of `dtype`, was added, and sums of 16 bits rounded once."""
    want = before.double() + dw
    error = (buffer.double() - want).norm()
    # a GEMM may add its products to wider sums block by block
    roundings = 1 if buffer.dtype.itemsize == 2 else 16
    assert error <= rounding(dtype) * dw.norm() + roundings * rounding(buffer.dtype) * want.norm()


@pairwise(
    pair=PAIRS,
    reduction=["mean", "sum", "none"],
    workspace=[IN_FORWARD, 200 << 10, "max", None],
    given=GIVEN,
)
def test_dw_is_added(
    pair: tuple[torch.dtype, torch.dtype],
    reduction: str,
    workspace: int | str | None,
    given: dict[str, Any],
    small_tiles: PortableTiles,
    device: str,
) -> None:
    dtype, sums = pair
    given = {} if reduction == "none" else given
    case = random_case(1100, 48, 203, dtype=dtype, device=device)
    h, w = case.h.clone().requires_grad_(), case.w.clone().requires_grad_()
    before = torch.randn(203, 48, device=device).to(sums)
    buffer = before.clone()
    options: dict[str, Any] = {"reduction": reduction, "workspace": workspace}
    loss = cutefce.linear_cross_entropy(h, w, case.y, accumulate_into=buffer, **options, **given)
    adds = plan_of(case, buffer, **options, **given).adds_in_forward
    assert torch.equal(buffer, before) is not adds
    upstream = case.upstream if reduction == "none" else torch.tensor(PROMISED, device=device)
    loss.backward(upstream.to(loss.dtype))
    assert w.grad is None and h.grad is not None
    plain = cutefce.linear_cross_entropy(h, w, case.y, **options)
    # plans may differ
    torch.testing.assert_close(loss, plain, rtol=8 * rounding(loss.dtype), atol=0)
    factors = upstream.double() / ((case.y >= 0).sum() if reduction == "mean" else 1)
    want = wanted(case, factors)
    roundings = 2 if dtype.itemsize == 2 else 16  # of the exponentials and dX; of sums
    assert (h.grad.double() - want.dx).norm() <= roundings * rounding(dtype) * want.dx.norm()
    assert_added(buffer, before, want.dw, dtype)


@on_backends(layout=SERVED, sums=[torch.float32, torch.bfloat16], given=GIVEN)
def test_every_layout(
    layout: Layout,
    sums: torch.dtype,
    given: dict[str, Any],
    backend: Backend,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(block_sizes, "MIN_ADDED_ROWS", 40)
    monkeypatch.setattr(block_sizes, "row_block_bytes", lambda _: 1)
    how: dict[str, Any] = {"dtype": backend.dtype, "device": backend.device}
    case = random_case(150, 48, 333, ignored=0.4, **how)
    want = wanted(case, PROMISED)
    backend.hide_ignored(case)
    h, w = case.h.clone().requires_grad_(), case.w.clone().requires_grad_()
    buffer = torch.ones(*w.shape, dtype=sums, device=backend.device)
    options: dict[str, Any] = {"accumulate_into": buffer, "reduction": "sum"}
    with pinned(layout):
        loss = cutefce.linear_cross_entropy(h, w, case.y, **options, **given)
        adds = bool(given) and layout.in_chunks and sums == torch.float32
        assert bool((buffer != 1).any()) == adds
        loss.backward(torch.full_like(loss, PROMISED))
    assert w.grad is None and h.grad is not None
    torch.testing.assert_close(loss.detach().double(), want.loss.sum(), rtol=1e-5, atol=0)
    assert (h.grad.double() - want.dx).norm() <= 2**-7 * want.dx.norm()
    assert_added(buffer, torch.ones_like(buffer), want.dw, torch.bfloat16)


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


@pytest.mark.parametrize("trained", ["both", "weight"])
def test_the_forward_adds(trained: str) -> None:
    """And each later backward; nothing without gradients."""
    case, buffer = random_case(1100, 16, 100), torch.zeros(100, 16)
    h, w = case.h.requires_grad_(trained == "both"), case.w.requires_grad_()
    options: dict[str, Any] = {"accumulate_into": buffer, "workspace": IN_FORWARD}
    options["grad_output"] = PROMISED
    with torch.no_grad():
        cutefce.linear_cross_entropy(h, w, case.y, **options)
    assert not buffer.any()
    version = buffer._version
    loss = cutefce.linear_cross_entropy(h, w, case.y, **options)
    assert buffer._version > version, "autograd knows that the buffer was written"
    want = wanted(case, PROMISED / (case.y >= 0).sum().item()).dw.float()
    torch.testing.assert_close(buffer, want, rtol=1e-4, atol=1e-6)
    for backwards in (1, 2, 3):
        loss.backward(torch.tensor(PROMISED), retain_graph=True)
        torch.testing.assert_close(buffer, backwards * want, rtol=1e-4, atol=1e-6)
        assert (h.grad is not None) == (trained == "both")
        if h.grad is not None:
            given = wanted(case, PROMISED / (case.y >= 0).sum().item()).dx.float()
            torch.testing.assert_close(h.grad, backwards * given, rtol=1e-4, atol=1e-6)


@pairwise(workspace=[IN_FORWARD, "max"], gradient=["exact", "sampled"], trained=["both", "weight"])
def test_another_gradient_does_not_pass(
    workspace: int | str,
    gradient: str,
    trained: str,
    device: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case, buffer = random_case(1100, 16, 100, device=device), torch.zeros(100, 16, device=device)
    h, w = case.h.requires_grad_(trained == "both"), case.w.requires_grad_()
    options: dict[str, Any] = {"accumulate_into": buffer, "workspace": workspace}
    loss = cutefce.linear_cross_entropy(
        h, w, case.y, gradient=gradient, grad_output=PROMISED, **options
    )
    if device == "cpu":
        with pytest.raises(RuntimeError, match=r"^grad_output: got 0\.375, expected 0\.25, the"):
            (loss / 4).backward(retain_graph=True)
        monkeypatch.setattr(agreement, "_is_known", lambda _: False)  # as on a GPU
    (loss / 4).backward()
    assert buffer[0].isnan().all()
    assert h.grad is None or h.grad[case.y >= 0].isnan().all()


SCALED: dict[str, tuple[float, Callable[[Tensor], Tensor]]] = {
    "65536 / 3": (65536 / 3, lambda loss: loss / 3 * 0.1 * 655360.0),
    "1e-3 / 7": (1e-3 / 7, lambda loss: loss / 7 * 0.1 * 1e-2),
    "2^-140": (2.0**-140, lambda loss: loss * 0.1 * (2.0**-140 * 10)),
    "0": (0.0, lambda loss: loss * 0.0),
    "of a loss in 16 bits": (1 / 3, lambda loss: loss.bfloat16() * (1 / 3)),
}


@pytest.mark.parametrize(("given", "scaled"), SCALED.values(), ids=SCALED)
def test_roundings_of_the_gradient_pass(given: float, scaled: Callable[[Tensor], Tensor]) -> None:
    """A gradient that autograd forms of several factors has more roundings than the one given."""
    case, buffer = random_case(1100, 16, 100), torch.zeros(100, 16)
    h, w = case.h.requires_grad_(), case.w.requires_grad_()
    options: dict[str, Any] = {"accumulate_into": buffer, "workspace": IN_FORWARD}
    scaled(cutefce.linear_cross_entropy(h, w, case.y, grad_output=given, **options)).backward()
    assert h.grad is not None and h.grad.isfinite().all()


@pytest.mark.parametrize("upstream", [torch.nan, torch.inf])
def test_a_gradient_that_is_not_finite_is_passed_on(upstream: float) -> None:
    """But is never the one that was given."""
    case, buffer = random_case(1100, 16, 100), torch.zeros(100, 16)
    h, w = case.h.requires_grad_(), case.w.requires_grad_()
    options: dict[str, Any] = {"accumulate_into": buffer, "workspace": IN_FORWARD}
    loss = cutefce.linear_cross_entropy(h, w, case.y, grad_output=1.0, **options)
    (loss * upstream).backward()
    assert h.grad is not None and h.grad[case.y >= 0].isnan().all()
    assert buffer[0].isnan().all()
    given = torch.tensor(torch.inf)
    loss = cutefce.linear_cross_entropy(h, w, case.y, grad_output=given, accumulate_into=buffer)
    with pytest.raises(RuntimeError, match=r"^grad_output: got inf, expected 1\.0, the gradient"):
        loss.backward()


ADDED = {name: make for name, make in LOSSES.items() if "probabilities" not in name}


@pytest.mark.parametrize("given", GIVEN.values(), ids=GIVEN)
@pytest.mark.parametrize("make", ADDED.values(), ids=ADDED)
def test_every_loss(make: Callable[..., OptionsCase], given: dict[str, Any]) -> None:
    x = make(1100, 16, 100)
    buffer, leaves = torch.ones(100, 16), x.leaves
    loss = x.loss(leaves, accumulate_into=buffer, workspace=IN_FORWARD, **given)
    assert torch.equal(buffer, torch.ones(100, 16)) is not bool(given)
    loss.backward(torch.tensor(PROMISED), retain_graph=True)
    loss.backward(torch.tensor(PROMISED))
    want = x.ours(reduction="mean")
    torch.testing.assert_close(loss.detach(), want[0], rtol=1e-5, atol=1e-6)
    assert leaves[1].grad is None
    sums = leaves[0].grad, buffer - 1, *(leaf.grad for leaf in leaves[2:])
    for got, gradient in zip(sums, want[1:], strict=True):
        torch.testing.assert_close(got, 2 * PROMISED * gradient, rtol=1e-4, atol=1e-6)


def test_log_probs_add(small_tiles: PortableTiles) -> None:
    case, buffer = random_case(70, 32, 333), torch.zeros(333, 32)
    found = []
    kinds: list[dict[str, Any]] = [{"accumulate_into": buffer}, {}]
    for given in kinds:
        w = case.w.clone().requires_grad_()
        values = cutefce.linear_log_probs(case.h, w, case.y, outputs=("entropy",), **given)
        assert values.entropy is not None
        (values.entropy.sum() + values.log_probs.sum()).backward()
        found.append(w.grad)
    assert found[0] is None
    torch.testing.assert_close(buffer, found[1])


def test_dx_is_rounded_once_with_nothing_beside(small_tiles: PortableTiles, device: str) -> None:
    case = random_case(1100, 48, 333, dtype=torch.bfloat16, device=device)
    want = wanted(case, 0.37)
    layout = Layout(in_chunks=True, kept=336, chunk=256)
    errors, upstream = [], torch.tensor(0.37, device=device)
    for given in (None, upstream):
        h, w = (x.clone().requires_grad_() for x in (case.h, case.w))
        buffer = torch.zeros(333, 48, device=device)
        options: dict[str, Any] = {"accumulate_into": buffer, "grad_output": given}
        with pinned(layout):
            loss = cutefce.linear_cross_entropy(h, w, case.y, reduction="sum", **options)
            loss.backward(upstream.to(loss.dtype))
        assert h.grad is not None
        errors.append((h.grad.double() - want.dx).norm())
    assert errors[1] <= 1.01 * errors[0]


def test_ranks_have_the_same_chunks_whatever_their_buffers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One whose buffer GEMMs cannot add to keeps sums, and adds them in the backward."""
    h = torch.empty(2048, 256, dtype=torch.bfloat16, requires_grad=True)
    w = torch.empty(32000, 256, dtype=torch.bfloat16, requires_grad=True)
    monkeypatch.setattr(Sharding, "ranks", lambda _: 2)
    step, sharding = StepOptions(MINIMUM, True, True, False), Sharding("group")
    plans = []
    for sums in (torch.float32, torch.bfloat16):
        tensors = TensorOptions(
            accumulate_into=torch.empty(w.shape, dtype=sums), grad_output=torch.ones(())
        )
        y = torch.zeros(len(h), dtype=torch.long)
        plans.append(plan_for(LossCall(h, w, y, step, LossOptions(), tensors, sharding)))
    first, second = plans
    assert (first.strategy, first.chunk) == (second.strategy, second.chunk)
    assert first.adds_in_forward and not second.adds_in_forward
    assert first.workspace_bytes < second.workspace_bytes


@pytest.mark.parametrize(
    ("workspace", "backend", "given"),
    [
        (IN_FORWARD, "aot_eager", torch.tensor(PROMISED)),
        pytest.param(IN_FORWARD, "aot_eager", PROMISED, marks=pytest.mark.slow),
        pytest.param(IN_FORWARD, "inductor", torch.tensor(PROMISED), marks=pytest.mark.slow),
        pytest.param("max", "aot_eager", None, marks=pytest.mark.slow),
    ],
)
def test_compiled(workspace: int | str, backend: str, given: Any) -> None:
    def loss_of(h: Tensor, w: Tensor, y: Tensor, buffer: Tensor, given: Any) -> Tensor:
        options: dict[str, Any] = {"accumulate_into": buffer, "workspace": workspace}
        loss: Tensor = cutefce.linear_cross_entropy(h * 2, w, y, grad_output=given, **options)
        return loss * PROMISED

    torch.compiler.reset()
    compiled = torch.compile(loss_of, fullgraph=True, backend=backend)
    found = []
    for function in (compiled, loss_of):
        buffer = torch.ones(100, 16)
        for tokens in (1100, 1300):
            case = random_case(tokens, 16, 100)
            h, w = case.h.requires_grad_(), case.w.requires_grad_()
            function(h, w, case.y, buffer, given).backward()
            assert w.grad is None
            found.append(h.grad)
        found.append(buffer)
    for a, b in zip(found[:3], found[3:], strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("backend", rest_slow([None, "aot_eager", "inductor"]))
@pytest.mark.parametrize("how", ["reentrant", "hooks", "offloaded"])
@pytest.mark.parametrize("gradient", [PROMISED, 0.5])
def test_what_runs_again_or_moves_adds_once(gradient: float, how: str, backend: str | None) -> None:
    """Hooks of saved tensors leave dW to the backward, which needs no promise."""
    case, found = random_case(1100, 16, 100), []

    def head(h: Tensor, w: Tensor, buffer: Tensor, given: float | None) -> Tensor:
        options: dict[str, Any] = {"accumulate_into": buffer, "workspace": IN_FORWARD}
        loss: Tensor = cutefce.linear_cross_entropy(h * 2, w, case.y, grad_output=given, **options)
        return loss

    def loss_of(h: Tensor, w: Tensor, buffer: Tensor, given: float | None) -> Tensor:
        loss: Tensor = checkpoint(head, h, w, buffer, given, use_reentrant=how == "reentrant")
        return loss

    torch.compiler.reset()
    function = head if how == "offloaded" else loss_of
    run = function if backend is None else torch.compile(function, backend=backend)
    for given in (PROMISED, None):
        h, w = case.h.detach().requires_grad_(), case.w.detach().requires_grad_()
        buffer = torch.zeros(100, 16)
        with save_on_cpu() if how == "offloaded" else torch.enable_grad():
            loss = run(h, w, buffer, given) if given else head(h, w, buffer, given)
        if given and how == "reentrant" and backend is None and gradient != PROMISED:
            with pytest.raises(RuntimeError, match=r"^grad_output: got"):
                loss.backward(torch.tensor(gradient))
            return
        loss.backward(torch.tensor(gradient))
        found.append((loss.detach(), h.grad, buffer))
    for own, want in zip(*found, strict=True):
        torch.testing.assert_close(own, want)


def test_a_backward_that_finds_nothing_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    """It cannot know whether the forward has added."""
    case = random_case(1100, 16, 100)
    given: dict[str, Any] = {"accumulate_into": torch.zeros(100, 16), "grad_output": 1.0}
    h, w = case.h.requires_grad_(), case.w.requires_grad_()
    loss = cutefce.linear_cross_entropy(h, w, case.y, workspace=IN_FORWARD, **given)
    monkeypatch.setattr(saved, "saved_with", lambda _: None)
    with pytest.raises(RuntimeError, match=r"^grad_output: got a backward that does not find"):
        loss.backward()


def test_opcheck() -> None:
    case = random_case(1100, 8, 50)
    arguments = case.h.requires_grad_(), case.w.requires_grad_(), case.y
    options = {"accumulate_into": torch.zeros(50, 8), "grad_output": torch.ones(())}
    for workspace in (IN_FORWARD, 1 << 30):
        more = options | {"workspace": workspace}
        torch.library.opcheck(torch.ops.cutefce.loss.default, arguments, more)


def test_a_module_and_autocast() -> None:
    head = cutefce.LinearCrossEntropyLoss(16, 100, workspace=IN_FORWARD)
    x, y = torch.randn(1100, 16, requires_grad=True), torch.randint(100, (1100,))
    buffer, weight = torch.zeros(100, 16), head.linear.weight
    with torch.autocast("cpu", torch.bfloat16):
        loss = head(x, y, accumulate_into=buffer, grad_output=0.5)
        assert buffer.any()
        (loss / 2).backward()
        (head(x, y) / 2).backward()
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


def test_a_buffer_may_be_the_existing_gradient_or_lie_beside_the_weight() -> None:
    rows = torch.randn(20, 8)
    w, sums = rows[:10].requires_grad_(), rows.detach()[10:].zero_()
    x, y, before = torch.randn(4, 8), torch.arange(4), w.detach().clone().requires_grad_()
    cutefce.linear_cross_entropy(x, w, y, accumulate_into=sums).backward()
    torch.nn.functional.cross_entropy(x @ before.t(), y).backward()
    torch.testing.assert_close(sums, before.grad)
    assert torch.equal(w, before)
    once = sums.clone()
    cutefce.linear_cross_entropy(x, before, y, accumulate_into=before.grad).backward()
    torch.testing.assert_close(before.grad, 2 * once)


def test_the_memory_of_another_argument_is_refused(device: str) -> None:
    h, w = torch.randn(4, 8, device=device), torch.randn(10, 8, device=device, requires_grad=True)
    buffer, y = torch.zeros_like(w), torch.zeros(4, dtype=torch.long, device=device)
    with pytest.raises(ValueError, match="accumulate_into: got the memory of token_weights"):
        cutefce.linear_cross_entropy(h, w, y, accumulate_into=buffer, token_weights=buffer[0, :4])
