"""Divergences and their gradients against float64, and against the formulas of trainers."""

from typing import Any

import pytest
import torch
from torch import Tensor

import cutefce
from cutefce.ops.divergence import lower
from tests.support.divergence import (
    FORMS,
    NAMES,
    PLANS,
    RUNS,
    Heads,
    assert_as_accurate,
    expected,
    heads,
    model_logits,
    ours,
    planned,
    several,
    token_divergences,
)
from tests.support.reference import distance
from tests.support.tiers import pairwise, pairwise_of, rest_slow

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SHAPES = {
    "a single class: every divergence is 0": (5, (8, 8), 1),
    "few classes": (33, (16, 24), 7),
    "one token": (1, (32, 8), 300),
    "odd hidden sizes": (40, (13, 7), 257),
    "ragged tiles": (1100, (24, 16), 1304),
    "a teacher of one feature": (40, (16, 1), 100),
    "32001: one beyond a multiple of every tile": (12, (16, 8), 32001),
    "151669: Qwen 3, odd": (6, (8, 4), 151669),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "scales": {"logit_scale": (0.5, -2.0)},
    "one scale": {"logit_scale": 0.25},
    "softcaps": {"softcap": (3.0, 2.0)},
    "a softcap of the student": {"softcap": (2.0, None)},
    "temperatures": {"temperature": (0.7, 2.0)},
    "one temperature": {"temperature": 3.0},
    "a temperature of each token": {"temperature": (torch.rand(60).double() + 0.5, 2.0)},
    "all": {
        "logit_scale": (0.5, -2.0),
        "softcap": (3.0, 2.0),
        "temperature": (torch.rand(60).double() + 0.5, torch.tensor(1.5)),
    },
}
forms = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def moved(options: dict[str, Any], device: str) -> dict[str, Any]:
    """Return options on a device; their values, or those of pairs, may be tensors."""

    def to(x: Any) -> Any:
        if isinstance(x, tuple):
            return tuple(map(to, x))
        return x.to(device) if isinstance(x, Tensor) else x

    return {name: to(x) for name, x in options.items()}


KINDS = [
    (torch.bfloat16, "JSD, mostly student"),
    (torch.float16, "JSD"),
    (torch.float32, "JSD, nearly teacher"),
    (torch.float32, "forward KL"),
    (torch.bfloat16, "forward KL"),
    (torch.bfloat16, "reverse KL"),
]


# plans that keep factors in dW take many small steps, and are among those of `test_options`
IN_DW = [run for run in RUNS if "dW" in run[0]]


@pytest.mark.parametrize(
    "run", rest_slow([*(x for x in RUNS if x not in IN_DW), *IN_DW], len(RUNS) - len(IN_DW))
)
@pytest.mark.parametrize("kind", rest_slow(KINDS))
def test_every_plan(run: tuple[str, str], kind: tuple[torch.dtype, str], device: str) -> None:
    (plan, reduction), (dtype, form) = run, kind
    cases = several(150, (48, 40), 333, dtype=dtype, device=device, logit_std=2)
    with planned(plan):
        assert_as_accurate(cases, reduction=reduction, **FORMS[form])


SMALL = {name: shape for name, shape in SHAPES.items() if shape[0] * shape[2] < 1 << 19}


@pairwise_of(
    {"shape": SMALL, "form": ["JSD", "forward KL"]},
    shape=SHAPES,
    workspace=["max", "min"],
    dtype=DTYPES,
    form=[*FORMS],
)
def test_shapes(
    shape: tuple[int, tuple[int, int], int],
    workspace: str,
    dtype: torch.dtype,
    form: str,
    device: str,
) -> None:
    options = {"workspace": workspace, **FORMS[form]}
    cases = several(*shape, dtype=dtype, device=device)
    if shape[2] == 1:
        assert not any(x.any() for x in ours(cases[0], **options))
    else:
        assert_as_accurate(cases, **options)


@pairwise(options=OPTIONS, plan=[*PLANS], form=[*FORMS])
def test_options(options: dict[str, Any], plan: str, form: str, device: str) -> None:
    case = heads(60, (16, 12), 133, dtype=torch.float64, device=device, logit_std=2, biases=True)
    options = moved(options, device) | FORMS[form]
    with planned(plan):
        for got, truth in zip(ours(case, **options), expected(case, **options), strict=True):
            assert distance(got, truth) <= 1e-12 * float(truth.norm())


@pairwise(form=[*FORMS], plan=[*PLANS], reduction=["sum", "none"], options=OPTIONS)
def test_overlaps(
    options: dict[str, Any], reduction: str, plan: str, form: str, device: str
) -> None:
    """Of every divergence, and 1 less total variation; some classes are excluded."""
    options = moved(options, device) | FORMS[form]
    case = heads(60, (16, 12), 133, dtype=torch.float64, device=device, logit_std=2, biases=True)
    with torch.no_grad():
        for bias in case.biases.values():
            bias[120:] = -torch.inf
    with planned(plan if reduction == "sum" or not PLANS[plan].kept else "one pass"):
        found = cutefce.linear_divergence(
            *case.tensors,
            case.target,
            return_overlap=True,
            reduction=reduction,
            **(case.biases | options),
        )
    p, q = (model_logits(case, side, **options).softmax(-1) for side in (0, 1))
    counts = case.target != -100
    want = torch.where(counts, torch.minimum(p, q).sum(-1), 0)
    torch.testing.assert_close(found.overlap, want.detach(), rtol=0, atol=1e-14)
    assert found.loss.requires_grad and not found.overlap.requires_grad
    if form == "total variation" and reduction == "none":
        assert torch.equal(torch.where(counts, 1 - found.loss, 0), found.overlap)


@pairwise(wanted=[[0], [1], [2], [3], [0, 3], [1, 2]], workspace=["max", "min"])
def test_each_gradient_alone(workspace: str, wanted: list[int], device: str) -> None:
    case = heads(60, (16, 12), 133, dtype=torch.float64, device=device)
    every = expected(case, divergence="jsd")[1:]
    tensors = [x.detach().requires_grad_(i in wanted) for i, x in enumerate(case.tensors)]
    part = Heads(tuple(tensors), case.target, case.upstream)  # type: ignore[arg-type]
    for got, i in zip(ours(part, divergence="jsd", workspace=workspace)[1:], wanted, strict=True):
        assert distance(got, every[i]) <= 1e-12 * float(every[i].norm())


@pytest.mark.parametrize("plan", ["one tile", "one pass", "all kept"])
def test_dw_of_scaled_hidden_states(
    plan: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What bfloat16 on a GPU does where a window has the factors of all tokens."""
    monkeypatch.setattr(lower, "rounds_scaled", lambda *_: True)
    case = heads(60, (16, 12), 133, dtype=torch.float64, device=device, biases=True)
    options: dict[str, Any] = {"divergence": "jsd", "temperature": 0.7, "reduction": "sum"}
    with planned(plan):
        for got, truth in zip(ours(case, **options), expected(case, **options), strict=True):
            assert distance(got, truth) <= 1e-12 * float(truth.norm())


@forms
@pytest.mark.parametrize("workspace", ["max", "min"])
def test_equal_heads_have_no_divergence(workspace: str, form: dict[str, Any], device: str) -> None:
    h, w, _, _ = heads(60, (16, 16), 333, device=device, logit_std=4).tensors
    losses = cutefce.linear_divergence(
        h, w, h.detach(), w.detach(), reduction="none", workspace=workspace, **form
    )
    assert not losses.any()
    assert not any(x.any() for x in torch.autograd.grad(losses.sum(), (h, w)))


@forms
@pytest.mark.parametrize("workspace", ["max", "min"])
def test_close_heads_keep_relative_precision(
    workspace: str, form: dict[str, Any], device: str
) -> None:
    """Where the definition's terms cancel: divergences of 1e-9 nats in float32."""
    case = heads(60, (16, 16), 333, device=device, ignored=0)
    h, w = case.tensors[0].detach(), case.tensors[1].detach()
    logits = (h @ w.t()).mul(256).round().div(256)
    close = logits + torch.randn_like(logits).mul(8).round() / 2**17  # both exact in float32
    eye = torch.eye(333, device=device)
    pair = Heads((close, eye, logits, eye), case.target, case.upstream)
    want = token_divergences(close.double(), logits.double(), **form)
    most = 1e-4 if form["divergence"] == "tv" else 1e-8
    assert float(want.min()) > 1e-13 and float(want.max()) < most
    got = cutefce.linear_divergence(*pair.tensors, reduction="none", workspace=workspace, **form)
    assert float(((got - want) / want).abs().max()) < 0.02


@pairwise(beta=[0.999, 0.001, 0.99999], workspace=["max", "min"], size=[1, 4])
def test_a_mixture_of_nearly_one_side_keeps_relative_precision(
    size: float, workspace: str, beta: float, device: str
) -> None:
    """Where log p - log m is as small as the other side's share, for all but a few classes."""
    eye = torch.eye(97, device=device)
    logits = torch.randn(2, 40, 97, device=device).mul(8 * size).round().div(8)
    sides = [x.clone().requires_grad_() for x in logits]
    form: dict[str, Any] = {"divergence": "jsd", "beta": beta}
    operands = sides[0], eye, sides[1], eye
    got = cutefce.linear_divergence(*operands, reduction="none", workspace=workspace, **form)
    wide = [x.detach().double().requires_grad_() for x in sides]
    want = token_divergences(*wide, **form)
    torch.testing.assert_close(got.double(), want, rtol=2e-6, atol=0)
    gradients = torch.autograd.grad(got.sum(), sides), torch.autograd.grad(want.sum(), wide)
    for a, b in zip(*gradients, strict=True):
        assert distance(a, b) <= 2e-6 * float(b.norm())


@forms
@pytest.mark.parametrize("workspace", ["max", "min"])
def test_classes_that_both_sides_exclude(workspace: str, form: dict[str, Any], device: str) -> None:
    """A bias of -inf, as of padded classes, is the same as no such classes."""
    case = heads(40, (16, 12), 200, dtype=torch.float64, device=device)
    bias = torch.zeros(200, dtype=torch.float64, device=device)
    bias[150:] = -torch.inf
    got = ours(case, student_bias=bias, teacher_bias=bias, workspace=workspace, **form)
    few = [x.detach()[:150] if i % 2 else x.detach() for i, x in enumerate(case.tensors)]
    part = Heads(tuple(x.requires_grad_() for x in few), case.target, case.upstream)  # type: ignore[arg-type]
    for name, a, b in zip(("loss", *NAMES), got, expected(part, **form), strict=True):
        assert distance(a[:150], b) <= 1e-12 * float(b.norm()), name
        assert name not in NAMES[1::2] or not a[150:].any()


@pairwise(plan=[*PLANS], excluding=["student", "teacher"])
def test_total_variation_of_classes_that_one_side_excludes(
    excluding: str, plan: str, device: str
) -> None:
    """As of a draft vocabulary, beside which a KL is infinite."""
    case = heads(40, (16, 12), 200, dtype=torch.float64, device=device)
    bias = torch.zeros(200, dtype=torch.float64, device=device)
    bias[150:] = -torch.inf
    part = Heads(case.tensors, case.target, case.upstream, {f"{excluding}_bias": bias})
    options: dict[str, Any] = {"divergence": "tv", "reduction": "sum"}
    with planned(plan):
        for got, truth in zip(ours(part, **options), expected(part, **options), strict=True):
            assert distance(got, truth) <= 1e-12 * float(truth.norm())


@pytest.mark.parametrize("form", rest_slow(FORMS))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_16_bits_keep_small_factors(dtype: torch.dtype, form: dict[str, Any], device: str) -> None:
    """Probabilities of 1e-5, as of large vocabularies, are below the normal numbers of float16."""
    case = heads(24, (16, 24), 100_003, dtype=dtype, device=device, ignored=0, logit_std=0.3)
    case.upstream.mul_(3000)  # of the loss scaling of float16, without which gradients round to 0
    got, want = ours(case, **form), expected(case.cast(torch.float64), **form)
    for a, b in zip(got[1:], want[1:], strict=True):
        assert distance(a, b) <= 2 * torch.finfo(dtype).eps * float(b.norm())


@pairwise(dtype=DTYPES, workspace=["max", "min"], reduction=["mean", "sum"])
def test_reductions(dtype: torch.dtype, workspace: str, reduction: str, device: str) -> None:
    case = heads(90, (16, 24), 333, dtype=dtype, device=device)
    count = int((case.target != -100).sum()) if reduction == "mean" else 1
    uniform = Heads(case.tensors, case.target, torch.full_like(case.upstream, 1 / count))
    given: tuple[tuple[dict[str, Any], int], ...] = ({}, count), ({"denominator": 7}, 7)
    for more, divisor in given:
        if more and reduction == "sum":
            continue
        loss = cutefce.linear_divergence(
            *case.tensors, case.target, reduction=reduction, workspace=workspace, **more
        )
        got = [loss, *torch.autograd.grad(loss, case.leaves)]
        want = expected(uniform.cast(torch.float64))
        torch.testing.assert_close(got[0].double(), want[0].sum() / divisor, rtol=1e-6, atol=0)
        for a, b in zip(got[1:], want[1:], strict=True):
            b = b * (count / divisor)
            assert distance(a, b) <= 4 * torch.finfo(dtype).eps * float(b.norm()) + 1e-6


@pairwise(form=FORMS, size=[1e2, 1e4, 1e30], workspace=["max", "min"])
def test_far_logits(size: float, workspace: str, form: dict[str, Any], device: str) -> None:
    """Sides that are sure of different classes, and a common offset."""
    eye = torch.eye(97, device=device)
    logits = torch.randn(2, 40, 97, device=device).mul(8).round().div(8)
    logits[0, :, 3], logits[1, :, 5] = size, size
    student, teacher = logits[0].clone().requires_grad_(), logits[1].clone().requires_grad_()
    got = cutefce.linear_divergence(
        student, eye, teacher, eye, reduction="none", workspace=workspace, **form
    )
    wide = [x.detach().double().requires_grad_() for x in (student, teacher)]
    want = token_divergences(*wide, **form)
    torch.testing.assert_close(got.double(), want, rtol=2e-6, atol=1e-6)
    for a, b in zip(
        torch.autograd.grad(got.sum(), (student, teacher)),
        torch.autograd.grad(want.sum(), wide),
        strict=True,
    ):
        assert distance(a, b) <= 1e-5 * (1 + float(b.norm()))
