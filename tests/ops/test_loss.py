"""The operator as torch sees it: options, layouts, autograd, compilation, autocast."""

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo.testing
import torch.nn.functional as F
from torch import Tensor

import cutefce
from cutefce.cute_kernels import process_cache
from cutefce.cute_kernels.config import PortableTiles
from cutefce.ops.operators import plans
from cutefce.ops.program.plan import Plan, plan
from tests.support.reference import (
    Case,
    Result,
    are_same,
    assert_as_accurate,
    ours,
    random_case,
)
from tests.support.tiers import pairwise, rest_slow

WORKSPACES = ["max", "min", 1 << 20, None]


def leaves(case: Any) -> tuple[Tensor, Tensor]:
    return case.h.detach().requires_grad_(), case.w.detach().requires_grad_()


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("workspace", WORKSPACES)
def test_reductions_equal_torch(
    reduction: str, workspace: int | str | None, small_tiles: PortableTiles, device: str
) -> None:
    case = random_case(60, 16, 333, dtype=torch.float64, device=device)
    h, w = leaves(case)
    got = torch.ops.cutefce.loss(h, w, case.y, reduction=reduction, workspace=workspace)
    want = F.cross_entropy(F.linear(h, w), case.y, reduction=reduction)
    torch.testing.assert_close(got, want)
    upstream = torch.randn_like(want)
    gradients = torch.autograd.grad(got, (h, w), upstream)
    torch.testing.assert_close(gradients, torch.autograd.grad(want, (h, w), upstream))


@pytest.mark.parametrize("ignore_index", [-100, -1, 5, 10**6])
def test_ignore_index(ignore_index: int, device: str) -> None:
    case = random_case(60, 16, 20, dtype=torch.float64, device=device, ignored=0)
    y = torch.where(torch.arange(60, device=device) % 3 == 0, ignore_index, case.y)
    h, w = leaves(case)
    got = cutefce.linear_cross_entropy(h, w, y, ignore_index=ignore_index)
    want = F.cross_entropy(F.linear(h, w), y, ignore_index=ignore_index)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(torch.autograd.grad(got, (h, w)), torch.autograd.grad(want, (h, w)))


@pairwise(
    dtype=[torch.float32, torch.bfloat16],
    tokens=[0, 1, 6],
    reduction=["mean", "sum", "none"],
    workspace=["max", "min"],
)
def test_nothing_counts(
    dtype: torch.dtype, tokens: int, reduction: str, workspace: str, device: str
) -> None:
    """No tokens, or none that is not ignored: loss 0, gradients 0 and present."""
    case = random_case(tokens, 8, 50, dtype=dtype, device=device)
    case.y.fill_(-100)
    h, w = leaves(case)
    loss = cutefce.linear_cross_entropy(h, w, case.y, reduction=reduction, workspace=workspace)
    dx, dw = torch.autograd.grad(loss.sum(), (h, w))
    assert loss.shape == ((tokens,) if reduction == "none" else ())
    assert not loss.any() and not dx.any() and not dw.any()
    assert dx.shape == h.shape and dw.shape == w.shape


@pytest.mark.parametrize("lead", [(), (7,), (2, 5), (2, 1, 4)])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8])
def test_leading_shapes_and_integer_targets(
    lead: tuple[int, ...], dtype: torch.dtype, device: str
) -> None:
    h = torch.randn(*lead, 8, dtype=torch.float64, device=device)
    w = torch.randn(30, 8, dtype=torch.float64, device=device)
    y = torch.randint(30, lead, device=device)
    got = cutefce.linear_cross_entropy(h, w, y.to(dtype), reduction="none")
    want = F.cross_entropy(F.linear(h, w).reshape(-1, 30), y.reshape(-1), reduction="none")
    torch.testing.assert_close(got, want.reshape(lead))


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.t().contiguous().t(),
    "wide pitch": lambda x: F.pad(x, (0, 3))[:, : x.shape[1]],
    "every second column": lambda x: x.repeat_interleave(2, 1)[:, ::2],
    "one row, expanded": lambda x: x[:1].expand_as(x),
    "one column, expanded": lambda x: x[:, :1].expand_as(x),
}


@pytest.mark.parametrize("workspace", rest_slow(["min", "max"]))
@pytest.mark.parametrize(
    ("h_layout", "w_layout"),
    [
        pair
        for pair in itertools.product(LAYOUTS, LAYOUTS)
        if "contiguous" in pair or len({*pair}) == 1
    ],
)
def test_layouts(h_layout: str, w_layout: str, workspace: str, device: str) -> None:
    case = random_case(40, 16, 100, dtype=torch.float64, device=device)
    h = LAYOUTS[h_layout](case.h).detach().requires_grad_()
    w = LAYOUTS[w_layout](case.w).detach().requires_grad_()
    y = case.y.repeat_interleave(2)[::2]
    for _ in range(2):
        got = cutefce.linear_cross_entropy(h, w, y, workspace=workspace)
        want = F.cross_entropy(F.linear(h, w), y)
        torch.testing.assert_close(
            torch.autograd.grad(got, (h, w)), torch.autograd.grad(want, (h, w))
        )


@pytest.mark.parametrize(
    "upstream",
    [
        lambda n: torch.zeros(n),
        lambda n: torch.full((n,), -2.5),
        lambda n: torch.randn(n),
        lambda n: torch.randn(()).expand(n),
        lambda n: torch.randn(2 * n)[::2],
        lambda n: torch.randn(n, n)[:, 1],
    ],
    ids=["zero", "negative", "per token", "expanded", "strided", "a column"],
)
@pytest.mark.parametrize("workspace", ["max", "min"])
def test_upstream_gradients(upstream: Any, workspace: str, device: str) -> None:
    case = random_case(40, 16, 100, dtype=torch.float64, device=device)
    h, w = leaves(case)
    g = upstream(40).double().to(device)
    got = cutefce.linear_cross_entropy(h, w, case.y, reduction="none", workspace=workspace)
    want = F.cross_entropy(F.linear(h, w), case.y, reduction="none")
    torch.testing.assert_close(
        torch.autograd.grad(got, (h, w), g), torch.autograd.grad(want, (h, w), g)
    )


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("workspace", WORKSPACES)
def test_backward_twice(
    reduction: str, workspace: int | str | None, small_tiles: PortableTiles, device: str
) -> None:
    case = random_case(60, 16, 333, device=device)
    h, w = leaves(case)
    loss = cutefce.linear_cross_entropy(h, w, case.y, reduction=reduction, workspace=workspace)
    upstream = torch.randn_like(loss)
    first = torch.autograd.grad(loss, (h, w), upstream, retain_graph=True)
    doubled = torch.autograd.grad(loss, (h, w), 2 * upstream, retain_graph=True)
    again = torch.autograd.grad(loss, (h, w), upstream)
    for a, b, c in zip(first, doubled, again, strict=True):
        assert torch.equal(a, c) and torch.equal(2 * a, b)


@pytest.mark.parametrize("workspace", ["max", "min"])
@pytest.mark.parametrize(("train_h", "train_w"), [(True, False), (False, True), (False, False)])
def test_frozen_inputs(train_h: bool, train_w: bool, workspace: str, device: str) -> None:
    case = random_case(40, 16, 100, dtype=torch.float64, device=device)
    h = case.h.requires_grad_(train_h)
    w = case.w.requires_grad_(train_w)
    got = cutefce.linear_cross_entropy(h, w, case.y, workspace=workspace)
    assert got.requires_grad == (train_h or train_w)
    if got.requires_grad:
        got.backward()
        want = F.cross_entropy(F.linear(h, w), case.y)
        trained = [x for x in (h, w) if x.requires_grad]
        gradients = [x.grad for x in trained]
        torch.testing.assert_close(gradients, list(torch.autograd.grad(want, trained)))
    assert (h.grad is not None) == train_h and (w.grad is not None) == train_w


def test_runs_are_bitwise_equal(device: str) -> None:
    case = random_case(500, 32, 1000, device=device)  # targets repeat: dW sums rows of one target
    first, second = ours(case), ours(case)
    for name in ("loss", "dx", "dw"):
        assert torch.equal(getattr(first, name), getattr(second, name)), name


@pytest.mark.parametrize("workspace", WORKSPACES)
@pytest.mark.parametrize("kind", ["tensor", "integers", "number"])
def test_denominator(
    kind: str, workspace: int | str | None, small_tiles: PortableTiles, device: str
) -> None:
    case = random_case(60, 16, 333, dtype=torch.bfloat16, device=device)
    other = copy.deepcopy(case)
    other.upstream.fill_(1 / 12)
    h, w = leaves(case)
    given: Any = {
        "tensor": torch.tensor(12.0, device=device),
        "integers": torch.tensor(12, device=device),
        "number": 12,
    }[kind]
    loss = cutefce.linear_cross_entropy(h, w, case.y, denominator=given, workspace=workspace)
    total = cutefce.linear_cross_entropy(h, w, case.y, reduction="sum")
    torch.testing.assert_close(loss, total / 12)
    dx, dw = torch.autograd.grad(loss, (h, w))
    got = Result(loss.detach(), dx, dw)
    # a gradient that is rounded before it is divided would be too far off
    assert_as_accurate(got, other, ("dx", "dw"))


@pytest.mark.parametrize("workspace", ["max", "min"])
def test_a_denominator_of_nothing(workspace: str, device: str) -> None:
    case = random_case(6, 8, 50, device=device)
    case.y.fill_(-100)
    h, w = leaves(case)
    loss = cutefce.linear_cross_entropy(h, w, case.y, denominator=0, workspace=workspace)
    dx, dw = torch.autograd.grad(loss, (h, w))
    assert not loss.any() and not dx.any() and not dw.any()


# one of a number of bytes, one of a name
@pytest.mark.parametrize("workspace", rest_slow([None, "min", "max", 1 << 20], default=2))
@pytest.mark.parametrize("reduction", rest_slow(["mean", "none"]))
def test_opcheck(workspace: int | str | None, reduction: str, device: str) -> None:
    case = random_case(20, 8, 50, device=device)
    overload = torch.ops.cutefce.loss.default
    if isinstance(workspace, str):
        overload = torch.ops.cutefce.loss.preset
    options = {"reduction": reduction, "workspace": workspace}
    torch.library.opcheck(overload, (*leaves(case), case.y), options)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_opcheck_of_the_forward_alone(reduction: str, device: str) -> None:
    case = random_case(20, 8, 50, device=device)
    arguments = (case.h, case.w, case.y, reduction, -100)
    torch.library.opcheck(torch.ops.cutefce.forward.default, arguments)


@pytest.mark.parametrize("dynamic", rest_slow([True, False]))
@pytest.mark.parametrize("workspace", rest_slow([None, "max", "min", 1 << 20]))
def test_compiled_equals_eager(
    workspace: int | str | None, dynamic: bool, small_tiles: PortableTiles, device: str
) -> None:
    def step(h: Tensor, w: Tensor, y: Tensor) -> Tensor:
        loss: Tensor = torch.ops.cutefce.loss(h * 2, w, y, workspace=workspace)
        return loss + 1

    torch.compiler.reset()
    backend = "aot_eager" if device == "cpu" else "inductor"
    compiled = torch.compile(step, fullgraph=True, dynamic=dynamic, backend=backend)
    for tokens in (40, 70, 33):
        case = random_case(tokens, 16, 333, device=device)

        def run(function: Callable[..., Tensor], case: Case = case) -> tuple[Tensor, ...]:
            h, w = leaves(case)
            loss = function(h, w, case.y)
            return loss, *torch.autograd.grad(loss, (h, w))

        if device == "cuda":
            run(compiled)  # the run that compiles the step may take the portable path unfused
        for eager, fast in zip(run(step), run(compiled), strict=True):
            assert are_same(eager, fast)


def test_dynamic_sizes_share_graphs(device: str) -> None:
    torch.compiler.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(
        lambda h, w, y: torch.ops.cutefce.loss(h, w, y),
        fullgraph=True,
        dynamic=True,
        backend=counter,
    )
    for tokens in (40, 41, 57, 300, 301, 512):
        case = random_case(tokens, 16, 333, device=device)
        compiled(*leaves(case), case.y).backward()
    # a graph for each of the ranges that the planner tells apart, not for each size
    assert counter.frame_count <= 3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_casts_as_linear_does(dtype: torch.dtype, device: str) -> None:
    case = random_case(50, 16, 333, device=device)
    h, w = leaves(case)
    with torch.autocast(device, dtype=dtype):
        loss = torch.ops.cutefce.loss(h, w, case.y)
    cast = cutefce.linear_cross_entropy(h.to(dtype), w.to(dtype), case.y)
    assert torch.equal(loss, cast) and loss.dtype == torch.float32
    for a, b in zip(
        torch.autograd.grad(loss, (h, w)), torch.autograd.grad(cast, (h, w)), strict=True
    ):
        assert torch.equal(a, b) and a.dtype == torch.float32
    with torch.autocast(device, dtype=dtype):
        assert ours_dtype(h.double(), w.double(), case.y) == torch.float64


def ours_dtype(h: Tensor, w: Tensor, y: Tensor) -> torch.dtype:
    return cutefce.linear_cross_entropy(h, w, y).dtype


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("ignored", [0.0, 0.2])
def test_the_loss_can_be_changed_in_place(ignored: float, reduction: str, device: str) -> None:
    case = random_case(10, 8, 30, dtype=torch.bfloat16, device=device, ignored=ignored)
    h, w = leaves(case)
    loss = cutefce.linear_cross_entropy(h, w, case.y, reduction=reduction)
    scaled = torch.autograd.grad((loss / 4).sum(), (h, w), retain_graph=True)
    changed = torch.autograd.grad(loss.div_(4).sum(), (h, w))
    assert all(torch.equal(a, b) for a, b in zip(scaled, changed, strict=True))


def test_second_derivatives_are_refused(device: str) -> None:
    case = random_case(10, 8, 30, dtype=torch.float64, device=device)
    h, w = leaves(case)
    loss = cutefce.linear_cross_entropy(h, w, case.y, reduction="none", workspace="max")
    (dx,) = torch.autograd.grad(loss.sum(), h, create_graph=True)
    with pytest.raises(NotImplementedError, match="second derivatives"):
        dx.sum().backward()


def test_module_exchanges_state_with_torch(device: str) -> None:
    ours_module = cutefce.LinearCrossEntropyLoss(8, 30, device=device, dtype=torch.float64)
    head = torch.nn.Linear(8, 30, bias=False, device=device, dtype=torch.float64)
    ours_module.load_state_dict({"linear.weight": head.weight.detach()})
    h = torch.randn(2, 5, 8, device=device, dtype=torch.float64)
    y = torch.randint(30, (2, 5), device=device)
    torch.testing.assert_close(
        ours_module(h, y), F.cross_entropy(head(h).flatten(0, 1), y.flatten())
    )
    copied = copy.deepcopy(ours_module)
    assert torch.equal(copied.linear.weight, ours_module.linear.weight)


@pytest.mark.gpu
def test_out_of_range_targets_are_nan_on_a_gpu() -> None:
    case = random_case(20, 8, 100, device="cuda", ignored=0)
    case.y[4], case.y[7] = 100, -7
    got = ours(case)
    bad = torch.zeros(20, dtype=torch.bool, device="cuda")
    bad[[4, 7]] = True
    assert bool(got.loss.isnan().eq(bad).all()) and bool(got.dx[bad].isnan().all())
    assert bool(torch.isfinite(got.dx[~bad]).all()) and bool(got.dw.isnan().any())


@pytest.mark.gpu
@pytest.mark.parametrize("workspace", ["max", "min"])
def test_graph_capture_replays_the_eager_result(workspace: str) -> None:
    """Capture forbids every wait for the GPU, so this also shows that there is none."""
    case = random_case(300, 64, 5000, dtype=torch.bfloat16, device="cuda")
    h, w = leaves(case)

    def step() -> tuple[Tensor, ...]:
        loss = cutefce.linear_cross_entropy(h, w, case.y, workspace=workspace)
        return loss, *torch.autograd.grad(loss, (h, w))

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        eager = step()
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for x in captured:
        x.fill_(0)
    graph.replay()
    for a, b in zip(eager, captured, strict=True):
        assert torch.equal(a, b)


def test_default_plans_are_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    case = random_case(11, 8, 30)
    process_cache.reset()
    made: list[Any] = []

    def count(*arguments: Any) -> Plan:
        made.append(arguments)
        return plan(*arguments)

    monkeypatch.setattr(plans, "plan", count)
    ours(case)
    once = len(made)
    ours(case)
    assert len(made) == once > 0
    assert_as_accurate(ours(case), case)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_no_tokens_have_gradients_of_zero(dtype: torch.dtype, reduction: str, device: str) -> None:
    h = torch.zeros(0, 8, dtype=dtype, device=device, requires_grad=True)
    w = torch.randn(30, 8, device=device).to(dtype).requires_grad_()
    y = torch.zeros(0, dtype=torch.long, device=device)
    for workspace in WORKSPACES:
        options: dict[str, Any] = {"reduction": reduction, "workspace": workspace}
        loss = cutefce.linear_cross_entropy(h, w, y, **options)
        assert loss.sum() == 0
        dx, dw = torch.autograd.grad(loss.sum(), (h, w))
        assert dx.shape == (0, 8)
        assert not dw.any()
