"""Losses of every option and kind of target: as accurate as the unfused form, and as torch's."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

import cutefce
from cutefce.cute_kernels.config import PortableTiles
from tests.support.backends import Backend, on_backends
from tests.support.layouts import LAYOUTS, Layout, can_store, pinned, tiles_of
from tests.support.non_finite import FEW, ROW, assert_no_healthier, assert_same_kind, broken_case
from tests.support.non_finite import names as broken_names
from tests.support.options import (
    LOSSES,
    OPTIONS,
    PER_TOKEN,
    REFUSED_PAIR,
    TARGETS,
    TOGETHER,
    OptionsCase,
    assert_results_as_accurate,
    exact,
    losses_of_logits,
    model_logits,
    options_case,
)
from tests.support.reference import Case, are_same, logits_case
from tests.support.tiers import pairwise, pairwise_of, rest_slow

Make = Callable[..., OptionsCase]
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
WORKSPACES: list[int | str | None] = ["max", "min", 100_000, None]
REDUCTIONS: dict[str, dict[str, Any]] = {
    "none": {"reduction": "none"},
    "sum": {"reduction": "sum"},
    "mean": {"reduction": "mean"},
    "mean of a number": {"reduction": "mean", "denominator": 17.5},
    "mean of ()": {"reduction": "mean", "denominator": torch.tensor(17.5)},
    "mean of integers (1,)": {"reduction": "mean", "denominator": torch.tensor([17])},
}


def with_nan(x: OptionsCase) -> OptionsCase:
    """Return a case whose tokens are NaN where they reach nothing."""
    h = torch.where(x.ignored[:, None], torch.nan, x.case.h)
    return OptionsCase(Case(h, x.case.w, x.case.y, x.case.upstream), x.options)


@pairwise(make=LOSSES, dtype=DTYPES, workspace=WORKSPACES, reduction=REDUCTIONS)
def test_each_loss(
    make: Make,
    dtype: torch.dtype,
    workspace: int | str | None,
    reduction: dict[str, Any],
    small_tiles: PortableTiles,
    device: str,
    request: pytest.FixtureRequest,
) -> None:
    """All backwards and calls have the same bits, and tokens that do not count may be NaN."""
    x = make(*tiles_of(request, device), dtype=dtype, device=device, ignored=0.2)
    options = {"workspace": workspace, **reduction}
    got = x.ours(**options, backwards=2)
    assert_results_as_accurate(got, x, **reduction)
    assert not got[1][x.ignored].any()
    assert all(map(are_same, got, x.ours(**options)))
    if device == "cpu":  # where such rows may be computed unless they are NaN
        for a, b in zip(with_nan(x).ours(**options), got, strict=True):
            assert float((a - b).norm()) <= 4 * torch.finfo(dtype).eps * float(b.norm())
    with torch.no_grad():
        torch.testing.assert_close(x.loss(x.leaves, **reduction), got[0])


IN_LAYOUTS = {
    name: make
    for name, make in LOSSES.items()
    if "probabilities" not in name and name != "soft targets, smoothing and all factors"
}


@on_backends(float32=True, emulated=2, name=[*IN_LAYOUTS], layout=LAYOUTS, logit_std=[0.1, 4, 40])
def test_every_layout(name: str, layout: Layout, logit_std: float, backend: Backend) -> None:
    """Also on kernels, which write the same bits whatever rows hold that do not count."""
    if layout.in_chunks and name in PER_TOKEN:
        pytest.skip("no plan: tokens' factors are known after the forward")
    how: dict[str, Any] = {"dtype": backend.dtype, "device": backend.device}
    ignored = 0.5 if backend.emulated else 0.1
    x = IN_LAYOUTS[name](backend.tokens, 48, 333, logit_std=logit_std, ignored=ignored, **how)
    with pinned(layout):
        got = x.ours(reduction=layout.reduction, backwards=2)
    assert_results_as_accurate(got, x, reduction=layout.reduction)
    if backend.selects:
        backend.hide(x.case.h, x.ignored)
        with pinned(layout):
            again = x.ours(reduction=layout.reduction)
        assert all(map(torch.equal, again, got)), "what ignored rows hold does not matter"


def are_served(names: tuple[str, ...]) -> bool:
    """Whether options can be given together, which name different arguments."""
    arguments = [argument for name in names for argument in OPTIONS[name]]
    return len(set(arguments)) == len(arguments) and not set(names) >= REFUSED_PAIR


FEW_OPTIONS = [
    [*names] for n in range(4) for names in itertools.combinations(OPTIONS, n) if are_served(names)
]
SIZE = st.integers(1, 70)
CALLS = st.fixed_dictionaries(
    {
        "make": st.sampled_from([*TARGETS.values()]),
        "names": st.sampled_from(FEW_OPTIONS),
        "sizes": st.tuples(
            st.integers(0, 70), SIZE, st.one_of(SIZE, st.sampled_from([1030, 4097]))
        ),
        "dtype": st.sampled_from(DTYPES),
        "logit_std": st.sampled_from([0.1, 1.0, 4.0]),
        "ignored": st.sampled_from([0.0, 0.5, 1.0]),
        "ignore_index": st.sampled_from([-100, 0, 2**40]),
        "workspace": st.one_of(st.sampled_from(["min", "max", None]), st.integers(0, 1 << 20)),
        "reduction": st.sampled_from(["mean", "sum", "none"]),
        "trained": st.sampled_from([(True, True, True), (True, False), (False, True)]),
        "transposed": st.booleans(),
        "layout": st.sampled_from([*LAYOUTS.values()]),
        "seed": st.integers(0, 2**31),
    }
)


@given(CALLS)
def test_any_call(small_tiles: PortableTiles, call: dict[str, Any]) -> None:
    """As it is planned, or in any layout that serves it."""
    more = {name: call[name] for name in ("dtype", "logit_std", "ignored", "seed")}
    x: OptionsCase = call["make"](call["names"], *call["sizes"], **more)
    case = x.case
    y = torch.where(case.y == -100, call["ignore_index"], case.y)
    w = case.w.t().contiguous().t() if call["transposed"] else case.w
    x = OptionsCase(Case(case.h, w, y, case.upstream), x.options)
    options = {name: call[name] for name in ("reduction", "ignore_index")}
    if call["make"] is not options_case:
        options["ignore_index"] = -100
    layout: Layout = call["layout"]
    is_scalar = call["reduction"] != "none" and not {*call["names"]} & {*PER_TOKEN}
    serves = (is_scalar or not layout.in_chunks) and (can_store(call["dtype"]) or not layout.stores)
    with pinned(layout if serves else None):
        got = x.ours(**options, workspace=call["workspace"], trained=call["trained"])
    truth = exact(x, **options)
    # the rounding of logits, whose size is about 4 σ, becomes one of probabilities
    weights = x.options.get("token_weights", torch.zeros(1))
    size, cancelled = float(weights.abs().sum()), 1.0
    if call["reduction"] == "mean":
        # weights of both signs, with those of classes, may nearly cancel in what "mean" divides by
        terms = exact(x, **options | {"reduction": "none"})[0]
        cancelled = max(1.0, float(truth[0].abs() / terms.sum().abs().clamp(min=1e-300)))
        cancelled *= 1 + float(terms.abs().sum())
    wanted = [leaf for leaf, on in zip(truth[1:], (*call["trained"], True), strict=False) if on]
    for result, want in zip(got, (truth[0], *wanted), strict=True):
        limit = 64 * torch.finfo(x.case.h.dtype).eps * max(1.0, call["logit_std"]) * cancelled
        limit *= 1 + size + float(want.norm())
        assert float((result.double() - want).norm()) <= limit, call


@pairwise(
    trained=[p for p in itertools.product([True, False], repeat=3) if any(p)],
    make=TARGETS,
    workspace=["max", "min"],
    reduction=["mean", "none"],
)
def test_frozen_inputs(
    trained: tuple[bool, ...], make: Make, workspace: str, reduction: str, device: str
) -> None:
    """The gradients of the others are those of all."""
    names = ["linear_bias", "label_smoothing", "logit_scale", "temperature (N,)"]
    x = make(names, 70, 16, 333, dtype=torch.float64, device=device)
    got = x.ours(reduction=reduction, workspace=workspace, trained=trained)
    loss, *gradients = exact(x, reduction=reduction)
    wanted = [gradient for gradient, on in zip(gradients, trained, strict=True) if on]
    torch.testing.assert_close(got, (loss, *wanted))


@pairwise(
    make=LOSSES,
    tokens=[0, 1, 9],
    dtype=DTYPES[1:],
    reduction=["mean", "sum", "none"],
    workspace=WORKSPACES,
)
def test_nothing_counts(
    make: Make,
    tokens: int,
    dtype: torch.dtype,
    reduction: str,
    workspace: int | str | None,
    device: str,
) -> None:
    """Loss and gradients are 0 if all tokens are ignored, or if there is none."""
    x = make(tokens, 8, 40, dtype=dtype, device=device, ignored=1.0)
    if "target_probs" in x.options:
        x.options["target_probs"].zero_()
    if "target" in x.options:
        x.options["token_weights"] = torch.zeros(tokens, device=device)
    results = x.ours(reduction=reduction, workspace=workspace)
    assert not any(bool(result.any()) for result in results)
    for gradient, leaf in zip(results[1:], x.leaves, strict=True):
        assert gradient.shape == leaf.shape
    if reduction == "mean" and "target" not in x.options:
        assert not x.ours(reduction=reduction, denominator=0)[0]


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
    with pinned(Layout(kept=kept)):
        got = x.ours()
    assert all(bool(torch.isfinite(result).all()) for result in got)
    assert_results_as_accurate(got, x, saturated=True)


@pairwise_of(
    {"name": FEW},
    names={name: [name] for name in OPTIONS} | TOGETHER,
    name=sorted(broken_names(torch.float32)),
    workspace=["min", 200_000, "max"],
)
def test_non_finite_inputs_end_as_those_of_torch(
    names: list[str], name: str, workspace: int | str, small_tiles: PortableTiles
) -> None:
    """Losses have torch's kind, gradients are finite nowhere where torch's are not.

    Smoothed losses, of sums over all classes, are not finite where torch's are not, but may be NaN
    for inf; where logits are near the largest number, torch's sums overflow and ours need not.
    """
    case = broken_case(name, torch.float32)
    x = OptionsCase(case, options_case(names, 150, 48, 333).options)
    if "token_weights" in x.options:
        x.options["token_weights"][ROW] = 0.7
    leaves = x.leaves
    options = x.with_leaves(leaves)
    losses = losses_of_logits(x.logits(leaves), case.y, **options)
    wanted = torch.autograd.grad(losses, leaves, case.upstream)
    want, counts = losses.detach(), options.get("token_weights", torch.ones(150)) != 0
    loss, *gradients = x.ours(workspace=workspace)
    if "label_smoothing" not in options:
        assert_same_kind(loss, want)
    else:
        assert torch.equal(loss.isfinite(), want.isfinite()) or "near the" in name
        torch.testing.assert_close(loss[want.isfinite()], want[want.isfinite()])
    for gradient, other in zip(gradients, wanted, strict=True):
        rows = counts if gradient is gradients[0] else slice(None)
        assert_no_healthier(gradient[rows], other[rows])
    # 0 times what is not finite, in torch
    assert not gradients[0][~counts].any()


@pairwise(
    workspace=["max", "min"],
    weighted=[False, True],
    smoothing=[0.0, 0.2, 1.0],
    reduction=["mean", "sum", "none"],
    ignore_index=[5, -100, -1, 10**6],
)
def test_as_the_cross_entropy_of_torch(
    workspace: str, weighted: bool, smoothing: float, reduction: str, ignore_index: int, device: str
) -> None:
    """Of the weights of classes, smoothing, ignored tokens and reductions together."""
    x = options_case(["weight"], 70, 16, 333, dtype=torch.float64, device=device, ignored=0)
    x.case.y[::3] = ignore_index
    options: dict[str, Any] = {
        "weight": x.options["weight"].double() if weighted else None,
        "label_smoothing": smoothing,
        "ignore_index": ignore_index,
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


@pytest.mark.parametrize("options", [(), ("weight",)])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.uint32], ids=str)
def test_positions_of_any_integer_dtype(
    dtype: torch.dtype, options: tuple[str, ...], device: str
) -> None:
    """Of classes too that have the bits of the ignored index in fewer ones."""
    h, w = torch.randn(6, 8, device=device), torch.randn(200, 3, 8, device=device)
    y = torch.full((6, 3), -100 % 256, device=device)
    y[0] = torch.tensor([3, 199, 0])
    weight = torch.rand(200, device=device) if options else None
    want = cutefce.linear_cross_entropy(h, w, y, weight=weight)
    assert torch.equal(cutefce.linear_cross_entropy(h, w, y.to(dtype), weight=weight), want)


@pytest.mark.parametrize("workspace", ["min", "max"])
@pytest.mark.parametrize("kind", ["classes", "soft targets", "probabilities", "positions"])
def test_a_mean_over_weights_that_add_up_to_0_is_that_of_torch(
    kind: str, workspace: str, device: str
) -> None:
    """The losses' sum over 0.  Over no token it is 0."""
    torch.manual_seed(0)
    double: dict[str, Any] = {"dtype": torch.float64, "device": device}
    sizes = (2,) if kind == "positions" else ()
    h = torch.randn(4, 8, **double).requires_grad_()
    w = torch.randn(12, *sizes, 8, **double).requires_grad_()
    signs = torch.tensor([1.0, -1.0, 2.0, -2.0], **double)
    y, probs = torch.arange(4, device=device), torch.rand(4, 12, **double)
    if sizes:  # whose sums have both signs
        signs, y = torch.stack([signs, -signs], 1), torch.stack([y, y], 1)
    more: dict[str, Any] = {"workspace": workspace}
    if kind in ("probabilities", "soft targets"):
        y = probs
    losses = F.cross_entropy(torch.einsum("nd,v...d->nv...", h, w), y, reduction="none")
    want = (signs * losses).sum() / signs.sum()
    if kind == "soft targets":
        indices = torch.arange(12, device=device).expand(4, 12)
        more |= {"target_indices": indices, "target_probs": probs}
    target = None if kind == "soft targets" else y
    loss = cutefce.linear_cross_entropy(h, w, target, token_weights=signs, **more)
    assert loss == want and want.isinf()
    assert not any(x.isfinite().any() for x in torch.autograd.grad(loss, (h, w)))
    nothing = torch.zeros_like(signs)
    loss = cutefce.linear_cross_entropy(h, w, target, token_weights=nothing, **more)
    assert loss == 0 and not any(x.any() for x in torch.autograd.grad(loss, (h, w)))


@pytest.mark.parametrize("sizes", [(), (2,)])
def test_a_mean_over_weights_of_classes_is_that_of_torch(
    sizes: tuple[int, ...], device: str
) -> None:
    """Where they add up to 0, too; it is NaN where the losses do so as well."""
    torch.manual_seed(0)
    double: dict[str, Any] = {"dtype": torch.float64, "device": device}
    h, w = torch.randn(4, 8, **double), torch.randn(5, *sizes, 8, **double)
    y = torch.arange(4, device=device)
    y = y[:, None].expand(4, *sizes) if sizes else y
    for weights in ([1, -1, 2, -2, 5], [0] * 5, [1, -1, 2, -3, 5]):
        weight = torch.tensor(weights, **double)
        want = F.cross_entropy(torch.einsum("nd,v...d->nv...", h, w), y, weight)
        loss = cutefce.linear_cross_entropy(h, w, y, weight=weight)
        torch.testing.assert_close(loss, want, equal_nan=True)


@pytest.mark.parametrize("workspace", ["min", "max"])
def test_one_token_has_the_values_of_a_row(workspace: str, device: str) -> None:
    """Its values () are those of a call of one row (1,)."""
    half, floor = torch.tensor(0.5, device=device), torch.tensor(-1.0, device=device)
    h, w = torch.randn(64, device=device), torch.randn(16, 64, device=device)
    y = torch.tensor(3, device=device)
    for function, name, value in (
        (cutefce.linear_cross_entropy, "token_weights", half),
        (lambda *x, **k: cutefce.linear_log_probs(*x, **k).log_probs, "logit_floor", floor),
    ):
        results = []
        for shape in ((), (1,)):
            own, heads = h.expand(*shape, 64).clone().requires_grad_(), w.clone().requires_grad_()
            more: dict[str, Any] = {name: value.expand(shape), "workspace": workspace}
            result = function(own, heads, y.expand(shape), **more).sum()
            results.append((result, *torch.autograd.grad(result, (own, heads))))
        (one, of_h, of_w), (row, *gradients) = results
        assert torch.equal(one, row) and torch.equal(of_h[None], gradients[0])
        assert torch.equal(of_w, gradients[1])


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


@pytest.mark.parametrize("options", [{"bias": True}, {"bias": True, "out_features": (2,)}], ids=str)
def test_modules_are_those_of_torch(options: dict[str, Any]) -> None:
    """They take options as calls do, and exchange state with torch's."""
    torch.manual_seed(0)
    more: dict[str, Any] = {"dtype": torch.float64, **options}
    head = cutefce.LinearCrossEntropyLoss(8, 30, weight=torch.rand(30).double(), **more)
    h = torch.randn(20, 8, dtype=torch.float64)
    y = torch.randint(30, (20, *head.out_features))
    factors = torch.rand(20, 1).expand(20, *head.out_features) if y.ndim > 1 else torch.rand(20)
    given: dict[str, Any] = {"token_weights": factors, "temperature": factors + 0.5}
    shape = 30, *head.out_features
    want = cutefce.linear_cross_entropy(
        h,
        head.linear.weight.reshape(*shape, 8),
        y,
        linear_bias=head.linear.bias.reshape(shape),
        weight=head.weight,
        **given,
    )
    assert torch.equal(head(h, y, **given), want)
    if hasattr(torch.nn, "LinearCrossEntropyLoss"):
        other = torch.nn.LinearCrossEntropyLoss(8, 30, weight=torch.ones(30).double(), **more)
        other.load_state_dict(head.state_dict())
        torch.testing.assert_close(head(h, y), other(h, y))


def test_a_module_shows_its_options() -> None:
    module = cutefce.LinearCrossEntropyLoss(8, 50, out_features=(3, 2), softcap=30.0, z_loss=0.1)
    for shown in ("softcap=30.0", "z_loss=0.1", "num_classes=50"):
        assert shown in repr(module)
    assert "logit_scale" not in repr(module)


MOST = {name: make for name, make in LOSSES.items() if "factors" in name}


# one of each schema is not slow: of a number of bytes, and of a name
@pytest.mark.parametrize("make", rest_slow(MOST | LOSSES, default=3))
@pytest.mark.parametrize("workspace", rest_slow(["min", None, "max"], default=2))
def test_opcheck(make: Make, workspace: str | None, device: str) -> None:
    x = make(20, 8, 50, device=device)
    leaves = x.leaves
    overload = torch.ops.cutefce.loss.default
    if isinstance(workspace, str):
        overload = torch.ops.cutefce.loss.preset
    options = {"workspace": workspace, **x.with_leaves(leaves)}
    if "temperature" in options:
        options["temperature"] = torch.as_tensor(options["temperature"], device=device)
    target = options.pop("target", None if "target_indices" in options else x.case.y)
    torch.library.opcheck(overload, (leaves[0], leaves[1], target), options)


@pytest.mark.parametrize("make", rest_slow(MOST | {"plain": LOSSES["plain"]}, default=2))
def test_gradcheck(make: Make, device: str) -> None:
    x = make(6, 4, 11, dtype=torch.float64, device=device)
    assert torch.autograd.gradcheck(lambda *leaves: x.loss(leaves), x.leaves)
