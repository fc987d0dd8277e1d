"""dW added to a buffer in the forward, where the loss's gradient is given before."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

import cutefce
from cutefce.cute_kernels.config import PortableTiles
from cutefce.ops.interface.options import LossOptions, Sharding, StepOptions, TensorOptions
from cutefce.ops.operators import agreement, kept
from cutefce.ops.operators.plans import plan_for
from cutefce.ops.planning.budget import MINIMUM
from tests.support.backends import Backend, on_backends
from tests.support.layouts import Layout, pinned
from tests.support.options import OPTIONS, options_case, soft_case
from tests.support.reference import Case, Result, exact, random_case
from tests.support.tiers import pairwise, rest_slow

PAIRS = [
    (torch.bfloat16, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.float16, torch.float32),
    (torch.float32, torch.float32),
    (torch.float64, torch.float64),
]
IN_FORWARD = 1
"""A workspace too small for any plan: the smallest one has chunks if tokens are many."""
PROMISED = 0.375


def stepped(case: Case, buffer: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """Return loss and dX of a step that adds dW to `buffer`; the loss's gradient is `PROMISED`."""
    h, w = case.h.detach().requires_grad_(), case.w.detach().requires_grad_()
    loss = cutefce.linear_cross_entropy(h, w, case.y, accumulate_into=buffer, **options)
    loss.backward(torch.full_like(loss, PROMISED))
    assert w.grad is None and h.grad is not None
    return loss.detach(), h.grad


def wanted(case: Case, factor: float) -> Result:
    """Return the exact results for the upstream gradient `factor` of each token's loss."""
    return exact(dataclasses.replace(case, upstream=torch.full_like(case.upstream, factor)))


def is_in_forward(case: Case, buffer: Tensor, workspace: int | str | None) -> bool:
    """Whether a forward adds dW."""
    given: dict[str, Any] = {"accumulate_into": buffer, "grad_output": PROMISED}
    h, w = case.h.detach().requires_grad_(), case.w.detach().requires_grad_()
    return cutefce.plan(h, w, workspace=workspace, **given).adds_in_forward


@pairwise(pair=PAIRS, reduction=["mean", "sum"], workspace=[IN_FORWARD, 200 << 10, "max", None])
def test_results_are_those_without_it(
    pair: tuple[torch.dtype, torch.dtype],
    reduction: str,
    workspace: int | str | None,
    device: str,
) -> None:
    dtype, sums = pair
    case = random_case(1100, 48, 333, dtype=dtype, device=device)
    before = torch.randn(333, 48, device=device).to(sums)
    options: dict[str, Any] = {"reduction": reduction, "workspace": workspace}
    plain, buffer = before.clone(), before.clone()
    loss, dx = stepped(case, plain, **options)
    own_loss, own_dx = stepped(case, buffer, grad_output=PROMISED, **options)
    torch.testing.assert_close(own_loss, loss, rtol=1e-6, atol=0)
    factor = PROMISED / ((case.y >= 0).sum().item() if reduction == "mean" else 1)
    want = wanted(case, factor)
    after = before.double() + want.dw

    def errors(dx: Tensor, buffer: Tensor) -> tuple[Tensor, Tensor]:
        return (dx.double() - want.dx).norm(), (buffer.double() - after).norm()

    # a GEMM of a chunk may add its products to wider sums block by block
    roundings = 16 * float(torch.finfo(sums).eps) * after.norm()
    for own, error in zip(errors(own_dx, buffer), errors(dx, plain), strict=True):
        assert own <= 1.1 * error + roundings


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_microbatches_equal_one_call(dtype: torch.dtype, device: str) -> None:
    """Of a scaled loss, in a pipeline, whose forwards run ahead of backwards."""
    case, scale = random_case(8192, 32, 500, dtype=dtype, device=device, ignored=0), 1024.0
    buffer, w = torch.zeros(500, 32, device=device), case.w.clone().requires_grad_()
    assert is_in_forward(dataclasses.replace(case, h=case.h[:1024]), buffer, IN_FORWARD)
    parts = [h.clone().requires_grad_() for h in case.h.split(1024)]
    losses: list[Tensor] = []
    options: dict[str, Any] = {"accumulate_into": buffer, "workspace": IN_FORWARD}
    for h, y in zip(parts, case.y.split(1024), strict=True):
        given = scale / 8 if len(losses) % 2 else torch.tensor([scale / 8])
        loss = cutefce.linear_cross_entropy(h, w, y, grad_output=given, **options)
        losses.append(loss * scale / 8)
    for loss in losses:
        loss.backward()
    want = wanted(case, scale / 8192)
    rounding = float(torch.finfo(dtype).eps)
    assert (buffer.double() - want.dw).norm() <= 4 * rounding * want.dw.norm()
    dx = torch.cat([h.grad for h in parts if h.grad is not None])
    assert (dx.double() - want.dx).norm() <= 4 * rounding * want.dx.norm()


@pytest.mark.parametrize("trained", ["both", "weight"])
def test_the_forward_adds(trained: str) -> None:
    case, buffer = random_case(1100, 16, 100), torch.zeros(100, 16)
    h, w = case.h.requires_grad_(trained == "both"), case.w.requires_grad_()
    options: dict[str, Any] = {"accumulate_into": buffer, "workspace": IN_FORWARD}
    options["grad_output"] = PROMISED
    assert is_in_forward(case, buffer, IN_FORWARD)
    with torch.no_grad():
        cutefce.linear_cross_entropy(h, w, case.y, **options)
    assert not buffer.any()
    version = buffer._version
    loss = cutefce.linear_cross_entropy(h, w, case.y, **options)
    assert buffer._version > version, "autograd knows that the buffer was written"
    want = wanted(case, PROMISED / (case.y >= 0).sum().item()).dw
    torch.testing.assert_close(buffer, want.float(), rtol=1e-4, atol=1e-6)
    loss.backward(torch.tensor(PROMISED), retain_graph=True)
    torch.testing.assert_close(buffer, want.float(), rtol=1e-4, atol=1e-6)
    once = None if h.grad is None else h.grad.clone()
    assert (once is not None) == (trained == "both")
    for backwards in (2, 3):
        loss.backward(torch.tensor(PROMISED), retain_graph=True)
        torch.testing.assert_close(buffer, backwards * want.float(), rtol=1e-4, atol=1e-6)
        if once is not None and h.grad is not None:
            torch.testing.assert_close(h.grad, backwards * once, rtol=1e-4, atol=1e-6)


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


def test_roundings_of_the_gradient_pass() -> None:
    """A gradient that autograd forms of several factors has more roundings than the one given."""
    case, buffer = random_case(1100, 16, 100), torch.zeros(100, 16)
    for scale, parts in ((65536.0, 3), (1e-3, 7), (2.0**-140, 1), (0.0, 1)):
        h, w = case.h.detach().requires_grad_(), case.w.detach().requires_grad_()
        options: dict[str, Any] = {"accumulate_into": buffer, "workspace": IN_FORWARD}
        loss = cutefce.linear_cross_entropy(h, w, case.y, grad_output=scale / parts, **options)
        (loss / parts * 0.1 * (scale * 10)).backward()
        assert h.grad is not None and h.grad.isfinite().all()


def test_the_gradient_of_a_loss_in_16_bits_passes() -> None:
    case, buffer = random_case(1100, 16, 100), torch.zeros(100, 16)
    h, w = case.h.requires_grad_(), case.w.requires_grad_()
    options: dict[str, Any] = {"accumulate_into": buffer, "workspace": IN_FORWARD}
    loss = cutefce.linear_cross_entropy(h, w, case.y, grad_output=1 / 3, **options)
    (loss.bfloat16() * (1 / 3)).backward()
    assert h.grad is not None and h.grad.isfinite().all()


@pytest.mark.parametrize("upstream", [torch.nan, torch.inf])
def test_a_gradient_that_is_not_finite_is_passed_on(upstream: float) -> None:
    case, buffer = random_case(1100, 16, 100), torch.zeros(100, 16)
    h, w = case.h.requires_grad_(), case.w.requires_grad_()
    options: dict[str, Any] = {"accumulate_into": buffer, "workspace": IN_FORWARD}
    loss = cutefce.linear_cross_entropy(h, w, case.y, grad_output=1.0, **options)
    (loss * upstream).backward()
    assert h.grad is not None and h.grad[case.y >= 0].isnan().all()
    assert buffer[0].isnan().all()


TOGETHER = [name for name in OPTIONS if name not in ("softcap", "temperature", "temperature ()")]
OF_OPTIONS = {name: [name] for name in OPTIONS} | {"all": TOGETHER}


@pytest.mark.parametrize("name", [*OF_OPTIONS, "soft targets"])
def test_every_option(name: str) -> None:
    sizes, found = (1100, 16, 100), []
    if name == "soft targets":
        x = soft_case(["label_smoothing", "z_loss"], 8, *sizes)
    else:
        x = options_case(OF_OPTIONS[name], *sizes)
    for given in ({}, {"grad_output": PROMISED}):
        leaves, buffer = x.leaves, torch.ones(100, 16)
        options: dict[str, Any] = x.with_leaves(leaves) | given | {"workspace": IN_FORWARD}
        y = None if "target_indices" in options else x.case.y
        options["accumulate_into"] = buffer
        loss: Any = cutefce.linear_cross_entropy(leaves[0], leaves[1], y, **options)
        assert torch.equal(buffer, torch.ones(100, 16)) is not bool(given)
        loss.backward(torch.tensor(PROMISED), retain_graph=True)
        loss.backward(torch.tensor(PROMISED))
        found.append((loss.detach(), leaves[0].grad, buffer, *(leaf.grad for leaf in leaves[2:])))
    for want, own in zip(*found, strict=True):
        torch.testing.assert_close(own, want, rtol=1e-5, atol=1e-6)


CHUNKED = {
    "even": Layout(in_chunks=True, kept=336, chunk=40),
    "one": Layout(in_chunks=True, kept=336),
}


@on_backends(layout=CHUNKED)
def test_every_layout(layout: Layout, backend: Backend) -> None:
    case = random_case(150, 48, 333, dtype=torch.bfloat16, device=backend.device, ignored=0.4)
    want = wanted(case, PROMISED)
    backend.hide_ignored(case)
    h, w = case.h.clone().requires_grad_(), case.w.clone().requires_grad_()
    buffer, promised = torch.ones(333, 48, device=backend.device), torch.tensor(PROMISED)
    options: dict[str, Any] = {"accumulate_into": buffer, "reduction": "sum"}
    with pinned(layout):
        loss = cutefce.linear_cross_entropy(h, w, case.y, grad_output=PROMISED, **options)
        error = (buffer.double() - 1 - want.dw).norm()
        assert error <= 2**-7 * want.dw.norm(), "it was added in the forward"
        loss.backward(promised.to(loss))
    assert h.grad is not None
    assert (h.grad.double() - want.dx).norm() <= 2**-7 * want.dx.norm()


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


def test_a_plan_says_where_dw_is_added() -> None:
    h = torch.empty(2048, 256, dtype=torch.bfloat16, requires_grad=True)
    w = torch.empty(32000, 256, dtype=torch.bfloat16, requires_grad=True)
    plans = {}
    for sums in (torch.float32, torch.bfloat16):
        buffer = torch.empty(w.shape, dtype=sums)
        for given in (None, 0.5, torch.tensor([0.5])):
            options: dict[str, Any] = {"accumulate_into": buffer, "grad_output": given}
            plan = cutefce.plan(h, w, workspace="min", **options)
            plans[sums, given is not None] = plan
            assert plan.adds_in_forward == ("caller's buffer" in str(plan))
    assert plans[torch.float32, True].adds_in_forward
    assert not plans[torch.float32, False].adds_in_forward
    # a buffer of 16 bits is not added to by GEMMs
    assert plans[torch.bfloat16, True] == plans[torch.bfloat16, False]


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
        plans.append(plan_for(h, w, step, LossOptions(), tensors, sharding))
    first, second = plans
    assert (first.strategy, first.chunk) == (second.strategy, second.chunk)
    assert first.adds_in_forward and not second.adds_in_forward
    assert first.workspace_bytes < second.workspace_bytes


@pytest.mark.parametrize(
    ("workspace", "backend", "as_tensor"),
    [
        (IN_FORWARD, "aot_eager", True),
        pytest.param(IN_FORWARD, "aot_eager", False, marks=pytest.mark.slow),
        pytest.param(IN_FORWARD, "inductor", True, marks=pytest.mark.slow),
        pytest.param("max", "aot_eager", False, marks=pytest.mark.slow),
    ],
)
def test_compiled(workspace: int | str, backend: str, as_tensor: bool) -> None:
    def loss_of(h: Tensor, w: Tensor, y: Tensor, buffer: Tensor, given: Any) -> Tensor:
        options: dict[str, Any] = {"accumulate_into": buffer, "workspace": workspace}
        loss: Tensor = cutefce.linear_cross_entropy(h * 2, w, y, grad_output=given, **options)
        return loss * PROMISED

    torch.compiler.reset()
    compiled = torch.compile(loss_of, fullgraph=True, backend=backend)
    given = torch.tensor(PROMISED) if as_tensor else PROMISED
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
    monkeypatch.setattr(kept, "kept_with", lambda _: None)
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


def test_a_gradient_that_is_not_finite_is_never_the_right_one() -> None:
    h, w = torch.randn(64, 16, requires_grad=True), torch.randn(100, 16, requires_grad=True)
    y, buffer = torch.randint(100, (64,)), torch.zeros(100, 16)
    loss = cutefce.linear_cross_entropy(
        h, w, y, accumulate_into=buffer, grad_output=torch.tensor(torch.inf)
    )
    with pytest.raises(RuntimeError, match=r"^grad_output: got inf, expected 1\.0, the gradient"):
        loss.backward()
