"""Probabilities of all classes as the target, as torch takes them."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import cutefce
from cutefce.ops.interface import checks
from cutefce.ops.operators.probabilities import block_rows
from cutefce.ops.primitives import dispatch
from tests.ops.test_soft_targets import EACH
from tests.support.memory import peaks
from tests.support.options import (
    OptionsCase,
    assert_compiled_equals_eager,
    assert_results_as_accurate,
    dense_case,
    exact,
)
from tests.support.reference import random_case

SIZES = 150, 16, 333
WORKSPACES: list[int | str] = ["min", 2_800_000, "max"]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def loss_of(x: OptionsCase, leaves: tuple[Tensor, ...], **more: Any) -> Tensor:
    loss: Tensor = cutefce.linear_cross_entropy(
        leaves[0], leaves[1], **x.with_leaves(leaves), **more
    )
    return loss


@pytest.mark.parametrize(
    ("names", "reduction"), [*zip(EACH.values(), ["none", "mean", "sum"], strict=True)], ids=str
)
def test_equals_float64(names: list[str], reduction: str, device: str) -> None:
    x = dense_case(names, *SIZES, dtype=torch.float64, device=device)
    options: dict[str, Any] = {"reduction": reduction}
    for got, want in zip(x.ours(**options, workspace="min"), exact(x, **options), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("logit_std", [0.1, 1, 4, 12])
@pytest.mark.parametrize("sizes", [(64, 96, 1001), (331, 40, 61)], ids=str)
def test_is_as_accurate_as_the_unfused_loss(
    sizes: tuple[int, int, int], logit_std: float, device: str
) -> None:
    for dtype in DTYPES:
        x = dense_case([], *sizes, dtype=dtype, device=device, logit_std=logit_std)
        assert_results_as_accurate(x.ours(), x)


@pytest.mark.parametrize("names", list(EACH.values())[1:], ids=list(EACH)[1:])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_options_are_as_accurate(names: list[str], dtype: torch.dtype, device: str) -> None:
    x = dense_case(names, 150, 64, 333, dtype=dtype, device=device)
    assert_results_as_accurate(x.ours(), x)


@pytest.mark.parametrize("logit_std", [0.1, 2, 8])
@pytest.mark.parametrize("distance", [0.0, 0.1])
def test_a_teacher_close_to_the_student(distance: float, logit_std: float, device: str) -> None:
    """Probabilities cancel: a rounding of p would be larger than that of p - q."""
    for dtype in DTYPES:
        if dtype == torch.float16 and not distance:
            continue  # what is left is below its least number
        case = random_case(200, 40, 333, dtype=dtype, device=device, logit_std=logit_std)
        logits = case.h.float() @ case.w.float().t()
        teacher = (logits + distance * torch.randn_like(logits)).softmax(1)
        x = OptionsCase(case, {"target": teacher})
        assert_results_as_accurate(x.ours(), x)


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


def test_one_hot_is_as_accurate_as_the_plain_loss(device: str) -> None:
    for dtype in DTYPES:
        case = random_case(150, 64, 333, dtype=dtype, device=device, ignored=0)
        x = OptionsCase(case, {"target": F.one_hot(case.y, 333).to(dtype)})
        assert_results_as_accurate(x.ours(), x)


def test_a_common_offset_of_logits_changes_nothing(device: str) -> None:
    logits, probs = torch.randn(30, 20).mul(64).round().div(64), torch.rand(30, 20, device=device)
    losses = []
    for offset in (0.0, 1024.0):
        w = torch.cat([torch.eye(20), torch.ones(20, 1)], 1).to(device)
        h = torch.cat([logits, torch.full((30, 1), offset)], 1).to(device)
        losses.append(cutefce.linear_cross_entropy(h, w, probs, reduction="none"))
    torch.testing.assert_close(*losses, rtol=1e-5, atol=1e-5)


def test_a_class_that_cannot_be(device: str) -> None:
    """A logit of -inf has an infinite loss, be it of the lead or not, unless its q is 0.

    So may all q of a token be.
    """
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
    results = x.ours()
    for got, wanted in zip(results, exact(x), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-11)
    more = {**x.options, "target": probs.view(5, 8, 50), "reduction": "none"}
    losses = cutefce.linear_cross_entropy(x.case.h.view(5, 8, 16), x.case.w, **more)
    torch.testing.assert_close(losses.flatten(), results[0], rtol=1e-12, atol=0)


def test_a_token_with_nan_leaves_the_others(device: str) -> None:
    """Values are not checked, as by torch: NaN is in what the token takes part in."""
    x = dense_case([], 40, 16, 50, device=device)
    good = x.ours()
    x.options["target"][7, 3] = torch.nan
    losses, dx, _ = x.ours()
    assert bool(losses[7].isnan()) and bool(dx[7].isnan().all())
    others = torch.arange(40, device=device) != 7
    assert torch.equal(losses[others], good[0][others])
    assert torch.equal(dx[others], good[1][others])


def test_tokens_of_weight_0_reach_nothing() -> None:
    """On a CPU, what ignored tokens hold, and their probabilities, does not matter."""
    for dtype in (torch.float32, torch.bfloat16):
        x = dense_case(["token_weights"], 150, 16, 333, dtype=dtype, device="cpu")
        want = x.ours(workspace="min")
        ignored = x.options["token_weights"] == 0
        x.case.h[ignored], x.options["target"][ignored] = torch.nan, torch.nan
        for a, b in zip(x.ours(workspace="min"), want, strict=True):
            torch.testing.assert_close(a, b)


@pytest.mark.slow
def test_compiled_equals_eager(device: str) -> None:
    names = EACH["softcap and all factors"]
    cases = (dense_case(names, tokens, 16, 333, device=device) for tokens in (40, 70))
    assert_compiled_equals_eager(cases, device)


def test_opcheck(device: str) -> None:
    x = dense_case(["label_smoothing", "weight", "z_loss"], 20, 8, 50, device=device)
    h, w = x.leaves
    target = x.options.pop("target")
    torch.library.opcheck(torch.ops.cutefce.loss.default, (h, w, target), x.options)


def test_uses(device: str) -> None:
    """Frozen operands, a second backward, no gradients, and log-sum-exps."""
    x = dense_case(["z_loss"], 150, 64, 333, dtype=torch.bfloat16, device=device)
    h, w = x.leaves
    out = cutefce.linear_cross_entropy(h, w, return_lse=True, **x.options)
    want = torch.autograd.grad(out.loss, (h, w), retain_graph=True)
    for a, b in zip(torch.autograd.grad(out.loss, (h, w)), want, strict=True):
        assert torch.equal(a, b)
    assert out.lse is not None and not out.lse.requires_grad
    lse = (x.case.h.float() @ x.case.w.float().t()).logsumexp(1)
    torch.testing.assert_close(out.lse, lse, rtol=1e-3, atol=1e-3)
    with torch.no_grad():
        torch.testing.assert_close(loss_of(x, (h, w)), out.loss)
    for i in (0, 1):
        leaf = (h, w)[i].detach().requires_grad_()
        both = (leaf, w.detach()) if i == 0 else (h.detach(), leaf)
        (alone,) = torch.autograd.grad(loss_of(x, both), leaf)
        assert torch.equal(alone, want[i])


def test_no_kernels_serve_it(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    x = dense_case([], 12, 8, 40, device=device)
    monkeypatch.setattr(dispatch, "_strict", True)
    with pytest.raises(RuntimeError, match="target: got probabilities"):
        x.ours()


def test_other_derivatives_are_refused(device: str) -> None:
    x = dense_case([], 12, 8, 40, device=device)
    h, w = x.leaves
    losses = loss_of(x, (h, w), reduction="none")
    with pytest.raises(NotImplementedError, match="got a backward with is_grads_batched=True"):
        torch.autograd.grad(losses, h, torch.eye(12).to(losses), is_grads_batched=True)
    (dx,) = torch.autograd.grad(losses.sum(), h, create_graph=True)
    with pytest.raises(NotImplementedError, match="no second derivatives"):
        dx.sum().backward()
    with pytest.raises(NotImplementedError, match="linear_cross_entropy: got a call under a trans"):
        torch.func.grad(lambda h: loss_of(x, (h, w.detach())))(h.detach())


def test_flops_are_those_of_the_unfused_form(device: str) -> None:
    x = dense_case([], 12, 8, 40, device=device)
    for frozen, products in (((), 3), ((1,), 2), ((0, 1), 1)):
        leaves = (*(t.requires_grad_(i not in frozen) for i, t in enumerate(x.leaves)),)
        with FlopCounterMode(display=False) as counter:
            loss = loss_of(x, leaves)
            if loss.requires_grad:
                loss.backward()
        assert counter.get_total_flops() == products * 2 * 12 * 8 * 40


def test_a_block_has_the_rows_that_fit_the_workspace(device: str) -> None:
    x = dense_case(["label_smoothing", "token_weights"], 300, 16, 1000, device=device)
    rows = [block_rows(checks.workspace_bytes(w), 1000, torch.float32) for w in WORKSPACES]
    assert rows == [64, 100, 4096]
    results = [x.ours(workspace=workspace) for workspace in WORKSPACES]
    for others in zip(*results, strict=True):
        for other in others[1:]:
            torch.testing.assert_close(other, others[0], rtol=1e-5, atol=1e-5)


def test_a_step_takes_the_workspace_and_no_tensor_of_all_logits() -> None:
    x = dense_case(["weight", "label_smoothing"], 1000, 16, 4000, device="cpu")
    (h, w), budget = x.leaves, 8 << 20

    def step() -> None:
        torch.autograd.grad(loss_of(x, (h, w), workspace=budget), (h, w))

    step()
    (peak,) = peaks([step])
    assert budget / 2 < peak - h.nbytes - w.nbytes <= budget < x.options["target"].nbytes


def test_a_wide_weight(device: str) -> None:
    """A float32 weight beside 16-bit hidden states."""
    h, w = torch.randn(10, 16, device=device).bfloat16(), torch.randn(50, 16, device=device)
    wide, narrow = w.clone().requires_grad_(), w.bfloat16().requires_grad_()
    probs = torch.rand(10, 50, device=device)
    for weight in (wide, narrow):
        cutefce.linear_cross_entropy(h, weight, probs).backward()
    assert wide.grad is not None and wide.grad.dtype == torch.float32
    torch.testing.assert_close(wide.grad.bfloat16(), narrow.grad)


def test_shapes_and_dtypes(device: str) -> None:
    """Tokens of several dimensions or of none, probabilities of any dtype, a module."""
    probs = torch.rand(3, 4, 50, device=device).bfloat16()
    head = cutefce.LinearCrossEntropyLoss(16, 50, reduction="none").to(device)
    h = torch.randn(3, 4, 16, device=device)
    want = head(h, probs)
    assert want.shape == (3, 4)
    torch.testing.assert_close(head(h, probs.double()), want)
    torch.testing.assert_close(head(h, probs.mT.contiguous().mT), want)
    torch.testing.assert_close(head(h[0, 0], probs[0, 0]), want[0, 0])
    weights = torch.tensor([0.0, 1.0, 2.0, 3.0], device=device).expand(3, 4)
    weighted = head(h, probs, token_weights=weights)
    torch.testing.assert_close(weighted, want * weights)
    torch.testing.assert_close(
        head(h[0, 2], probs[0, 2], token_weights=weights[0, 2]), 2 * want[0, 2]
    )
    empty = cutefce.linear_cross_entropy(h[:0], head.linear.weight, probs[:0])
    assert empty.item() == 0
