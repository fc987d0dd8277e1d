"""Log-probabilities and other values of tokens: as accurate as from all logits."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import cutefce
from cutefce.cute_kernels.config import PortableTiles
from tests.support.backends import Backend, on_backends
from tests.support.layouts import WINDOWS, Layout, pinned
from tests.support.options import OptionsCase, model_logits, options_case, row_values
from tests.support.reference import are_same, logits_case
from tests.support.tiers import pairwise

OUTPUTS = "lse", "entropy", "sum_p_squared", "mean_logit", "is_top1", "argmax"
DIFFERENTIABLE = "log_probs", "lse", "entropy"
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
TRANSFORMS: dict[str, list[str]] = {
    "plain": [],
    "linear_bias": ["linear_bias"],
    "logit_scale": ["logit_scale"],
    "negative logit_scale": ["negative logit_scale"],
    "temperature": ["temperature"],
    "temperature (N,)": ["temperature (N,)"],
    "softcap": ["softcap"],
    "all but softcap": ["linear_bias", "logit_scale", "temperature (N,)"],
    "all": ["linear_bias", "logit_scale", "temperature (N,)", "softcap"],
}


def served(outputs: tuple[str, ...], options: dict[str, Any]) -> tuple[str, ...]:
    return tuple(name for name in outputs if name != "mean_logit" or "softcap" not in options)


def upstreams(x: OptionsCase, outputs: tuple[str, ...]) -> dict[str, Tensor]:
    """Return random upstream gradients of what has gradients."""
    torch.manual_seed(7)
    names = [name for name in DIFFERENTIABLE if name in ("log_probs", *outputs)]
    if "softcap" in x.options and "entropy" in names:
        names.remove("entropy")
    tokens, device = len(x.case.y), x.case.h.device
    return {name: torch.randn(tokens, dtype=torch.float64).to(device) for name in names}


def ours(
    x: OptionsCase, outputs: tuple[str, ...], workspace: int | str | None = None
) -> tuple[Any, tuple[Tensor, ...]]:
    """Return values and gradients; the second backward has equal bits, but for what a GPU compiles.

    There, on the portable path, its forward may run on kernels that the first forward has compiled.
    """
    leaves = x.leaves
    values = cutefce.linear_log_probs(
        leaves[0],
        leaves[1],
        x.case.y,
        outputs=outputs,
        workspace=workspace,
        **x.with_leaves(leaves),
    )
    given = upstreams(x, outputs)
    tensors = [getattr(values, name) for name in given]
    dtype = torch.promote_types(x.case.h.dtype, torch.float32)
    more: dict[str, Any] = {"grad_outputs": [up.to(dtype) for up in given.values()]}
    gradients = torch.autograd.grad(tensors, leaves, **more, retain_graph=True)
    again = torch.autograd.grad(tensors, leaves, **more)
    is_portable = x.case.h.is_cuda and x.case.h.dtype.itemsize > 2
    rounding = 8 * torch.finfo(x.case.h.dtype).eps if is_portable else 0
    for a, b in zip(gradients, again, strict=True):
        size = float(b.abs().max()) if b.numel() else 0.0
        torch.testing.assert_close(a, b, rtol=rounding, atol=rounding * size)
    return values, gradients


def of_products(
    x: OptionsCase, outputs: tuple[str, ...], t: Tensor, leaves: tuple[Tensor, ...]
) -> tuple[Any, tuple[Tensor, ...]]:
    """Return values of products t (N, V), and their gradients by `leaves`."""
    options = {name: value for name, value in x.with_leaves(leaves[-3:]).items()}
    values = row_values(model_logits(t, **options), x.case.y)
    given = upstreams(x, outputs)
    total = sum((getattr(values, name) * up.to(t.dtype)).sum() for name, up in given.items())
    assert isinstance(total, Tensor)
    return values, torch.autograd.grad(total, leaves)


def exact(x: OptionsCase, outputs: tuple[str, ...]) -> tuple[Any, tuple[Tensor, ...]]:
    leaves = (*(leaf.detach().double().requires_grad_() for leaf in x.leaves),)
    return of_products(x, outputs, leaves[0] @ leaves[1].t(), leaves)


def unfused(x: OptionsCase, outputs: tuple[str, ...]) -> tuple[Any, tuple[Tensor, ...]]:
    """Return them with products, and their gradients, rounded to the inputs' dtype."""
    h, w, dtype = x.case.h, x.case.w, x.case.h.dtype
    wide = torch.promote_types(dtype, torch.float32)
    t = (h @ w.t()).to(wide).requires_grad_()
    options = dict(x.options)
    values = row_values(model_logits(t, **options), x.case.y)
    given = upstreams(x, outputs)
    total = sum((getattr(values, name) * up.to(wide)).sum() for name, up in given.items())
    assert isinstance(total, Tensor)
    dt = torch.autograd.grad(total, t)[0].to(dtype)
    gradients = [dt @ w, dt.t() @ h]
    if "linear_bias" in options:
        sums = dt.to(wide).sum(0) / options.get("logit_scale", 1.0)
        gradients.append(sums.to(options["linear_bias"].dtype))
    return values, (*gradients,)


def assert_as_accurate(x: OptionsCase, outputs: tuple[str, ...], got: Any) -> None:
    """Assert that errors against float64 are at most those of the unfused form and a rounding."""
    (values, gradients), (truth, wanted), (other, others) = (
        got,
        exact(x, outputs),
        unfused(x, outputs),
    )
    dtype = x.case.h.dtype
    eps, narrow = torch.finfo(dtype).eps, dtype.itemsize == 2
    pairs = [
        (name, getattr(values, name), getattr(truth, name), getattr(other, name))
        for name in ("log_probs", *outputs)
        if name not in ("is_top1", "argmax")
    ]
    names = "dx", "dw", "dbias"
    pairs += list(zip(names, gradients, wanted, others, strict=False))
    for name, result, want, beside in pairs:
        want = want.detach()
        error = float((result.detach().double() - want).norm())
        cancels = 0.0
        if "entropy" in outputs and name in names:
            # log p is a difference of logits of this size, a rounding of which is not relative
            u = model_logits(x.case.h.double() @ x.case.w.double().t(), **x.options)
            cancels = float(u.abs().max())
        if dtype == torch.float64:
            allowed = 64 * eps * (1 + cancels + float(want.norm()))
        else:
            distance = float((beside.detach().double() - want).norm())
            allowed = (1.05 if narrow else 2) * distance
            if not (narrow and name in names):
                # values are float32, of a few roundings of the log-sum-exp
                allowed += 4 * torch.finfo(torch.float32).eps * (1 + float(want.norm()))
            if not narrow:
                allowed += cancels * eps / 2 * float(want.norm())
        assert error <= allowed, f"{name}: error {error:.3g}, allowed {allowed:.3g}"
    assert_largest(x, values)


def assert_largest(x: OptionsCase, values: Any) -> None:
    """Assert that the class of the largest logit is right where float32 logits can tell."""
    h, w = x.case.h.double(), x.case.w.double()
    u, active = model_logits(h @ w.t(), **x.options), x.case.y != -100
    wide = torch.promote_types(x.case.h.dtype, torch.float32)
    margin = 64 * torch.finfo(wide).eps * float(u.abs().max())
    largest, index = u.amax(1), torch.where(active, x.case.y, 0)
    own = u.gather(1, index[:, None])[:, 0]
    if values.argmax is not None:
        found = u.gather(1, values.argmax[:, None])[:, 0]
        assert values.argmax.dtype == torch.long
        assert bool((found >= largest - margin)[active].all())
        assert not values.argmax[~active].any()
    if values.is_top1 is not None:
        assert values.is_top1.dtype == torch.bool
        second = u.scatter(1, index[:, None], -torch.inf).amax(1)
        clear = active & ((own - second).abs() > margin)
        assert torch.equal(values.is_top1[clear], (own >= largest)[clear])
        assert not values.is_top1[~active].any()
        if values.argmax is not None:
            assert torch.equal(values.is_top1 & active, (values.argmax == x.case.y) & active)


def with_hits(x: OptionsCase) -> OptionsCase:
    """Make half of the targets those of the largest logits."""
    u = model_logits(x.case.h.double() @ x.case.w.double().t(), **x.options)
    x.case.y[::2] = torch.where(x.case.y[::2] == -100, -100, u.argmax(1)[::2])
    return x


@pairwise(names=TRANSFORMS, dtype=DTYPES, workspace=["max", "min", 200_000])
def test_all_outputs(
    names: list[str],
    dtype: torch.dtype,
    workspace: int | str,
    small_tiles: PortableTiles,
    device: str,
) -> None:
    x = with_hits(options_case(names, 150, 48, 333, dtype=dtype, device=device))
    outputs = served(OUTPUTS, x.options)
    assert_as_accurate(x, outputs, ours(x, outputs, workspace))


@pytest.mark.compiled_rows
@pairwise(
    outputs=[(), *((name,) for name in OUTPUTS)],
    names=[[], ["linear_bias", "temperature (N,)"]],
    dtype=[torch.float64, torch.bfloat16],
)
def test_each_output(
    names: list[str], outputs: tuple[str, ...], dtype: torch.dtype, device: str
) -> None:
    x = with_hits(options_case(names, 70, 64, 333, dtype=dtype, device=device))
    for workspace in ("max", "min"):
        values, gradients = ours(x, outputs, workspace)
        assert_as_accurate(x, outputs, (values, gradients))
        asked = {name for name in OUTPUTS if getattr(values, name) is not None}
        assert asked == set(outputs)


@on_backends(
    float32=True,
    layout=WINDOWS,
    names=[[], TRANSFORMS["all but softcap"], TRANSFORMS["all"]],
    outputs=[("lse",), ("entropy",), OUTPUTS],
)
def test_every_layout(
    layout: Layout, names: list[str], outputs: tuple[str, ...], backend: Backend
) -> None:
    how: dict[str, Any] = {"dtype": backend.dtype, "device": backend.device}
    x = with_hits(options_case(names, 150, 48, 333, **how))
    some = served(outputs, x.options)
    with pinned(layout):
        got = ours(x, some)
    assert_as_accurate(x, some, got)


CALLS = st.fixed_dictionaries(
    {
        "names": st.sampled_from(list(TRANSFORMS.values())),
        "outputs": st.sets(st.sampled_from(OUTPUTS)),
        "sizes": st.tuples(
            st.integers(1, 70), st.integers(1, 70), st.one_of(st.integers(1, 70), st.just(1030))
        ),
        "ignored": st.sampled_from([0.0, 0.5, 1.0]),
        "workspace": st.one_of(st.sampled_from(["min", "max", None]), st.integers(0, 1 << 20)),
        "seed": st.integers(0, 2**31),
    }
)


@given(CALLS)
def test_any_call(call: dict[str, Any]) -> None:
    more = {name: call[name] for name in ("ignored", "seed")}
    x = options_case(call["names"], *call["sizes"], dtype=torch.float64, **more)
    outputs = served((*call["outputs"],), x.options)
    assert_as_accurate(x, outputs, ours(x, outputs, call["workspace"]))


@pairwise(
    height=[33.0, 110.0, 1e4], dtype=[torch.float32, torch.bfloat16], workspace=["max", "min"]
)
def test_rows_far_above_their_target(
    workspace: str, dtype: torch.dtype, height: float, small_tiles: PortableTiles, device: str
) -> None:
    torch.manual_seed(1)
    logits, y = torch.randn(40, 97).to(dtype), torch.randint(97, (40,))
    for row in range(0, 40, 2):
        column = (int(y[row]) + 1 + row) % 97
        logits[row, column if column != y[row] else column - 1] = height
    x = OptionsCase(logits_case(logits, y, device), {})
    values, gradients = ours(x, OUTPUTS, workspace)
    truth, wanted = exact(x, OUTPUTS)
    for name in ("log_probs", "lse", "entropy", "sum_p_squared", "mean_logit"):
        got, want = getattr(values, name), getattr(truth, name)
        torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)
    assert torch.equal(values.argmax, truth.argmax)
    assert torch.equal(values.is_top1, truth.is_top1)
    for got, want in zip(gradients, wanted, strict=True):
        assert bool(got.isfinite().all())
        error = float((got.double() - want).norm() / want.norm())
        # of stored exponentials and rounded results, and of the rounding of a logit's distance
        limit = 2 * torch.finfo(dtype).eps + height / 2 * torch.finfo(torch.float32).eps
        assert error <= limit


def test_equal_logits_have_the_lowest_class_or_the_target(device: str) -> None:
    logits = torch.zeros(4, 70)
    logits[1, [9, 40]] = 2.0
    logits[2, [9, 40]] = 2.0
    case = logits_case(logits, torch.tensor([69, 40, 3, -100]), device)
    values = cutefce.linear_log_probs(
        case.h, case.w, case.y, outputs=("is_top1", "argmax"), workspace="min"
    )
    assert values.is_top1 is not None and values.argmax is not None
    assert values.argmax.tolist() == [69, 40, 9, 0]
    assert values.is_top1.tolist() == [True, True, False, False]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("ignored", [0.0, 1.0])
def test_no_tokens_or_none_that_count(ignored: float, dtype: torch.dtype, device: str) -> None:
    more: dict[str, Any] = {"dtype": dtype, "device": device, "ignored": ignored}
    for tokens in (0, 5) if ignored else (0,):
        x = options_case(["linear_bias"], tokens, 8, 40, **more)
        values, gradients = ours(x, OUTPUTS)
        assert not any(bool(value.any()) for value in values)
        assert not any(bool(gradient.any()) for gradient in gradients)


def test_shapes_and_dtypes(device: str) -> None:
    """Values have target's shape; float32, or float64 for float64 inputs."""
    x = options_case([], 60, 16, 100, device=device)
    flat = cutefce.linear_log_probs(x.case.h, x.case.w, x.case.y, outputs=OUTPUTS)
    h, y = x.case.h.reshape(3, 4, 5, 16), x.case.y.reshape(3, 4, 5)
    shaped = cutefce.linear_log_probs(h, x.case.w, y, outputs=OUTPUTS)
    for a, b in zip(shaped, flat, strict=True):
        assert a is not None and b is not None
        assert a.shape == y.shape and are_same(a.flatten(), b)
    for dtype in DTYPES:
        h, w = x.case.h.to(dtype), x.case.w.to(dtype)
        values = cutefce.linear_log_probs(h, w, x.case.y, outputs=OUTPUTS)
        wide = torch.promote_types(dtype, torch.float32)
        assert [value.dtype for value in values if value is not None] == [
            *[wide] * 5,
            torch.bool,
            torch.long,
        ]


def test_without_gradients_values_are_the_same(device: str) -> None:
    x = options_case(["linear_bias"], 70, 16, 333, device=device)
    values, _ = ours(x, OUTPUTS)
    with torch.no_grad():
        again = cutefce.linear_log_probs(x.case.h, x.case.w, x.case.y, outputs=OUTPUTS, **x.options)
    for a, b in zip(values, again, strict=True):
        torch.testing.assert_close(a.detach(), b)
        assert b is not None and not b.requires_grad


def test_log_probs_are_those_of_the_loss(device: str) -> None:
    x = options_case(["linear_bias", "logit_scale"], 70, 16, 333, device=device)
    values, _ = ours(x, ())
    loss = cutefce.linear_cross_entropy(x.case.h, x.case.w, x.case.y, reduction="none", **x.options)
    torch.testing.assert_close(values.log_probs.detach(), -loss)


POLICY: dict[str, Callable[[Any], Tensor]] = {
    "policy gradient": lambda v: -(v.log_probs - v.log_probs.detach()).exp().sum(),
    "entropy bonus": lambda v: -(v.log_probs + 0.01 * v.entropy).sum(),
    "z-loss": lambda v: (-v.log_probs + 1e-3 * v.lse.square()).mean(),
}


@pairwise(objective=POLICY, train=[p for p in itertools.product([True, False], repeat=3) if any(p)])
def test_objectives_and_frozen_inputs(
    train: tuple[bool, ...], objective: Callable[[Any], Tensor], device: str
) -> None:
    x = options_case(
        ["linear_bias", "temperature"], 60, 16, 100, dtype=torch.float64, device=device
    )
    leaves = (*(leaf.requires_grad_(on) for leaf, on in zip(x.leaves, train, strict=True)),)
    options, trained = x.with_leaves(leaves), [leaf for leaf in leaves if leaf.requires_grad]
    values = cutefce.linear_log_probs(
        leaves[0], leaves[1], x.case.y, outputs=("lse", "entropy"), **options
    )
    want = row_values(model_logits(leaves[0] @ leaves[1].t(), **options), x.case.y)
    torch.testing.assert_close(
        torch.autograd.grad(objective(values), trained),
        torch.autograd.grad(objective(want), trained),
    )
