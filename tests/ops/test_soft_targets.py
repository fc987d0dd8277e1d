"""Soft targets: probabilities of a few classes of each token, or of all as torch takes them."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import cutefce
from cutefce.cute_kernels.config import PortableTiles
from cutefce.ops.interface.arguments import TensorOptions
from cutefce.ops.primitives import dispatch
from tests.support.backends import Backend, on_backends
from tests.support.layouts import WINDOWS, can_store, pinned, windows_in_chunks
from tests.support.memory import peaks
from tests.support.options import (
    TARGETS,
    OptionsCase,
    assert_results_as_accurate,
    dense_case,
    exact,
    soft_case,
)
from tests.support.reference import Case, random_case
from tests.support.tiers import pairwise

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
KINDS = {name: make for name, make in TARGETS.items() if name != "class indices"}
each_kind = pytest.mark.parametrize("kind", KINDS)


def drawn(classes: int | None, *sizes: int, **more: Any) -> OptionsCase:
    """Draw K `classes` of each token, or all."""
    if classes is None:
        return dense_case([], *sizes, **more)
    return soft_case([], classes, *sizes, **more)


@pairwise(
    classes=[1, 7, 64, None],
    sizes=[(150, 16, 333), (64, 96, 1001), (331, 40, 61)],
    logit_std=[0.1, 1, 4, 12],
)
def test_is_as_accurate_as_the_unfused_loss(
    classes: int | None, sizes: tuple[int, int, int], logit_std: float, device: str
) -> None:
    for dtype in DTYPES:
        x = drawn(classes, *sizes, dtype=dtype, device=device, logit_std=logit_std)
        assert_results_as_accurate(x.ours(), x)


def targets_of(kind: str, case: Case) -> dict[str, Tensor]:
    """Return soft targets by which gradients nearly cancel, or of which roundings add up."""
    (tokens, vocab), device = (len(case.h), len(case.w)), case.h.device
    logits = case.h.float() @ case.w.float().t()
    if kind == "that of all classes":
        return {"target": logits.softmax(1)}
    teacher = (logits + 0.1 * torch.randn_like(logits)).softmax(1)
    if kind == "close, of all classes":
        return {"target": teacher}
    if kind == "close":
        probs, index = teacher.topk(61, 1)
    elif kind == "uniform":
        index = torch.rand(tokens, vocab, device=device).topk(48, 1).indices
        probs = torch.full((tokens, 48), 1 / 48, device=device)
    else:  # a class is the lead of many tokens, and occurs twice
        index = (torch.rand(tokens, 48, device=device) ** 6 * vocab).long()
        probs = torch.rand(tokens, 48, device=device).softmax(1)
    return {"target_indices": index, "target_probs": probs}


@pairwise(
    kind=["close", "uniform", "frequent classes", "close, of all classes", "that of all classes"],
    logit_std=[0.1, 2, 8],
    sizes=[(200, 40, 61), (400, 40, 333)],
    layout=["nothing kept", "everything kept"],
)
def test_a_teacher_close_to_the_student(
    kind: str,
    logit_std: float,
    sizes: tuple[int, int, int],
    layout: str,
    small_tiles: PortableTiles,
    device: str,
) -> None:
    """Probabilities nearly cancel: a rounding of p would be larger than that of p - q."""
    for dtype in (torch.bfloat16, torch.float16):
        if dtype == torch.float16 and kind == "that of all classes":
            continue  # what is left is below its least number
        if not can_store(dtype) and WINDOWS[layout].stores:
            continue
        how: dict[str, Any] = {"dtype": dtype, "device": device}
        case = random_case(*sizes, **how, logit_std=logit_std, ignored=0)
        x = OptionsCase(case, targets_of(kind, case))
        with pinned(None if "target" in x.options else WINDOWS[layout]):
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


def test_a_class_of_all_that_cannot_be(device: str) -> None:
    """Its loss is infinite unless its q is 0.  So may all q of a token be."""
    bias = torch.zeros(5, device=device)
    bias[0] = -torch.inf
    h, w = torch.randn(4, 8, device=device), torch.randn(5, 8, device=device)
    rows = [0.7, 0.2, 0, 0, 0], [0.2, 0.7, 0, 0, 0], [0, 0.7, 0.3, 0, 0], [0.0] * 5
    probs = torch.tensor(rows)
    given: dict[str, Any] = {"linear_bias": bias, "reduction": "none"}
    losses = cutefce.linear_cross_entropy(h, w, probs.to(device), **given)
    logits, own = (h @ w.t())[2:, 1:], probs[2:, 1:].to(device)
    assert bool((losses[:2] == torch.inf).all())
    torch.testing.assert_close(losses[2:], F.cross_entropy(logits, own, reduction="none"))
    given["label_smoothing"] = 0.1
    smoothed = cutefce.linear_cross_entropy(h, w, probs.to(device), **given)
    assert bool((smoothed == torch.inf).all())


@pytest.mark.parametrize("names", [["linear_bias"], ["linear_bias", "z_loss"]], ids=str)
def test_leads_of_no_probability(names: list[str], device: str) -> None:
    """A token without probabilities above 0 has a finite loss beside classes that cannot be."""
    x = dense_case(names, 40, 16, 50, dtype=torch.float64, device=device)
    x.options["linear_bias"][:20], probs = -torch.inf, x.options["target"]
    probs[:, :20], probs[1::4], probs[::2] = 0, -probs[1::4], 0
    for got, wanted in zip(x.ours(), exact(x), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-11)


@on_backends(layout={f"{kept} columns": windows_in_chunks(40, kept) for kept in (128, 336)})
def test_a_frozen_head(layout: Any, backend: Backend) -> None:
    """Sums of dX are kept in 24 bits, and formed in windows inside a chunk."""
    how: dict[str, Any] = {"dtype": backend.dtype, "device": backend.device}
    x = soft_case(["label_smoothing", "z_loss"], 7, 150, 64, 333, **how)
    with pinned(layout):
        loss, dx = x.ours(trained=(True, False))
    assert_results_as_accurate((loss, dx, exact(x)[2]), x)


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_one_class_is_the_plain_loss(reduction: str, device: str) -> None:
    for dtype in (torch.bfloat16, torch.float32):
        case = random_case(150, 64, 333, dtype=dtype, device=device)
        probs = (case.y != -100).float()[:, None]
        soft = {"target_indices": case.y[:, None], "target_probs": probs}
        given: dict[str, Any] = {"reduction": reduction, "workspace": "max"}
        hard = OptionsCase(case, {}).ours(**given)
        for a, b in zip(hard, OptionsCase(case, soft).ours(**given), strict=True):
            if reduction == "none" and device == "cpu":
                assert torch.equal(a, b)
            torch.testing.assert_close(a, b, rtol=2**-7 if dtype.itemsize == 2 else 1e-5, atol=1e-6)


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_equals_the_loss_of_torch(reduction: str, device: str) -> None:
    """Means, smoothing and class weights are torch's; negative probabilities are no error."""
    x = dense_case(["weight", "label_smoothing"], 40, 16, 50, dtype=torch.float64, device=device)
    x.options["target"][3:6] -= 0.02
    options = {name: v for name, v in x.options.items() if name != "target"}
    options["weight"] = options["weight"].double()
    logits, probs = x.case.h @ x.case.w.t(), x.options["target"]
    want = F.cross_entropy(logits, probs, reduction=reduction, ignore_index=-1, **options)
    got = x.ours(reduction=reduction, ignore_index=-1)[0]
    torch.testing.assert_close(got, want)


@each_kind
def test_a_common_offset_of_logits_changes_nothing(kind: str, device: str) -> None:
    """Probabilities that add up to anything are relative to the lead's logit."""
    logits = torch.randn(30, 20).mul(64).round().div(64)
    probs, target = torch.rand(30, 20, device=device), dict[str, Any]()
    target["target"] = probs
    if kind == "soft targets":
        index = torch.randint(20, (30, 4), device=device)
        target = {"target_indices": index, "target_probs": probs[:, :4]}
    losses = []
    for offset in (0.0, 1024.0):
        w = torch.cat([torch.eye(20), torch.ones(20, 1)], 1).to(device)
        h = torch.cat([logits, torch.full((30, 1), offset)], 1).to(device)
        losses.append(cutefce.linear_cross_entropy(h, w, reduction="none", **target))
    torch.testing.assert_close(*losses, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", TARGETS)
def test_log_sum_exps_are_returned(kind: str, device: str) -> None:
    x = TARGETS[kind](["z_loss"], 150, 64, 333, dtype=torch.bfloat16, device=device)
    found: Any = x.loss(x.leaves, return_lse=True)
    torch.testing.assert_close(found.loss.detach(), x.ours(reduction="mean")[0])
    assert found.lse is not None and not found.lse.requires_grad
    lse = (x.case.h.float() @ x.case.w.float().t()).logsumexp(1)
    torch.testing.assert_close(found.lse, torch.where(x.ignored, 0, lse), rtol=1e-3, atol=1e-3)


@each_kind
def test_shapes_and_dtypes(kind: str, device: str) -> None:
    """Tokens of several dimensions or of none, probabilities of any dtype, a module."""
    probs = torch.rand(3, 4, 50, device=device).bfloat16()
    index = torch.randint(50, (3, 4, 5), device=device)
    head = cutefce.LinearCrossEntropyLoss(16, 50, reduction="none").to(device)
    h = torch.randn(3, 4, 16, device=device)

    def loss(tokens: Any, x: Tensor = probs, **more: Any) -> Any:
        if kind == "probabilities":
            return head(h[tokens], x[tokens], **more)
        soft = {"target_indices": index[tokens], "target_probs": x[tokens][..., :5]}
        return head(h[tokens], **soft, **more)

    every, one = slice(None), (0, 2)
    want = loss(every)
    assert want.shape == (3, 4)
    torch.testing.assert_close(loss(every, probs.double()), want)
    torch.testing.assert_close(loss(every, probs.mT.contiguous().mT), want)
    torch.testing.assert_close(loss(one), want[one])
    weights = torch.tensor([0.0, 1.0, 2.0, 3.0], device=device).expand(3, 4)
    torch.testing.assert_close(loss(every, token_weights=weights), want * weights)
    torch.testing.assert_close(loss(one, token_weights=weights[one]), 2 * want[one])
    assert loss(slice(0)).shape == (0, 4)


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


def test_a_token_with_nan_leaves_the_others(device: str) -> None:
    """Probabilities of all classes are not checked, as by torch."""
    x = dense_case([], 40, 16, 50, device=device)
    good = x.ours()
    x.options["target"][7, 3] = torch.nan
    losses, dx, _ = x.ours()
    assert bool(losses[7].isnan()) and bool(dx[7].isnan().all())
    others = torch.arange(40, device=device) != 7
    assert torch.equal(losses[others], good[0][others])
    assert torch.equal(dx[others], good[1][others])


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
@pytest.mark.parametrize("rows", [6, 200])
def test_probabilities_in_float16_with_weights_of_any_size(
    scale: float, rows: int, device: str
) -> None:
    """Of one block of tokens or several, the first of which have the smallest weights."""
    torch.manual_seed(0)
    h, w = (torch.randn(n, 8, device=device).half() for n in (rows, 20))
    q = torch.rand(rows, 20, device=device).softmax(1)
    weights = scale * torch.linspace(0.1, 1, rows, device=device)

    def gradients(dtype: torch.dtype) -> tuple[Tensor, ...]:
        own = [x.to(dtype).requires_grad_() for x in (h, w)]
        given: Any = {"token_weights": weights, "workspace": "min"}
        loss = cutefce.linear_cross_entropy(own[0], own[1], q, **given)
        return torch.autograd.grad(loss, own)

    for got, want in zip(gradients(torch.float16), gradients(torch.float64), strict=True):
        torch.testing.assert_close(
            got.double(), want, rtol=2e-3, atol=2e-3 * float(want.abs().max())
        )


def test_no_kernels_serve_probabilities(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    x = dense_case([], 12, 8, 40, device=device)
    monkeypatch.setattr(dispatch, "_strict", True)
    with pytest.raises(RuntimeError, match="target: got probabilities"):
        x.ours()


def test_probabilities_take_the_workspace_and_flops_of_logits() -> None:
    """And no tensor of all logits."""
    x = dense_case(["weight", "label_smoothing"], 1000, 16, 4000)
    leaves, budget = x.leaves, 8 << 20

    def step() -> None:
        torch.autograd.grad(x.loss(leaves, workspace=budget), leaves)

    with FlopCounterMode(display=False) as counter:
        step()
    assert counter.get_total_flops() == 3 * 2 * 1000 * 16 * 4000
    (peak,) = peaks([step])
    taken = peak - sum(leaf.nbytes for leaf in leaves)
    assert budget / 2 < taken <= budget < x.options["target"].nbytes


def test_a_wide_weight(device: str) -> None:
    """A float32 weight beside 16-bit hidden states."""
    h, w = torch.randn(10, 16, device=device).bfloat16(), torch.randn(50, 16, device=device)
    wide, narrow = w.clone().requires_grad_(), w.bfloat16().requires_grad_()
    probs = torch.rand(10, 50, device=device)
    for weight in (wide, narrow):
        cutefce.linear_cross_entropy(h, weight, probs).backward()
    assert wide.grad is not None and wide.grad.dtype == torch.float32
    torch.testing.assert_close(wide.grad.bfloat16(), narrow.grad)


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
