"""What holds of divergences beside their values: memory, ignored rows, compilers."""

import pytest
import torch

import cutefce
from tests.support.divergence import (
    FORMS,
    PLANS,
    RUNS,
    Heads,
    expected,
    heads,
    ours,
    planned,
)
from tests.support.reference import distance
from tests.support.tiers import pairwise


@pairwise(
    run=RUNS,
    given=[
        (torch.nan, "forward KL"),
        (torch.nan, "JSD"),
        (torch.inf, "reverse KL"),
        (1e38, "JSD, mostly student"),
        (torch.nan, "total variation"),
    ],
)
def test_ignored_tokens_may_hold_anything(
    run: tuple[str, str], given: tuple[float, str], device: str
) -> None:
    (plan, reduction), (value, form) = run, given
    options = {"reduction": reduction, **FORMS[form]}
    case = heads(60, (16, 12), 133, device=device, ignored=0.4)
    with planned(plan):
        clean = ours(case, **options)
    with torch.no_grad():
        for h in (case.tensors[0], case.tensors[2]):
            h[case.target == -100] = value
    with planned(plan):
        results = ours(case, **options)
    for got, want in zip(results, clean, strict=True):
        assert torch.equal(got, want)
    for i in (0, 1, 3) if reduction == "none" else (1, 3):
        assert not results[i][case.target == -100].any()


@pairwise(plan=[*PLANS], dtype=[torch.float32, torch.bfloat16], reduction=["mean", "sum", "none"])
def test_nothing_to_compute(reduction: str, dtype: torch.dtype, plan: str, device: str) -> None:
    for tokens in (0, 5):
        case = heads(tokens, (16, 12), 133, dtype=dtype, device=device, ignored=1)
        with planned(plan):
            loss = cutefce.linear_divergence(*case.tensors, case.target, reduction=reduction)
            gradients = torch.autograd.grad(loss.sum(), case.leaves)
        assert loss.shape == ((tokens,) if reduction == "none" else ())
        assert not loss.any() and not any(x.any() for x in gradients)


@pairwise(form=["JSD", "total variation"], plan=[*PLANS], side=[0, 2])
def test_a_bad_token_stays_alone(side: int, plan: str, form: str, device: str) -> None:
    case = heads(60, (16, 12), 133, device=device, ignored=0)
    with planned(plan):
        good = ours(case, **FORMS[form])
        with torch.no_grad():
            case.tensors[side][7, 2] = torch.nan
        bad = ours(case, **FORMS[form])
    rest = torch.arange(60, device=device) != 7
    for i in (0, 1, 3):
        assert bad[i][7].isnan().any()
        torch.testing.assert_close(bad[i][rest], good[i][rest])


@pytest.mark.parametrize("plan", ["all kept", "kept in dW"])
def test_a_backward_without_what_was_kept_computes_it_again(plan: str, device: str) -> None:
    case = heads(60, (16, 12), 133, device=device)
    given = *case.tensors, case.target
    with planned(plan):
        kept_factors = torch.autograd.grad(cutefce.linear_divergence(*given), case.leaves)
        with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda x: x):
            loss = cutefce.linear_divergence(*given)
            again = torch.autograd.grad(loss, case.leaves)
    for a, b in zip(kept_factors, again, strict=True):
        torch.testing.assert_close(a, b)


def test_autocast_is_that_of_linear(device: str) -> None:
    case = heads(60, (16, 12), 133, device=device)
    narrow = case.cast(torch.bfloat16)
    want = cutefce.linear_divergence(*narrow.tensors, case.target)
    with torch.autocast(device, torch.bfloat16):
        got = cutefce.linear_divergence(*case.tensors, case.target)
    assert torch.equal(got, want) and got.dtype == torch.float32
    wanted = torch.autograd.grad(want, narrow.leaves)
    for a, b in zip(torch.autograd.grad(got, case.leaves), wanted, strict=True):
        assert torch.equal(a, b.float())


def test_sides_of_two_dtypes(device: str) -> None:
    case = heads(60, (16, 12), 133, device=device)
    teacher = [x.detach().bfloat16().requires_grad_() for x in case.tensors[2:]]
    mixed = Heads((*case.tensors[:2], teacher[0], teacher[1]), case.target, case.upstream)
    got, want = ours(mixed, divergence="jsd"), expected(mixed.cast(torch.float64), divergence="jsd")
    assert [x.dtype for x in got[1:]] == [torch.float32] * 2 + [torch.bfloat16] * 2
    for a, b in zip(got, want, strict=True):
        assert distance(a, b) <= 2 * torch.finfo(a.dtype).eps * 8 * float(b.norm())


def test_shapes_and_layouts_of_tokens(device: str) -> None:
    case = heads(60, (16, 12), 133, dtype=torch.float64, device=device)
    want = expected(case, divergence="jsd")
    h_s, w_s, h_t, w_t = (x.detach() for x in case.tensors)
    views = (
        h_s.view(4, 15, 16).transpose(0, 1),
        w_s.t().contiguous().t(),
        h_t.view(4, 15, 12).transpose(0, 1),
        torch.cat([w_t, w_t], 1)[:, :12],
    )
    leaves = [x.requires_grad_() for x in views]
    target = case.target.view(4, 15).t()
    h, w, other_h, other_w = leaves
    losses = cutefce.linear_divergence(
        h, w, other_h, other_w, target, divergence="jsd", reduction="none"
    )
    upstream = case.upstream.view(4, 15).t()
    got = [losses.t().reshape(-1)]
    gradients = torch.autograd.grad(losses, leaves, upstream)
    got += [x.transpose(0, 1).reshape(60, -1) if x.ndim == 3 else x for x in gradients]
    for a, b in zip(got, want, strict=True):
        assert distance(a, b) <= 1e-12 * float(b.norm())
    single = cutefce.linear_divergence(h_s[0], w_s, h_t[0], w_t)
    assert single.shape == () and single > 0
