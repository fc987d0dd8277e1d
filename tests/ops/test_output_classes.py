"""Log-probabilities of several classes of each token, each with a gradient."""

from typing import Any

import pytest
import torch
from torch import Tensor

import cutefce
from cutefce.cute_kernels.config import PortableTiles
from tests.support.backends import Backend, on_backends
from tests.support.layouts import WINDOWS, Layout, pinned
from tests.support.options import OptionsCase
from tests.support.output_classes import UPSTREAMS, ClassesCase, classes_case
from tests.support.reference import logits_case, random_case
from tests.support.tiers import pairwise

FACTORS = ["linear_bias", "logit_scale", "temperature (N,)"]
EACH = {"nothing": [], "factors": FACTORS, "softcap": [*FACTORS, "softcap"]}


@pytest.mark.compiled_rows
@pairwise(
    names=EACH,
    kind=UPSTREAMS,
    dtype=[torch.float64, torch.float32, torch.bfloat16, torch.float16],
    workspace=["max", "min"],
)
def test_is_as_accurate_as_the_unfused_form(
    names: list[str],
    kind: str,
    dtype: torch.dtype,
    workspace: str,
    small_tiles: PortableTiles,
    device: str,
) -> None:
    more: dict[str, Any] = {"dtype": dtype, "device": device, "kind": kind}
    more_outputs = () if "softcap" in names else ("lse", "entropy")
    for classes, outputs in ((2, ("lse",)), (7, more_outputs)):
        x = classes_case(names, classes, 150, 48, 333, outputs=outputs, **more)
        x.check(x.ours(workspace=workspace))


GIVEN: dict[str, tuple[list[str], tuple[str, ...]]] = {
    "nothing": ([], ()),
    "entropy": ([], ("lse", "entropy")),
    "softcap": (EACH["softcap"], ("lse",)),
    "factors": (FACTORS, ("lse", "entropy")),
}
"""Options of a call, and its outputs."""


@on_backends(few_backends=True, float32=True, emulated=1, layout=WINDOWS, given=GIVEN)
def test_every_layout(
    layout: Layout, given: tuple[list[str], tuple[str, ...]], backend: Backend
) -> None:
    (names, outputs), sizes = given, (backend.tokens, 64, 333)
    how: dict[str, Any] = {"dtype": backend.dtype, "device": backend.device}
    x = classes_case(names, 7, *sizes, outputs=outputs, **how)
    with pinned(layout):
        values, gradients = x.ours()
    x.check((values, gradients))
    if backend.selects:
        backend.hide(x.own.case.h, (x.index == -100).all(1))
        with pinned(layout):
            again = x.ours()
        for a, b in zip(again[0] + again[1], values + gradients, strict=True):
            assert torch.equal(a, b), "what ignored rows hold does not matter"


@pytest.mark.parametrize(("names", "outputs"), GIVEN.values(), ids=GIVEN)
def test_float16(
    names: list[str], outputs: tuple[str, ...], small_tiles: PortableTiles, device: str
) -> None:
    """No plan of it stores exponentials."""
    how: dict[str, Any] = {"dtype": torch.float16, "device": device}
    x = classes_case(names, 7, 150, 64, 333, outputs=outputs, **how)
    with pinned(WINDOWS["nothing kept"]):
        x.check(x.ours())


@pairwise(
    given=[(False, 0.1), (False, 2), (False, 8), (True, 2), (True, 8)], workspace=["min", "max"]
)
def test_gradients_that_cancel(
    given: tuple[bool, float], workspace: str, small_tiles: PortableTiles, device: str
) -> None:
    """Of a divergence whose teacher is close to the student p - q is smaller than a rounding."""
    entropy, logit_std = given
    for dtype in (torch.bfloat16, torch.float16):
        case = random_case(200, 40, 61, dtype=dtype, device=device, logit_std=logit_std, ignored=0)
        logits = case.h.float() @ case.w.float().t()
        teacher = (logits + 0.1 * torch.randn_like(logits)).softmax(1).topk(40, 1)
        upstream = {"log_probs": -teacher.values.double()}
        if entropy:
            upstream["entropy"] = 0.01 * torch.randn(200, dtype=torch.float64, device=device)
        x = ClassesCase(OptionsCase(case, {}), teacher.indices, upstream)
        x.check(x.ours(workspace=workspace))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("height", [33.0, 1e4])
def test_rows_with_a_class_far_above(height: float, dtype: torch.dtype, device: str) -> None:
    """Be it the first class, another one, or none of them."""
    torch.manual_seed(1)
    index = torch.rand(40, 96).topk(5, 1).indices
    logits = torch.randn(40, 97).to(dtype)
    for place in (index[:, 0], index[:, 2], torch.full((40,), 96)):
        far = logits.index_put((torch.arange(40), place), torch.tensor(height, dtype=dtype))
        upstream = {"log_probs": torch.randn(40, 5), "lse": torch.randn(40)}
        upstream = {name: up.double().to(device) for name, up in upstream.items()}
        own = OptionsCase(logits_case(far, index[:, 0], device), {})
        x = ClassesCase(own, index.to(device), upstream)
        for workspace in ("max", "min"):
            values, gradients = x.ours(workspace=workspace)
            assert bool((values[0] <= 0).all())
            wanted, exact = x.exact()
            torch.testing.assert_close([v.double() for v in values], wanted, rtol=1e-6, atol=1e-6)
            for got, want in zip(gradients, exact, strict=True):
                error = float((got.double() - want).norm() / want.norm())
                assert error <= 2 * torch.finfo(dtype).eps


def test_one_class_is_the_plain_call(device: str) -> None:
    case = random_case(150, 64, 333, dtype=torch.bfloat16, device=device)
    results = []
    kinds: list[dict[str, Any]] = [{"target": case.y}, {"target_indices": case.y[:, None]}]
    for target in kinds:
        h, w = case.h.clone().requires_grad_(), case.w.clone().requires_grad_()
        found = cutefce.linear_log_probs(h, w, outputs=("entropy",), **target)
        assert found.entropy is not None
        values = found.log_probs.flatten(), found.entropy
        total = (values[0] * case.upstream).sum() + values[1].sum()
        results.append([*values, *torch.autograd.grad(total, (h, w))])
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


def test_other_outputs(device: str) -> None:
    x = classes_case([], 5, 60, 16, 100, device=device)
    h, w = x.own.case.h, x.own.case.w
    u, counts = h @ w.t(), (x.index != -100).any(1)
    names = "lse", "entropy", "sum_p_squared", "mean_logit", "argmax"
    found = cutefce.linear_log_probs(h, w, target_indices=x.index, outputs=names)
    p = u.softmax(1)
    want = u.logsumexp(1), -(p * p.log()).sum(1), p.square().sum(1), u.mean(1), u.argmax(1)
    assert found.is_top1 is None
    for name, value in zip(names, want, strict=True):
        got = getattr(found, name)
        torch.testing.assert_close(got, torch.where(counts, value, 0), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("ignored", [-100, -1, 7])
def test_shapes_ignored_classes_and_frozen_operands(ignored: int, device: str) -> None:
    """Any integers, tokens of several dimensions, and any class that is to be ignored."""
    index = torch.randint(8, 50, (3, 4, 5), device=device)
    index[0, 1, 2:], index[2, 3] = ignored, ignored
    h, w = torch.randn(3, 4, 16, device=device), torch.randn(50, 16, device=device)
    more: dict[str, Any] = {"ignore_index": ignored, "outputs": ("lse",)}
    want = (h @ w.t()).log_softmax(-1).gather(-1, index.clamp(0))
    counts = index != ignored
    want = torch.where(counts, want, 0)
    upstream = torch.randn(3, 4, 5, device=device)
    h.requires_grad_(), w.requires_grad_()
    both = []
    for operands in ((h, w), (h.detach(), w), (h, w.detach())):
        own_h, own_w = operands
        found = cutefce.linear_log_probs(own_h, own_w, target_indices=index.short(), **more)
        torch.testing.assert_close(found.log_probs.detach(), want)
        assert found.lse is not None and found.lse.shape == (3, 4)
        trained = [x for x in operands if x.requires_grad]
        both.append(torch.autograd.grad(found.log_probs, trained, upstream))
    torch.testing.assert_close(both[1] + both[2], both[0][::-1])
    buffer = torch.zeros(50, 16, device=device)
    found = cutefce.linear_log_probs(h, w, target_indices=index, accumulate_into=buffer, **more)
    found.log_probs.backward(upstream)
    torch.testing.assert_close(buffer, both[0][1])
    with torch.no_grad():
        found = cutefce.linear_log_probs(h[0, 0], w, target_indices=index[0, 0], **more)
    torch.testing.assert_close(found.log_probs, want[0, 0])
    empty = cutefce.linear_log_probs(h[:0], w, target_indices=index[:0], **more)
    assert empty.log_probs.shape == (0, 4, 5)


def test_a_class_that_cannot_be(device: str) -> None:
    """A logit of -inf is log p = -inf, be it the first class or not."""
    bias = torch.zeros(5, device=device)
    bias[0] = -torch.inf
    h, w = torch.randn(2, 8, device=device), torch.randn(5, 8, device=device)
    index = torch.tensor([[0, 1], [1, 0]], device=device)
    found = cutefce.linear_log_probs(h, w, target_indices=index, linear_bias=bias).log_probs
    torch.testing.assert_close(found, (h @ w.t() + bias).log_softmax(1).gather(1, index))


def test_sampled_gradients_are_near(device: str) -> None:
    """Of so many samples nearly all entries are kept; those of the classes are exact."""
    x = classes_case(["softcap"], 6, 100, 32, 333, device=device)
    for got, want in zip(x.ours(gradient="sampled", samples=4096)[1], x.ours()[1], strict=True):
        assert float((got - want).norm()) <= 0.01 * float(want.norm())


@pytest.mark.slow
def test_compiled_equals_eager(small_tiles: PortableTiles, device: str) -> None:
    def step(index: Tensor, h: Tensor, w: Tensor) -> Tensor:
        found = cutefce.linear_log_probs(h * 2, w, target_indices=index, outputs=("entropy",))
        assert found.entropy is not None
        return found.log_probs.exp().sum() + found.entropy.sum()

    torch.compiler.reset()
    backend = "aot_eager" if device == "cpu" else "inductor"
    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend=backend)
    for tokens in (40, 70):
        x = classes_case([], 5, tokens, 16, 333, device=device)
        results = []
        for function in (step, compiled):
            leaves = x.own.leaves
            loss = function(x.index, *leaves)
            results.append([loss, *torch.autograd.grad(loss, leaves)])
        for eager, fast in zip(*results, strict=True):
            torch.testing.assert_close(fast, eager)


def test_opcheck(device: str) -> None:
    x = classes_case([], 5, 20, 8, 50, device=device)
    h, w = x.own.leaves
    given = {"target_indices": x.index, "outputs": "lse,entropy"}
    torch.library.opcheck(torch.ops.cutefce.log_probs.default, (h, w), given)


@pytest.mark.gpu
def test_bad_values_are_nan_rows_on_a_gpu() -> None:
    x = classes_case([], 5, 40, 16, 50, device="cuda")
    good = x.ours()[0][0]
    x.index[3, 1], x.index[5, 0] = 50, -7
    (values,), (dx, _) = x.ours()
    bad = torch.zeros(40, dtype=torch.bool, device="cuda")
    bad[[3, 5]] = True
    assert values[bad][x.index[bad] != -100].isnan().all()
    assert dx[bad].isnan().all()
    assert torch.equal(values[~bad], good[~bad])
