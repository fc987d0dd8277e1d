"""Soft targets: a few classes of each token with probabilities."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import cutefce
from cutefce.cute_kernels.config import PortableTiles
from cutefce.ops import torch_compat
from cutefce.ops.interface import call
from cutefce.ops.interface.options import TensorOptions
from cutefce.ops.operators import operands
from tests.support.backends import KERNELS, Backend, on_backends
from tests.support.kernel_models import model_of
from tests.support.layouts import LAYOUTS, WINDOWS, Layout, can_store, pinned, windows_in_chunks
from tests.support.modes import Seen, launches, unseen
from tests.support.options import (
    OptionsCase,
    assert_compiled_equals_eager,
    assert_results_as_accurate,
    exact,
    soft_case,
)
from tests.support.reference import Case, random_case
from tests.support.tiers import pairwise, rest_slow

EACH: dict[str, list[str]] = {
    "nothing": [],
    "smoothing and all factors": [
        "linear_bias",
        "weight",
        "label_smoothing",
        "token_weights",
        "z_loss",
        "logit_scale",
        "temperature (N,)",
    ],
    "softcap and all factors": [
        "linear_bias",
        "weight",
        "token_weights",
        "z_loss",
        "negative logit_scale",
        "softcap",
        "temperature (N,)",
    ],
}
MOST = {name: names for name, names in EACH.items() if names}
SIZES = 150, 16, 333


def loss_of(x: OptionsCase, leaves: tuple[Tensor, ...], **more: Any) -> Tensor:
    loss: Tensor = cutefce.linear_cross_entropy(
        leaves[0], leaves[1], **x.with_leaves(leaves), **more
    )
    return loss


@pytest.mark.compiled_rows
@pairwise(names=EACH, classes=[1, 7], reduction=["none", "mean"], workspace=["min", 100_000, "max"])
def test_equals_float64(
    names: list[str],
    classes: int,
    reduction: str,
    workspace: Any,
    small_tiles: PortableTiles,
    device: str,
) -> None:
    x = soft_case(names, classes, *SIZES, dtype=torch.float64, device=device)
    options: dict[str, Any] = {"reduction": reduction}
    for got, want in zip(x.ours(**options, workspace=workspace), exact(x, **options), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-11)


DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@on_backends(
    float32=True,
    emulated=1,
    layout=LAYOUTS,
    names=[EACH["nothing"], EACH["softcap and all factors"]],
)
def test_every_layout_is_as_accurate_as_the_unfused_loss(
    layout: Layout, names: list[str], backend: Backend
) -> None:
    sizes, how = (backend.tokens, 64, 333), {"dtype": backend.dtype, "device": backend.device}
    x = soft_case(names, 7, *sizes, **how)
    if layout.in_chunks:
        x.case.upstream.fill_(1.0)

    def results() -> tuple[Tensor, ...]:
        with pinned(layout):
            return x.ours(reduction=layout.reduction)

    got = results()
    assert_results_as_accurate(got, x, first=layout.in_chunks)
    if backend.selects:
        backend.hide(x.case.h, (x.options["target_probs"] == 0).all(1))
        for a, b in zip(results(), got, strict=True):
            assert torch.equal(a, b), "what ignored rows hold does not matter"


@pytest.mark.parametrize("names", [EACH["nothing"], EACH["softcap and all factors"]], ids=str)
def test_float16_is_as_accurate_as_the_unfused_loss(
    names: list[str], small_tiles: PortableTiles, device: str
) -> None:
    """No plan of it stores exponentials."""
    x = soft_case(names, 7, 150, 64, 333, dtype=torch.float16, device=device)
    with pinned(WINDOWS["nothing kept"]):
        assert_results_as_accurate(x.ours(), x)


@pairwise(
    classes=[1, 7, 64],
    sizes=[(150, 16, 333), (64, 96, 1001), (331, 40, 61)],
    logit_std=[0.1, 1, 4, 12],
)
def test_is_as_accurate_as_the_unfused_loss(
    classes: int, sizes: tuple[int, int, int], logit_std: float, device: str
) -> None:
    for dtype in DTYPES:
        x = soft_case([], classes, *sizes, dtype=dtype, device=device, logit_std=logit_std)
        assert_results_as_accurate(x.ours(), x)


@pytest.mark.parametrize("logit_std", [0.1, 2, 8])
@pytest.mark.parametrize("sizes", [(200, 40, 61), (150, 40, 333)], ids=str)
def test_a_teacher_close_to_the_student(
    sizes: tuple[int, int, int], logit_std: float, device: str
) -> None:
    """Probabilities nearly cancel: a rounding of p would be larger than that of p - q."""
    for dtype in (torch.bfloat16, torch.float16):
        case = random_case(*sizes, dtype=dtype, device=device, logit_std=logit_std, ignored=0)
        logits = case.h.float() @ case.w.float().t()
        teacher = (logits + 0.1 * torch.randn_like(logits)).softmax(1).topk(61, 1)
        soft = {"target_indices": teacher.indices, "target_probs": teacher.values}
        x = OptionsCase(case, soft)
        assert_results_as_accurate(x.ours(), x)


@pytest.mark.parametrize("plan", ["nothing kept", "everything kept"])
@pytest.mark.parametrize("kind", ["close to the student", "uniform", "frequent classes"])
def test_small_logits_whether_stored_or_not(
    kind: str, plan: str, small_tiles: PortableTiles, device: str
) -> None:
    """The target's part of the gradients is nearly all: roundings of it add up."""
    layout = WINDOWS[plan]
    for dtype in (torch.bfloat16, torch.float16):
        if layout.stores and not can_store(dtype):
            continue
        case = random_case(400, 40, 333, dtype=dtype, device=device, logit_std=0.1, ignored=0)
        if kind == "uniform":
            index = torch.rand(400, 333, device=device).topk(48, 1).indices
            probs = torch.full((400, 48), 1 / 48, device=device)
        elif kind == "frequent classes":  # a class is the lead of many tokens, and occurs twice
            index = (torch.rand(400, 48, device=device) ** 6 * 333).long()
            probs = torch.rand(400, 48, device=device).softmax(1)
        else:
            logits = case.h.float() @ case.w.float().t()
            teacher = (logits + 0.1 * torch.randn_like(logits)).softmax(1).topk(48, 1)
            index, probs = teacher.indices, teacher.values
        x = OptionsCase(case, {"target_indices": index, "target_probs": probs})
        with pinned(layout):
            assert_results_as_accurate(x.ours(), x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("workspace", ["min", "max"])
def test_a_derivative_by_the_log_sum_exp_of_0(
    workspace: str, dtype: torch.dtype, small_tiles: PortableTiles, device: str
) -> None:
    """With λ = 1/2 it is Σ b + lse: nothing is left to divide the targets' terms by."""
    h, w = torch.zeros(3, 8, dtype=dtype, device=device), torch.zeros(4, 8, dtype=dtype)
    w = w.to(device)
    h[:, 0], w[0, 1] = 1, 1
    index, probs = torch.tensor([[0, 1]] * 3), torch.tensor([[0.6, 0.4], [0.5, 0.25], [0.3, 0.2]])
    bias = torch.full((4,), -1 - torch.log(torch.tensor(4.0)).item(), dtype=dtype)
    soft = {"target_indices": index.to(device), "target_probs": probs.to(device)}
    options = soft | {"linear_bias": bias.to(device), "z_loss": 0.5}
    y, upstream = torch.zeros(3, dtype=torch.long, device=device), torch.ones(3, device=device)
    x = OptionsCase(Case(h, w, y, upstream), options)
    got, want = x.ours(workspace=workspace), exact(x)
    for a, b in zip(got, want, strict=True):
        limit = torch.finfo(dtype).eps * (1 + float(b.norm()))
        assert float((a.double() - b).norm()) <= limit


@on_backends(options=[{}, {"label_smoothing": 0.1}, {"z_loss": 1e-3}, {"weight": 20}])
def test_a_class_that_cannot_be(options: dict[str, float], backend: Backend) -> None:
    """A logit of -inf has an infinite loss, be it of the lead or not, and so has it in torch."""
    device = backend.device
    h, w = torch.randn(2, 64, device=device), torch.randn(5, 64, device=device)
    bias, probs = torch.zeros(5, device=device), torch.tensor([[0.7, 0.2]] * 2, device=device)
    bias[0] = -torch.inf
    given: dict[str, Any] = {**options, "reduction": "none"}
    if "weight" in options:
        given["weight"] = torch.full_like(bias, options["weight"])
    for lead in (0, 1):
        index = torch.tensor([[lead, 1 - lead]] * 2, device=device)
        given |= {"target_indices": index, "target_probs": probs, "linear_bias": bias}
        losses = cutefce.linear_cross_entropy(h.bfloat16(), w.bfloat16(), **given)
        assert bool((losses == torch.inf).all())


def test_a_step_on_the_kernels_launches_little_beside_them(
    monkeypatch: pytest.MonkeyPatch, small_tiles: PortableTiles
) -> None:
    """Each operator of torch is a launch, and a gap of a few microseconds."""
    pytest.importorskip("cutlass")
    x = soft_case([], 7, 150, 64, 333, dtype=torch.bfloat16)
    models = lambda kernel: unseen(model_of(kernel))  # noqa: E731
    KERNELS["kernels of sm_90a"].serve(monkeypatch, small_tiles, replacement=models)
    monkeypatch.setattr(call, "chosen_leads", unseen(call.chosen_leads))  # a kernel
    monkeypatch.setattr(operands, "check_soft_values", lambda *_: None)  # of a CPU
    monkeypatch.setattr(torch_compat, "has_dispatch_mode", lambda: False)
    with Seen() as seen:
        loss = loss_of(x, x.leaves, workspace="max")
        forward = len(seen.operators)
        loss.backward()
    names = launches(seen.operators[:forward]), launches(seen.operators[forward:])
    # with four and three that find a wrong target on a CPU
    assert len(names[0]) <= 24 + 4 and len(names[1]) <= 36 + 3, names


@on_backends(layout={f"{kept} columns": windows_in_chunks(40, kept) for kept in (128, 336)})
def test_a_frozen_head(layout: Layout, backend: Backend) -> None:
    """Sums of dX are kept in 24 bits, and formed in windows inside a chunk."""
    how = {"dtype": backend.dtype, "device": backend.device}
    x = soft_case(["label_smoothing", "z_loss"], 7, 150, 64, 333, **how)
    h = x.case.h.clone().requires_grad_()
    with pinned(layout):
        loss = loss_of(x, (h, x.case.w), reduction="none")
        (dx,) = torch.autograd.grad(loss, h, x.case.upstream)
    assert_results_as_accurate((loss.detach(), dx, exact(x)[2]), x)


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_one_class_is_the_plain_loss(reduction: str, device: str) -> None:
    for dtype in (torch.bfloat16, torch.float32):
        case = random_case(150, 64, 333, dtype=dtype, device=device)
        probs = (case.y != -100).float()[:, None]
        results = []
        kinds: list[dict[str, Any]] = [
            {"target": case.y},
            {"target_indices": case.y[:, None], "target_probs": probs},
        ]
        for target in kinds:
            h, w = case.h.clone().requires_grad_(), case.w.clone().requires_grad_()
            loss = cutefce.linear_cross_entropy(
                h, w, reduction=reduction, workspace="max", **target
            )
            upstream = case.upstream if loss.ndim else None
            results.append([loss, *torch.autograd.grad(loss, (h, w), upstream)])
        for hard, soft in zip(*results, strict=True):
            if reduction == "none" and device == "cpu":
                assert torch.equal(hard, soft)
            torch.testing.assert_close(
                hard, soft, rtol=2**-7 if dtype.itemsize == 2 else 1e-5, atol=1e-6
            )


def test_equals_the_loss_of_torch(device: str) -> None:
    """Smoothing and class weights are those of torch for probabilities."""
    x = soft_case(["weight", "label_smoothing"], 5, 40, 16, 50, dtype=torch.float64, device=device)
    index, probs = x.options["target_indices"], x.options["target_probs"]
    dense = probs.new_zeros(40, 50).scatter_add_(1, index.clamp(min=0), probs)
    counts = (probs != 0).any(1)
    logits = x.case.h @ x.case.w.t()
    want = F.cross_entropy(
        logits,
        dense,
        weight=x.options["weight"].double(),
        label_smoothing=x.options["label_smoothing"],
        reduction="none",
    )
    torch.testing.assert_close(x.ours()[0], torch.where(counts, want, 0))


def test_a_common_offset_of_logits_changes_nothing(device: str) -> None:
    """Probabilities that add up to anything are relative to the lead's logit."""
    logits = torch.randn(30, 20).mul(64).round().div(64)
    index = torch.randint(20, (30, 4), device=device)
    probs = torch.rand(30, 4, device=device)
    losses = []
    for offset in (0.0, 1024.0):
        w = torch.cat([torch.eye(20), torch.ones(20, 1)], 1).to(device)
        h = torch.cat([logits, torch.full((30, 1), offset)], 1).to(device)
        losses.append(
            cutefce.linear_cross_entropy(
                h, w, target_indices=index, target_probs=probs, reduction="none"
            )
        )
    torch.testing.assert_close(*losses, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("names", rest_slow(MOST))
def test_compiled_equals_eager(names: list[str], small_tiles: PortableTiles, device: str) -> None:
    cases = (soft_case(names, 5, tokens, 16, 333, device=device) for tokens in (40, 70, 33))
    assert_compiled_equals_eager(cases, device)


@pytest.mark.parametrize("names", rest_slow(MOST))
def test_opcheck(names: list[str], device: str) -> None:
    x = soft_case(names, 5, 20, 8, 50, device=device)
    leaves = x.leaves
    options = x.with_leaves(leaves)
    if "temperature" in options:
        options["temperature"] = torch.as_tensor(options["temperature"])
    torch.library.opcheck(torch.ops.cutefce.loss.default, (leaves[0], leaves[1]), options)


@pytest.mark.parametrize("workspace", ["min", "max"])
def test_uses(workspace: str, small_tiles: PortableTiles, device: str) -> None:
    """Frozen operands, a second backward, no gradients, a buffer, and log-sum-exps."""
    x = soft_case(["z_loss"], 7, 150, 64, 333, dtype=torch.bfloat16, device=device)
    h, w = x.leaves
    options: dict[str, Any] = {"workspace": workspace} | x.options
    out = cutefce.linear_cross_entropy(h, w, return_lse=True, **options)
    want = torch.autograd.grad(out.loss, (h, w), retain_graph=True)
    for a, b in zip(torch.autograd.grad(out.loss, (h, w)), want, strict=True):
        assert torch.equal(a, b)
    counts = (x.options["target_probs"] != 0).any(1)
    lse = (x.case.h.float() @ x.case.w.float().t()).logsumexp(1)
    torch.testing.assert_close(out.lse, torch.where(counts, lse, 0), rtol=1e-3, atol=1e-3)
    with torch.no_grad():
        torch.testing.assert_close(loss_of(x, (h, w), workspace=workspace), out.loss)
    for i in (0, 1):
        leaf = (h, w)[i].detach().requires_grad_()
        both = (leaf, w.detach()) if i == 0 else (h.detach(), leaf)
        (alone,) = torch.autograd.grad(loss_of(x, both, workspace=workspace), leaf)
        torch.testing.assert_close(alone, want[i], rtol=2**-6, atol=1e-5)
    buffer = torch.zeros(w.shape, device=device)
    loss_of(x, (h, w), accumulate_into=buffer, workspace=workspace).backward()
    # exponentials of another plan round otherwise: small elements differ by large ones' errors
    assert float((buffer - want[1]).norm()) <= 2**-8 * float(buffer.norm())


def test_sampled_gradients_are_near(device: str) -> None:
    """Of so many samples, nearly all entries are kept; those of soft targets are exact."""
    x = soft_case(["softcap", "z_loss"], 6, 100, 32, 333, device=device)
    exact_ones = x.ours()
    for got, want in zip(x.ours(gradient="sampled", samples=4096), exact_ones, strict=True):
        assert float((got - want).norm()) <= 0.01 * float(want.norm())


def test_shapes_and_dtypes(device: str) -> None:
    """Tokens of several dimensions, any integers and floating-point probabilities, a module."""
    index = torch.randint(50, (3, 4, 5), device=device)
    probs = torch.rand(3, 4, 5, device=device).bfloat16()
    head = cutefce.LinearCrossEntropyLoss(16, 50, reduction="none").to(device)
    h = torch.randn(3, 4, 16, device=device)
    want = head(h, target_indices=index, target_probs=probs)
    assert want.shape == (3, 4)
    for dtype in (torch.int32, torch.uint8):
        got = head(h, target_indices=index.to(dtype), target_probs=probs.double())
        torch.testing.assert_close(got, want)
    none = head(h, target_indices=index, target_probs=torch.zeros_like(probs))
    assert not none.any()
    empty = cutefce.linear_cross_entropy(
        h[:0], head.linear.weight, target_indices=index[:0], target_probs=probs[:0]
    )
    assert empty.item() == 0
    predicted = cutefce.plan(h, head.linear.weight, target_indices=index, target_probs=probs)
    plain = cutefce.plan(h, head.linear.weight)
    assert predicted.workspace_bytes > plain.workspace_bytes


@pytest.mark.gpu
def test_bad_values_are_nan_rows_on_a_gpu() -> None:
    x = soft_case([], 5, 40, 16, 50, device="cuda")
    index, probs = x.options["target_indices"], x.options["target_probs"]
    good = x.ours()[0]
    probs[3, 1], probs[5, 2], probs[7, 0] = -0.5, torch.nan, torch.inf
    index[9, 4], probs[9, 4] = 50, 0.1
    losses, dx, _ = x.ours()
    bad = torch.zeros(40, dtype=torch.bool, device="cuda")
    bad[[3, 5, 7, 9]] = True
    assert losses[bad].isnan().all()
    assert dx[bad].isnan().all()
    assert torch.equal(losses[~bad], good[~bad])


def test_one_token_without_other_dimensions(device: str) -> None:
    h, w = torch.randn(8, device=device), torch.randn(50, 8, device=device)
    c, q = torch.tensor([3, 4], device=device), torch.tensor([0.5, 0.25], device=device)
    got = cutefce.linear_cross_entropy(h, w, target_indices=c, target_probs=q)
    other = cutefce.linear_cross_entropy(h[None], w, target_indices=c[None], target_probs=q[None])
    assert torch.equal(got, other)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.uint16, torch.uint32], ids=str)
def test_classes_of_any_integer_dtype(dtype: torch.dtype, device: str) -> None:
    h, w = torch.randn(4, 8, device=device), torch.randn(50, 8, device=device)
    c, q = torch.randint(50, (4, 3), device=device), torch.rand(4, 3, device=device)
    want = cutefce.linear_cross_entropy(h, w, target_indices=c, target_probs=q)
    got = cutefce.linear_cross_entropy(h, w, target_indices=c.to(dtype), target_probs=q)
    assert torch.equal(got, want)


def test_classes_of_any_layout(device: str) -> None:
    h, w = (torch.randn(rows, 8, device=device).bfloat16() for rows in (4, 50))
    c, q = torch.randint(50, (3, 4), device=device).t(), torch.rand(3, 4, device=device).t()
    got = cutefce.linear_cross_entropy(h, w, target_indices=c, target_probs=q)
    given = c.contiguous(), q.contiguous()
    want = cutefce.linear_cross_entropy(h, w, target_indices=given[0], target_probs=given[1])
    assert torch.equal(got, want)
    tensors = TensorOptions(target_indices=c, target_probs=q).prepared(h)
    assert all(x.is_contiguous() for x in tensors.soft_targets.values()), "kernels need this"
