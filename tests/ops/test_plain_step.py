"""Repeated plain training steps: less is done on the host, and the results are the same bits."""

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo import compiled_autograd
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import cutefce
from cutefce.autotune_cache.defaults import window_configs
from cutefce.cute_kernels import problem as problem_module
from cutefce.cute_kernels import process_cache
from cutefce.cute_kernels.arch.sm90 import Sm90
from cutefce.cute_kernels.gpu import Gpu
from cutefce.cute_kernels.problem import Problem
from cutefce.ops import torch_compat
from cutefce.ops.interface import call_cache
from cutefce.ops.operators import kept, operators, plain_step
from cutefce.ops.operators.plans import plan_for
from cutefce.ops.planning import window_layout
from cutefce.ops.planning.planner import MINIMUM, make_plan
from cutefce.ops.primitives import dispatch
from cutefce.ops.primitives.fused import hidden_product
from cutefce.ops.primitives.fused import step as fused_step
from cutefce.ops.primitives.row_selection import has_aligned_rows
from tests.support.kernel_models import use_models
from tests.support.modes import Seen
from tests.support.reference import random_case

SIZES = 64, 128, 30000
"""Tokens, hidden, and vocab, of more than one window."""
SOME = 416 << 10
"""A workspace in which some exponentials are stored and others computed again, on every device."""


@pytest.fixture(autouse=True)
def on_kernels(device: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Serve calls by the kernels; on a CPU by models of them."""
    if device == "cpu":
        pytest.importorskip("cutlass")
        use_models(monkeypatch)
        monkeypatch.setattr(dispatch, "_device_unsupported_reason", lambda device, dtype: None)
        monkeypatch.setattr(dispatch, "gpu_of", lambda device: Gpu(Sm90(), "a model", 132))
        monkeypatch.setattr(call_cache, "is_on_current_gpu", lambda x: True)
        monkeypatch.setattr(operators, "plan_of", lambda h, w, y, *call: plan_for(h, w, *call))
    process_cache.reset()
    yield
    process_cache.reset()


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return a list that grows with each forward of a `PlainStep`."""
    calls: list[Any] = []
    forward = plain_step._forward

    def note(*arguments: Any) -> Any:
        calls.append(arguments)
        return forward(*arguments)

    monkeypatch.setattr(plain_step, "_forward", note)
    return calls


def leaves(device: str, dtype: torch.dtype = torch.bfloat16, ignored: float = 0.3) -> list[Tensor]:
    case = random_case(*SIZES, dtype=dtype, device=device, ignored=ignored)
    return [case.h.requires_grad_(), case.w.requires_grad_(), case.y]


def loss(h: Tensor, w: Tensor, y: Tensor, **options: Any) -> Tensor:
    result: Tensor = torch.ops.cutefce.loss(h, w, y, **options)
    return result


def gradients(result: Tensor, *inputs: Tensor, **more: Any) -> tuple[Tensor, ...]:
    upstream = torch.linspace(-1, 2, result.numel(), device=result.device).view(result.shape)
    wanted = [x for x in inputs if x.requires_grad]
    return torch.autograd.grad(result, wanted, upstream, **more)


def are_same(results: list[tuple[Tensor, ...]]) -> bool:
    first, *others = results
    return all(all(map(torch.equal, first, other)) for other in others)


@pytest.mark.parametrize("selects", [False, True], ids=["all rows", "selected rows"])
@pytest.mark.parametrize("workspace", ["min", "max", SOME])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_a_repeat_has_the_bits_of_the_first_step(
    reduction: str,
    dtype: torch.dtype,
    workspace: int | str,
    selects: bool,
    device: str,
    steps: list[Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(problem_module, "MIN_SELECTED", 1 if selects else 1 << 30)
    h, w, y = leaves(device, dtype)
    results = []
    for _ in range(3):
        result = loss(h, w, y, reduction=reduction, workspace=workspace)
        results.append((result, *gradients(result, h, w)))
    assert are_same(results) and len(steps) == 2


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_layouts_for_fewer_rows_are_those_of_all_paths(
    reduction: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(problem_module, "MIN_SELECTED", 1)
    monkeypatch.setattr(window_layout, "EMPTY", 0)
    h, w, y = leaves(device, ignored=0)
    order = torch.randperm(len(y), device=device)
    more: Any = {"workspace": SOME, "reduction": reduction}
    targets = [y.index_fill(0, order[count:], -100) for count in (37, 36, 2, 0)]
    want = [gradients(loss(h, w, each, **more), h, w) for each in targets]
    monkeypatch.setattr(window_layout, "EMPTY", 1000)
    monkeypatch.setattr(window_layout, "ROW_BLOCK", 4)
    process_cache.reset()
    for each, exact in zip(targets, want, strict=True):
        call_cache.clear()
        first, again = loss(h, w, each, **more), loss(h, w, each, **more)
        (entry,) = call_cache._entries.values()
        assert isinstance(entry, plain_step.PlainStep)
        assert entry.fused is not None and entry.fused.has_layouts
        results = [(x, *gradients(x, h, w, retain_graph=True)) for x in (first, again)]
        results += [(x, *gradients(x, h, w)) for x in (first, again)]
        with save_on_cpu():  # what the forward keeps is not found by a copy of the statistics
            last = loss(h, w, each, **more)
        results.append((last, *gradients(last, h, w)))
        assert are_same(results)
        for got, a in zip(results[0][1:], exact, strict=True):
            assert float((got - a).float().norm()) <= 2**-7 * float(a.float().norm())


@pytest.mark.parametrize("trained", ["h", "w"])
@pytest.mark.parametrize("workspace", ["min", "max"])
def test_a_step_that_trains_one_input_is_another(
    trained: str, workspace: str, device: str, steps: list[Any]
) -> None:
    h, w, y = leaves(device)
    for x in (h, w):
        gradients(loss(h, w, y, workspace=workspace), x)
    own = h.requires_grad_(trained == "h"), w.requires_grad_(trained == "w")
    results = []
    for _ in range(3):
        result = loss(*own, y, workspace=workspace)
        results.append((result, *gradients(result, *own)))
    assert are_same(results) and len(steps) == 3
    with torch.no_grad():
        assert torch.equal(loss(*own, y, workspace=workspace), results[0][0])


@pytest.mark.parametrize("workspace", ["min", "max"])
def test_a_repeat_may_have_other_values(workspace: str, device: str, steps: list[Any]) -> None:
    first, others = leaves(device, ignored=0), leaves(device, ignored=0)
    gradients(loss(*first, workspace=workspace, ignore_index=7), *first)
    got = loss(*others, workspace=workspace, ignore_index=int(others[2][5]))
    got_gradients = gradients(got, *others)
    assert len(steps) == 1
    process_cache.reset()
    want = loss(*others, workspace=workspace, ignore_index=int(others[2][5]))
    assert are_same([(got, *got_gradients), (want, *gradients(want, *others))])


@pytest.mark.parametrize("selects", [False, True], ids=["all rows", "selected rows"])
@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("workspace", ["min", "max", SOME])
def test_later_backwards_have_the_same_bits(
    workspace: Any,
    reduction: str,
    frozen: bool,
    selects: bool,
    device: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(problem_module, "MIN_SELECTED", 1 if selects else 1 << 30)
    h, w, y = leaves(device)
    w.requires_grad_(not frozen)
    more: Any = {"reduction": reduction, "workspace": workspace}
    want = gradients(loss(h, w, y, **more), h, w)
    result = loss(h, w, y, **more)
    results = [gradients(result, h, w, retain_graph=True) for _ in range(3)]
    with save_on_cpu():  # what the forward keeps is not found by a copy of the statistics
        result = loss(h, w, y, **more)
    assert are_same([want, *results, gradients(result, h, w)])


@pytest.mark.parametrize("selects", [False, True], ids=["all rows", "selected rows"])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_sampled_steps(
    reduction: str,
    selects: bool,
    device: str,
    steps: list[Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A repeat, a second backward and one that finds nothing kept give the bits of the seed."""
    monkeypatch.setattr(problem_module, "MIN_SELECTED", 1 if selects else 1 << 30)
    h, w, y = leaves(device)

    def sampled(seed: int) -> Tensor:
        torch.manual_seed(seed)
        return loss(h, w, y, reduction=reduction, gradient="sampled", samples=16)

    results, exact = [], loss(h, w, y, reduction=reduction)
    for seed in (0, 1, 0, 0):
        result = sampled(seed)
        results.append((result, *gradients(result, h, w, retain_graph=True)))
    again = result, *gradients(result, h, w)
    with save_on_cpu():
        result = sampled(0)
    alone = result, *gradients(result, h, w)
    other = results.pop(1)
    assert are_same([*results, again, alone]) and len(steps) == 4
    assert torch.equal(other[0], exact) and not torch.equal(other[1], alone[1])


@pytest.mark.parametrize("selects", [False, True])
@pytest.mark.parametrize("workspace", ["min", "max"])
def test_transforms_of_a_repeat_are_served_or_refused(
    workspace: str, selects: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(problem_module, "MIN_SELECTED", 1 if selects else 1 << 30)
    h, w, y = leaves(device)
    want = gradients(loss(h, w, y, workspace=workspace), h, w)
    result = loss(h, w, y, workspace=workspace)
    batch = torch.tensor([-1.0, 2.0], device=device)
    batched = torch.autograd.grad(result, (h, w), batch, is_grads_batched=True)
    assert are_same([want, tuple(x[0] for x in batched)])
    with pytest.raises(NotImplementedError, match="second derivatives"):
        (dx,) = torch.autograd.grad(loss(h, w, y, workspace=workspace), h, create_graph=True)
        dx.sum().backward()


@pytest.mark.parametrize("selects", [False, True])
@pytest.mark.parametrize("workspace", ["min", "max"])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_graph_compiler_may_trace_the_backward(
    reduction: str, workspace: str, selects: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(problem_module, "MIN_SELECTED", 1 if selects else 1 << 30)
    h, w, y = leaves(device)
    results = []
    for compiled in (False, False, True):
        result = loss(h, w, y, reduction=reduction, workspace=workspace).sum()
        if not compiled:
            results.append(torch.autograd.grad(result, (h, w)))
            continue
        with compiled_autograd._enable(torch.compile(backend="aot_eager", fullgraph=True)):
            results.append(torch.autograd.grad(result, (h, w)))
    assert are_same(results)


def unaligned(x: Tensor) -> Tensor:
    """Return x at an address that no kernel takes, or with gaps between its elements."""
    if x.ndim == 1:
        return torch.stack([x, x], 1)[:, 0]
    return torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.int64])
@pytest.mark.parametrize("workspace", ["min", "max"])
def test_saved_tensors_may_come_back_with_another_layout(
    workspace: str, kind: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    h, w, y = leaves(device)
    want = gradients(loss(h, w, y, workspace=workspace), h, w)
    taken, backward = [], fused_step.FusedStep.backward

    def note(self: Any, upstream: Tensor, h: Tensor, w: Tensor, y: Tensor, *more: Any) -> Any:
        taken.append(has_aligned_rows(h) and has_aligned_rows(w) and y.is_contiguous())
        return backward(self, upstream, h, w, y, *more)

    monkeypatch.setattr(fused_step.FusedStep, "backward", note)

    def unpack(x: Tensor) -> Tensor:
        return unaligned(x) if x.dtype == kind else x

    with saved_tensors_hooks(lambda x: x, unpack):
        result = loss(h, w, y, workspace=workspace)
    assert are_same([want, gradients(result, h, w)]) and all(taken)


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("workspace", ["min", "max"])
def test_checkpoints(workspace: str, use_reentrant: bool, device: str) -> None:
    h, w, y = leaves(device)

    def run(h: Tensor, w: Tensor) -> Tensor:
        return loss(h, w, y, workspace=workspace)

    want = torch.autograd.grad(run(h, w), (h, w))
    for _ in range(2):
        h.grad = w.grad = None
        checkpoint(run, h, w, use_reentrant=use_reentrant).backward()
        assert h.grad is not None and w.grad is not None
        assert are_same([want, (h.grad, w.grad)])


def test_modes_and_mixed_precision_see_the_operators(device: str, steps: list[Any]) -> None:
    h, w, y = leaves(device)
    want = loss(h, w, y)
    with Seen() as seen:
        result = loss(h, w, y)
    assert torch.equal(result, want) and not steps
    assert torch.ops.cutefce.loss_forward.default in seen.operators
    with torch.autocast(device, torch.bfloat16):
        result = loss(h, w, y)
    assert are_same([gradients(result, h, w), gradients(want, h, w)]) and len(steps) == 1


def test_what_a_step_keeps_lives_as_long_as_its_graph(device: str) -> None:
    h, w, y = leaves(device)
    loss(h, w, y).backward()
    gc.collect()
    assert not kept._kept
    result = loss(h, w, y)
    assert len(kept._kept) == 1
    result.backward()
    assert not kept._kept  # though the loss is alive


@pytest.mark.parametrize("budget", [MINIMUM, SOME])
@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_plans_of_every_device_store_some(kind: str, budget: int) -> None:
    """Also where a tuned window leaves the widest ones out."""
    p = Problem(*SIZES, "bfloat16", kind, arch=Sm90().name)
    configs = window_configs(p)
    for widest in range(3):
        for scalar in (True, False):
            assert make_plan(p, configs[widest:], budget, scalar).stores_windows


@pytest.mark.parametrize(
    ("dtype", "workspace", "trained", "is_fused"),
    [
        (torch.bfloat16, "max", "hw", True),
        (torch.bfloat16, "min", "hw", True),
        (torch.bfloat16, SOME, "hw", True),
        (torch.float16, "min", "hw", False),
        (torch.bfloat16, "max", "h", False),
        (torch.bfloat16, "max", "w", False),
        (torch.float16, "max", "hw", False),
    ],
    ids=str,
)
def test_which_steps_are_fused(
    dtype: torch.dtype, workspace: Any, trained: str, is_fused: bool, device: str
) -> None:
    """Those that store exponentials of some columns for both gradients."""
    h, w, y = leaves(device, dtype)
    h.requires_grad_("h" in trained)
    w.requires_grad_("w" in trained)
    loss(h, w, y, workspace=workspace).backward()
    (entry,) = (x for x in call_cache._entries.values() if isinstance(x, plain_step.PlainStep))
    assert (entry.fused is not None) == is_fused


def test_a_first_step_launches_what_a_repeat_does(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that a CUDA graph may be captured after one eager step."""
    launched = note_launches(monkeypatch, fused_step, hidden_product)
    h, w, y = leaves(device)
    loss(h, w, y, workspace="max").backward()
    first = {type(kernel).__name__ for kernel in launched}
    assert first >= {"FusedForwardSpec", "FusedBackwardSpec"}
    before = set(launched)
    loss(h, w, y, workspace="max").backward()
    assert {x for x in launched if "Fused" in type(x).__name__} <= before


def note_launches(monkeypatch: pytest.MonkeyPatch, *modules: Any) -> list[Any]:
    """Return a list that grows with each launch by the `modules`."""
    launched: list[Any] = []
    compiled: Any = vars(modules[0])["compiled"]

    def note(kernel: Any) -> Any:
        def launch(*arguments: Any) -> None:
            launched.append(kernel)
            compiled(kernel)(*arguments)

        return launch

    for module in modules:
        monkeypatch.setattr(module, "compiled", note)
    return launched


def test_a_small_step_forms_dx_sums_in_its_forward(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once, but for a second backward, whose bits are equal; larger steps form them later."""
    launched = note_launches(monkeypatch, hidden_product)
    h, w, y = leaves(device)
    results = []
    for small in (True, False):
        monkeypatch.setattr(hidden_product, "is_small", lambda *_, small=small: small)
        process_cache.reset()
        loss(h, w, y, workspace="max").backward()
        launched.clear()
        result = loss(h, w, y, workspace="max")
        assert len(launched) == small
        results += [gradients(result, h, w, retain_graph=True) for _ in range(2)]
        assert len(launched) == 2 * small
    assert are_same(results)


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda"])
def test_a_backward_that_is_captured_has_its_own_workspace(device: str) -> None:
    """Its replays are right when memory of the eager forward has other contents."""
    h, w, y = leaves(device)
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    upstream = torch.full((), -1.0, device=device)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        want = torch.autograd.grad(loss(h, w, y, workspace="max"), (h, w), upstream)
        result = loss(h, w, y, workspace="max")
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            got = torch.autograd.grad(result, (h, w), upstream, retain_graph=True)
        others = [torch.full((1 << 14,), torch.nan, device=device) for _ in range(256)]
        for _ in range(2):
            graph.replay()
            torch.cuda.synchronize()
            assert are_same([want, got])
        assert all(x.isnan().all() for x in others)


def test_other_backwards_free_the_workspace(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a graph that may be differentiated again, or in a capture, make sums of dX."""
    launched, made, keep = note_launches(monkeypatch, hidden_product), list[Any](), kept.keep

    def note(stats: Tensor, results: Any) -> None:
        made.append(results)
        keep(stats, results)

    monkeypatch.setattr(kept, "keep", note)
    h, w, y = leaves(device)
    want = gradients(loss(h, w, y, workspace="max"), h, w)
    for captured in (False, True):
        result = loss(h, w, y, workspace="max")
        assert made[-1].workspace is not None
        launched.clear()
        if captured:
            monkeypatch.setattr(kept, "capture_id", lambda: 1)
        assert are_same([want, gradients(result, h, w, create_graph=not captured)])
        assert made[-1].workspace is None and len(launched) == captured
    monkeypatch.setattr(torch_compat, "capture_id", lambda: 1)
    assert are_same([want, gradients(loss(h, w, y, workspace="max"), h, w)])
    assert made[-1].workspace is None and len(launched) == 2  # each in a backward


def test_a_target_that_a_transform_has_left_behind_is_unwrapped(
    device: str, steps: list[Any]
) -> None:
    h, w, y = leaves(device)
    loss(h, w, y).backward()
    left: list[Tensor] = []

    def leak(a: Tensor) -> Tensor:
        left.append(y + (a.sum() * 0).long())
        return a.sum()

    torch.func.grad(leak)(torch.ones(3, device=device))
    loss(h, w, left[0]).backward()
    cutefce.linear_cross_entropy(h, w, left[0]).backward()
    with torch.no_grad():
        cutefce.linear_cross_entropy(h, w, left[0])
    assert all(call[2].data_ptr() for call in steps)
