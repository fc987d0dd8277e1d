"""Options of the loss, alone and in pairs: as accurate as the unfused form, and as torch's."""

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import cutefce
from cutefce.cute_kernels.config import PortableTiles
from tests.support.backends import Backend, on_backends
from tests.support.layouts import LAYOUTS, Layout, pinned
from tests.support.options import (
    OPTIONS,
    PER_TOKEN,
    REFUSED_PAIR,
    OptionsCase,
    assert_results_as_accurate,
    exact,
    losses_of_logits,
    model_logits,
    options_case,
)
from tests.support.reference import Case, are_same, logits_case, random_case
from tests.support.tiers import pairwise, rest_slow

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
EACH = [[name] for name in OPTIONS]
each_option = pytest.mark.parametrize("names", EACH, ids=list(OPTIONS))


def are_served(names: tuple[str, ...]) -> bool:
    """Whether options can be given together, which name different arguments."""
    arguments = [argument for name in names for argument in OPTIONS[name]]
    return len(set(arguments)) == len(arguments) and not set(names) >= REFUSED_PAIR


PAIRS = [pair for pair in itertools.combinations(OPTIONS, 2) if are_served(pair)]
TRIPLES = [names for names in itertools.combinations(OPTIONS, 3) if are_served(names)]


def by_layout(x: OptionsCase, layout: Layout) -> tuple[Tensor, ...]:
    """Return losses and gradients in a layout; of gradients in forward, of the sum."""
    with pinned(layout):
        return x.ours(reduction=layout.reduction)


@pytest.mark.compiled_rows
@pairwise(name=[*OPTIONS], dtype=DTYPES, workspace=["max", "min"])
def test_each_option(name: str, dtype: torch.dtype, workspace: str, device: str) -> None:
    x = options_case([name], 70, 64, 333, dtype=dtype, device=device)
    assert_results_as_accurate(x.ours(workspace=workspace), x)


@pairwise(
    name=[*OPTIONS],
    sizes=[(40, 13, 257), (33, 64, 7), (1100, 24, 1300)],
    dtype=[torch.bfloat16, torch.float32],
)
def test_ragged_sizes(name: str, sizes: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
    x = options_case([name], *sizes, dtype=dtype, device=device)
    assert_results_as_accurate(x.ours(), x)


@pytest.mark.parametrize("vocab", [300, 1])
@each_option
def test_one_token(names: list[str], vocab: int, device: str) -> None:
    x = options_case(names, 1, 32, vocab, device=device, ignored=0)
    torch.testing.assert_close(x.ours(), tuple(want.float() for want in exact(x)))


@pytest.mark.parametrize("names", PAIRS, ids=" with ".join)
@pytest.mark.parametrize("workspace", rest_slow(["min", "max"]))
def test_pairs_are_exact_in_float64(
    names: tuple[str, ...], workspace: str, small_tiles: PortableTiles
) -> None:
    x = options_case([*names], 60, 16, 333, dtype=torch.float64, ignored=0.3)
    assert_results_as_accurate(x.ours(workspace=workspace), x)


CALLS = st.fixed_dictionaries(
    {
        "names": st.sampled_from(PAIRS + TRIPLES),
        "sizes": st.tuples(
            st.integers(1, 70), st.integers(1, 70), st.one_of(st.integers(1, 70), st.just(1030))
        ),
        "dtype": st.sampled_from(DTYPES),
        "logit_std": st.sampled_from([0.1, 1.0, 4.0]),
        "ignored": st.sampled_from([0.0, 0.5, 1.0]),
        "workspace": st.one_of(st.sampled_from(["min", "max", None]), st.integers(0, 1 << 20)),
        "reduction": st.sampled_from(["mean", "sum", "none"]),
        "train": st.sampled_from([(True, True), (True, False), (False, True)]),
        "seed": st.integers(0, 2**31),
    }
)


@given(CALLS)
def test_any_options_together(call: dict[str, Any]) -> None:
    more = {name: call[name] for name in ("dtype", "logit_std", "ignored", "seed")}
    x = options_case([*call["names"]], *call["sizes"], **more)
    leaves, dtype = x.leaves, call["dtype"]
    for leaf, trained in zip(leaves, call["train"], strict=False):
        leaf.requires_grad_(trained)
    options = x.with_leaves(leaves) | {"reduction": call["reduction"]}
    loss = cutefce.linear_cross_entropy(
        leaves[0], leaves[1], x.case.y, **options, workspace=call["workspace"]
    )
    trained = [leaf for leaf in leaves if leaf.requires_grad]
    upstream = x.case.upstream.to(loss.dtype) if loss.ndim else None
    got = [loss, *torch.autograd.grad(loss, trained, upstream)]
    truth = exact(x, reduction=call["reduction"])
    wanted = [
        truth[0],
        *(g for g, leaf in zip(truth[1:], leaves, strict=True) if leaf.requires_grad),
    ]
    # the rounding of logits, whose size is about 4 σ, becomes one of probabilities
    weights = x.options.get("token_weights", torch.zeros(1))
    size, cancelled = float(weights.abs().sum()), 1.0
    if call["reduction"] == "mean" and len(weights) == len(x.case.y):
        # weights of both signs, with those of classes, may nearly cancel in what "mean" divides by
        counted = weights * (x.case.y != -100)
        if "weight" in x.options:
            counted = counted * x.options["weight"][x.case.y.clamp(min=0)]
        cancelled = max(1.0, float(counted.abs().sum() / counted.sum().abs().clamp(min=1e-300)))
    for result, want in zip(got, wanted, strict=True):
        limit = 64 * torch.finfo(dtype).eps * max(1.0, call["logit_std"]) * cancelled
        limit *= 1 + size + float(want.norm())
        assert float((result.detach().double() - want).norm()) <= limit, call


@on_backends(float32=True, emulated=1, name=[*OPTIONS], layout=LAYOUTS, logit_std=[0.1, 4])
def test_every_strategy(name: str, layout: Layout, logit_std: float, backend: Backend) -> None:
    """Also on kernels, which write the same bits whatever rows hold that do not count."""
    if layout.in_chunks and name in PER_TOKEN:
        pytest.skip("no plan: tokens' factors are known after the forward")
    sizes, how = (backend.tokens, 48, 333), {"dtype": backend.dtype, "device": backend.device}
    x = options_case([name], *sizes, logit_std=logit_std, **how)
    if layout.in_chunks:
        x.case.upstream.fill_(1.0)
    got = by_layout(x, layout)
    assert_results_as_accurate(got, x, first=int(layout.in_chunks))
    if layout.in_chunks and backend.device == "cpu" and not backend.emulated:
        # losses of a sum are those of tokens, added in the same dtype
        torch.testing.assert_close(got[0], x.ours()[0].sum())
    if backend.selects:
        backend.hide_ignored(x.case)
        for a, b in zip(by_layout(x, layout), got, strict=True):
            assert torch.equal(a, b), "what ignored rows hold does not matter"


@pairwise(name=[*OPTIONS], dtype=DTYPES[1:], workspace=["max", "min", 100_000])
def test_gradients_of_sums(
    name: str, dtype: torch.dtype, workspace: int | str, small_tiles: PortableTiles, device: str
) -> None:
    """Tokens share an upstream gradient, which is applied where it costs least."""
    x = options_case([name], 150, 48, 333, dtype=dtype, device=device)
    x.case.upstream.fill_(1.0)
    got = x.ours(reduction="sum", workspace=workspace)
    torch.testing.assert_close(got[0], x.ours()[0].sum())
    assert_results_as_accurate(got, x, first=1)


FAR = {
    "one, near": (range(7, 8), 33.0),
    "one": (range(7, 8), 1e4),
    "half": (range(0, 40, 2), 110.0),
    "all": (range(40), 1e4),
}


@pairwise(
    name=[name for name in OPTIONS if name not in ("softcap", "z_loss")],
    kept=[0, 64, 112],
    far=FAR,
)
def test_rows_far_above_their_target(
    name: str, kept: int, far: tuple[range, float], small_tiles: PortableTiles, device: str
) -> None:
    """Exponentials of such rows are repaired, with the options."""
    torch.manual_seed(1)
    logits, y = torch.randn(40, 97), torch.randint(97, (40,))
    rows, height = far
    for row in rows:
        column = (int(y[row]) + 1 + row) % 97
        logits[row, column if column != y[row] else column - 1] = height
    given = options_case([name], 40, 97, 97, device=device).options
    scale = given.get("logit_scale", 1.0)
    x = OptionsCase(logits_case(logits / scale, y, device), given)
    got = by_layout(x, Layout(kept=kept))
    assert all(bool(torch.isfinite(result).all()) for result in got)
    assert_results_as_accurate(got, x, saturated=True)


@pairwise(
    train=[p for p in itertools.product([True, False], repeat=3) if any(p)],
    workspace=["max", "min", None],
    reduction=["mean", "none"],
)
def test_frozen_inputs(
    train: tuple[bool, ...], workspace: str | None, reduction: str, device: str
) -> None:
    """What is frozen has no gradient, and the others' gradients are those of all."""
    names = ["linear_bias", "label_smoothing", "logit_scale", "temperature (N,)"]
    x = options_case(names, 70, 16, 333, device=device)
    leaves = (*(leaf.requires_grad_(on) for leaf, on in zip(x.leaves, train, strict=True)),)
    options = x.with_leaves(leaves) | {"reduction": reduction, "workspace": workspace}
    loss = cutefce.linear_cross_entropy(leaves[0], leaves[1], x.case.y, **options)
    loss.backward(x.case.upstream if loss.ndim else None)
    want = exact(x, reduction=reduction)
    for leaf, on, gradient in zip(leaves, train, want[1:], strict=True):
        assert (leaf.grad is not None) == on
        if leaf.grad is not None:
            torch.testing.assert_close(leaf.grad, gradient.float())


REDUCTIONS: dict[str, dict[str, Any]] = {
    "mean": {"reduction": "mean"},
    "mean of a number": {"reduction": "mean", "denominator": 17.5},
    "mean of ()": {"reduction": "mean", "denominator": torch.tensor(17.5)},
    "mean of (1,)": {"reduction": "mean", "denominator": torch.tensor([17])},
    "sum": {"reduction": "sum"},
}


@pytest.mark.parametrize("reduction", REDUCTIONS.values(), ids=REDUCTIONS)
@each_option
def test_reductions(names: list[str], reduction: dict[str, Any], device: str) -> None:
    x = options_case(names, 70, 16, 333, dtype=torch.float64, device=device, ignored=0.3)
    want = exact(x, **reduction)
    for workspace in ("max", "min"):
        got = x.ours(**reduction, workspace=workspace)
        torch.testing.assert_close(got, want)
    with torch.no_grad():
        options = x.options | reduction
        loss = cutefce.linear_cross_entropy(x.case.h, x.case.w, x.case.y, **options)
    torch.testing.assert_close(loss, want[0])


@pytest.mark.parametrize("names", [*EACH, ["weight", "token_weights"]], ids=str)
def test_nothing_counts(names: list[str], device: str) -> None:
    """Loss and gradients are 0 if all tokens are ignored, or if there is none."""
    for tokens in (9, 0):
        x = options_case(names, tokens, 8, 40, device=device, ignored=1.0)
        for reduction in ("mean", "sum", "none"):
            for workspace in ("max", "min"):
                results = x.ours(reduction=reduction, workspace=workspace)
                assert not any(bool(result.any()) for result in results)


@pytest.mark.parametrize("workspace", ["max", "min"])
def test_tokens_of_weight_0_may_hold_anything(workspace: str, device: str) -> None:
    x = options_case(["token_weights", "z_loss"], 70, 16, 333, device=device)
    off = x.options["token_weights"] == 0
    assert bool(off.any())
    want = x.ours(workspace=workspace)
    h = torch.where(off[:, None], torch.nan, x.case.h)
    case = Case(h, x.case.w, torch.where(off, 1, x.case.y), x.case.upstream)
    loss, dx, _ = OptionsCase(case, x.options).ours(workspace=workspace)
    assert are_same(loss, want[0]) and are_same(dx, want[1]) and not dx[off].any()


@pairwise(
    workspace=["max", "min"],
    weighted=[False, True],
    smoothing=[0.0, 0.2, 1.0],
    reduction=["mean", "sum", "none"],
)
def test_as_the_cross_entropy_of_torch(
    workspace: str, weighted: bool, smoothing: float, reduction: str, device: str
) -> None:
    """Of the weights of classes, smoothing, ignored tokens and reductions together."""
    x = options_case(["weight"], 70, 16, 333, dtype=torch.float64, device=device, ignored=0)
    x.case.y[::3] = 5
    options: dict[str, Any] = {
        "weight": x.options["weight"].double() if weighted else None,
        "label_smoothing": smoothing,
        "ignore_index": 5,
        "reduction": reduction,
    }
    got = OptionsCase(x.case, options).ours(workspace=workspace)
    h, w = x.leaves
    loss = F.cross_entropy(F.linear(h, w), x.case.y, **options)
    upstream = x.case.upstream if loss.ndim else None
    torch.testing.assert_close(got, (loss.detach(), *torch.autograd.grad(loss, (h, w), upstream)))


@pytest.mark.skipif(not hasattr(F, "linear_cross_entropy"), reason="needs torch 2.13")
@pairwise(
    given=[(False, {}), (True, {"label_smoothing": 0.1}), (True, {"ignore_index": 2})],
    positions=[(), (3,), (2, 3)],
    reduction=["mean", "sum", "none"],
)
def test_as_the_linear_cross_entropy_of_torch(
    given: tuple[bool, dict[str, Any]], positions: tuple[int, ...], reduction: str, device: str
) -> None:
    """Of a bias, and of losses of K dimensions."""
    weighted, options = given
    torch.manual_seed(0)
    double: dict[str, Any] = {"dtype": torch.float64, "device": device}
    h = torch.randn(20, 8, **double).requires_grad_()
    w = torch.randn(30, *positions, 8, **double).requires_grad_()
    bias = torch.randn(30, *positions, **double).requires_grad_()
    y = torch.randint(30, (20, *positions), device=device)
    y[::4] = options.get("ignore_index", -100)
    options = options | {"reduction": reduction, "linear_bias": bias}
    if weighted:
        options["weight"] = torch.rand(30, **double)
    results = []
    for function in (cutefce.linear_cross_entropy, F.linear_cross_entropy):
        loss = function(h, w, y, **options)
        torch.manual_seed(1)
        gradients = torch.autograd.grad(loss, (h, w, bias), torch.randn_like(loss))
        results.append((loss, *gradients))
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("given", [["token_weights", "z_loss"], ["weight", "temperature (N,)"]])
def test_positions_have_their_own_factors(given: list[str], reduction: str, device: str) -> None:
    """Weights and temperatures (N, d) of tokens: as positions one after another."""
    double: dict[str, Any] = {"dtype": torch.float64, "device": device}
    torch.manual_seed(0)
    parts = [
        options_case(given, 20, 8, 30, dtype=torch.float64, device=device, seed=i) for i in range(3)
    ]
    h, w = parts[0].case.h.requires_grad_(), torch.randn(30, 3, 8, **double).requires_grad_()
    y = torch.stack([x.case.y for x in parts], 1)
    options = dict(parts[0].options)
    for name in ("token_weights", "temperature"):
        if name in options:
            options[name] = torch.stack([x.options[name] for x in parts], 1)
    loss = cutefce.linear_cross_entropy(h, w, y, reduction=reduction, **options)
    flat = {
        n: v.flatten() if n in ("token_weights", "temperature") else v for n, v in options.items()
    }
    logits = torch.einsum("nd,vkd->nkv", h, w).flatten(0, 1)
    want = losses_of_logits(
        model_logits(logits, **flat), y.flatten(), reduction=reduction, **flat
    ).reshape(loss.shape)
    torch.testing.assert_close(loss, want)
    upstream = torch.randn_like(want)
    torch.testing.assert_close(
        torch.autograd.grad(loss, (h, w), upstream), torch.autograd.grad(want, (h, w), upstream)
    )


def test_leading_shapes(device: str) -> None:
    """Values of tokens have the shape of target."""
    names = ["token_weights", "temperature (N,)", "linear_bias"]
    x = options_case(names, 60, 16, 100, device=device)
    want = x.ours()
    shaped = {
        name: x.options[name].reshape(3, 4, 5) for name in ("token_weights", "temperature")
    } | {"linear_bias": x.options["linear_bias"]}
    case = Case(
        x.case.h.reshape(3, 4, 5, 16),
        x.case.w,
        x.case.y.reshape(3, 4, 5),
        x.case.upstream.reshape(3, 4, 5),
    )
    got = OptionsCase(case, shaped).ours()
    for a, b in zip(got, want, strict=True):
        assert are_same(a.reshape(b.shape), b)


@pytest.mark.parametrize("bias_dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_bias_of_another_dtype(dtype: torch.dtype, bias_dtype: torch.dtype, device: str) -> None:
    x = options_case(["linear_bias"], 70, 16, 333, dtype=dtype, device=device)
    x.options["linear_bias"] = x.options["linear_bias"].to(bias_dtype)
    got = x.ours()
    assert got[3].dtype == bias_dtype
    assert_results_as_accurate(got, x)


@each_option
def test_neutral_values_change_nothing(names: list[str], device: str) -> None:
    """An option at the value that does nothing, beside none."""
    plain = options_case([], 70, 16, 333, device=device)
    neutral: dict[str, Any] = {
        "linear_bias": torch.zeros(333, device=device),
        "weight": torch.ones(333, device=device),
        "token_weights": torch.ones(70, device=device),
        "label_smoothing": 0.0,
        "z_loss": 0.0,
        "logit_scale": 1.0,
        "softcap": None,
        "temperature": 1.0,
    }
    given = {name: neutral[name] for name in OPTIONS[names[0]]}
    got = OptionsCase(plain.case, given).ours()
    for a, b in zip(got, plain.ours(), strict=False):
        if isinstance(next(iter(given.values())), Tensor):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
        else:
            assert are_same(a, b)


def module_case(**options: Any) -> tuple[cutefce.LinearCrossEntropyLoss, Tensor, Tensor]:
    torch.manual_seed(0)
    head = cutefce.LinearCrossEntropyLoss(8, 30, dtype=torch.float64, **options)
    positions = head.out_features
    y = torch.randint(30, (20, *positions))
    return head, torch.randn(20, 8, dtype=torch.float64), y


@pytest.mark.parametrize(
    "options",
    [
        {"bias": True},
        {"bias": True, "out_features": (2, 3)},
        {"weight": torch.rand(30), "label_smoothing": 0.1},
        {"bias": True, "z_loss": 1e-3, "logit_scale": 0.5, "softcap": 3.0},
    ],
    ids=["bias", "bias, K dimensions", "weight and smoothing", "bias and numbers"],
)
def test_modules_take_the_options(options: dict[str, Any]) -> None:
    head, h, y = module_case(**options)
    names = "weight", "label_smoothing", "z_loss", "logit_scale", "softcap"
    given = {name: options[name] for name in names if name in options}
    shape = 30, *head.out_features
    bias = head.linear.bias
    want = cutefce.linear_cross_entropy(
        h,
        head.linear.weight.reshape(*shape, 8),
        y,
        linear_bias=None if bias is None else bias.reshape(shape),
        **given,
    )
    got = head(h, y)
    assert torch.equal(got, want)
    gradients = torch.autograd.grad(got, [*head.parameters()])
    assert all(
        torch.equal(a, b)
        for a, b in zip(gradients, torch.autograd.grad(want, [*head.parameters()]), strict=True)
    )


@pytest.mark.skipif(not hasattr(torch.nn, "LinearCrossEntropyLoss"), reason="needs torch 2.13")
@pytest.mark.parametrize("options", [{"bias": True}, {"bias": True, "out_features": (2,)}], ids=str)
def test_modules_exchange_state_with_torch(options: dict[str, Any]) -> None:
    head, h, y = module_case(**options, weight=torch.rand(30, dtype=torch.float64))
    other = torch.nn.LinearCrossEntropyLoss(
        8, 30, dtype=torch.float64, weight=torch.ones(30, dtype=torch.float64), **options
    )
    other.load_state_dict(head.state_dict())
    torch.testing.assert_close(head(h, y), other(h, y))


def test_factors_of_one_call(device: str) -> None:
    """Token weights and temperatures given to a module's call."""
    head, h, y = module_case()
    head.to(device)
    h, y = h.to(device), y.to(device)
    factors = torch.rand(20, device=device) + 0.5
    got = head(h, y, token_weights=factors, temperature=factors)
    want = cutefce.linear_cross_entropy(
        h, head.linear.weight, y, token_weights=factors, temperature=factors
    )
    assert are_same(got, want)


def test_a_mean_over_weights_that_add_up_to_0_is_not_0(device: str) -> None:
    """Only that over no token is."""
    case = random_case(6, 8, 20, device=device, ignored=0)
    weights = torch.tensor([1.0, -1.0] * 3, device=device)
    loss = cutefce.linear_cross_entropy(case.h, case.w, case.y, token_weights=weights)
    assert not loss.isfinite()
    ignored = torch.full_like(case.y, -100)
    assert cutefce.linear_cross_entropy(case.h, case.w, ignored, token_weights=weights) == 0
