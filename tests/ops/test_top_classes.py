"""The largest log-probabilities of tokens and their classes."""

from typing import Any

import pytest
import torch

import cutefce
from cutefce.cute_kernels.config import PortableTiles
from cutefce.ops.budgets import MINIMUM
from cutefce.ops.interface.arguments import (
    LossCall,
    LossOptions,
    Sharding,
    StepOptions,
    TensorOptions,
)
from cutefce.ops.operators.plans import plan_for
from cutefce.ops.outputs import top_classes
from tests.ops.test_log_probs import DTYPES, OR_NONE, TRANSFORMS
from tests.ops.test_memory_model import peak_of
from tests.support.backends import KERNELS, Backend, on_backends
from tests.support.layouts import several_tiles
from tests.support.options import model_logits
from tests.support.outputs import ValuesCase, kept_logits, values_case
from tests.support.tiers import pairwise_of, rest_slow

NAMES = {name: x for name, x in TRANSFORMS.items() if "kept_classes" not in x}
FEW = "plain", "linear_bias", "temperature (N,)", "softcap", "logit_floor", "all and logit_floor"
"""Those of which not all cases are slow: a GPU has a kernel to compile for most."""

FEW_OF_KERNELS = "plain", "temperature (N,)", "logit_floor"


def check(x: ValuesCase, got: cutefce.LogProbs, k: int) -> None:
    """Assert that values are the k largest log-probabilities, up to roundings of logits."""
    case, found, classes = x.own.case, got.top_log_probs, got.top_classes
    assert found is not None and classes is not None
    u = model_logits(case.h.double() @ case.w.double().t(), **x.own.options)
    wide = torch.promote_types(case.h.dtype, torch.float32)
    margin = 64 * torch.finfo(wide).eps * (1 + float(u.abs().max()))
    log_p = kept_logits(u, x.index, **x.own.options).log_softmax(1)
    assert found.shape == classes.shape == (len(u), k)
    assert found.dtype == wide and classes.dtype == torch.long
    assert bool((found[x.ignored] == -torch.inf).all() and (classes[x.ignored] == -100).all())
    active = ~x.ignored
    found, classes, log_p = found[active], classes[active], log_p[active]
    want = log_p.topk(k, 1).values
    torch.testing.assert_close(found.double(), want, rtol=0, atol=margin)
    finite = found > -torch.inf  # of these each class is there once
    assert torch.equal(classes == -100, ~finite)
    exact = log_p.gather(1, classes.clamp(0)).masked_fill(~finite, -torch.inf)
    torch.testing.assert_close(exact, want, rtol=0, atol=2 * margin)
    again = classes.sort(1).values.diff(dim=1) == 0
    assert not again[finite.all(1)].any()
    assert bool((found[:, :-1] >= found[:, 1:]).all()) and bool((found <= 0).all())
    if x.index.ndim == 1 and "log_probs" in x.upstream:
        own = (classes == x.index[active, None]) & finite
        assert torch.equal(found[own], got.log_probs[active, None].expand_as(found)[own])


@pairwise_of(
    {"names": FEW},
    names=NAMES,
    classes=OR_NONE,
    k=[1, 8, 32],
    outputs=[(), ("rank", "entropy")],
    dtype=DTYPES,
    workspace=["max", "min", 100_000],
)
def test_each_call(
    names: list[str],
    classes: int | None,
    k: int,
    outputs: tuple[str, ...],
    dtype: torch.dtype,
    workspace: int | str,
    small_tiles: PortableTiles,
    device: str,
) -> None:
    more: dict[str, Any] = {"dtype": dtype, "device": device, "outputs": outputs}
    x = values_case(names, classes, *several_tiles(device), **more)
    leaves = x.own.leaves
    got = x.values(leaves, workspace=workspace, top_k=k)
    check(x, got, k)
    with torch.no_grad():
        check(x, x.values(leaves, workspace=workspace, top_k=k), k)
    # everything else is what it is without them
    total = x.total(got)
    given, plain = torch.autograd.grad(total, leaves), x.ours(workspace=workspace)[1]
    assert all(torch.isfinite(a).all() for a in given) and len(given) == len(plain)
    assert got.top_log_probs is not None and not got.top_log_probs.requires_grad


@on_backends(
    emulated=1,
    names=NAMES,
    k=[1, 3, 32],
    outputs=[("lse",), ("rank", "entropy")],
    workspace=["max", "min"],
    few={"names": FEW_OF_KERNELS},
)
def test_on_backends(
    names: list[str],
    k: int,
    outputs: tuple[str, ...],
    workspace: str,
    backend: Backend,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Blocks of kernels are tiles, of several windows; rows that do not count hold anything."""
    backend.serve(monkeypatch, PortableTiles(256, 128, 256, 64))
    more: dict[str, Any] = {"dtype": backend.dtype, "device": backend.device, "outputs": outputs}
    x = values_case(names, None, backend.tokens, 48, 830, **more)
    leaves = x.own.leaves
    if "linear_bias" not in x.own.options:  # kernels serve no such call
        backend.hide(leaves[0].data, x.ignored)
    got = x.values(leaves, workspace=workspace, top_k=k)
    given = torch.autograd.grad(x.total(got), leaves)
    x.own.case.h[x.ignored] = 0
    check(x, got, k)
    assert all(torch.isfinite(a).all() for a in given)


@pytest.mark.parametrize("options", [{}, {"reduction": "none"}, {"z_loss": 0.1}])
def test_the_operator_of_a_loss(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Classes are rows of the statistics beside a loss, too."""
    KERNELS["kernels of sm_90a"].serve(monkeypatch, PortableTiles(256, 128, 256, 64))
    h, w, y = torch.randn(40, 48), torch.randn(830, 48), torch.randint(830, (40,))
    h, w = h.bfloat16(), w.bfloat16()
    *_, stats = torch.ops.cutefce.loss_and_stats(h, w, y, top_k=3, **options)
    assert torch.equal(stats[-3:].t().long(), (h.float() @ w.float().t()).topk(3).indices)


@pytest.mark.parametrize("number", [0, 8, 40])
def test_fewer_finite_logits_than_asked_for(number: int, device: str) -> None:
    """Classes that cannot be follow with the log-probability -inf."""
    h, w = torch.randn(5, 16, device=device), torch.randn(1000, 16, device=device)
    bias = torch.full((1000,), -torch.inf, device=device)
    classes = torch.randperm(1000)[:number].to(device)
    bias[classes] = 0
    y = torch.randint(1000, (5,), device=device)
    bias[y] = 0
    got = cutefce.linear_log_probs(h, w, y, linear_bias=bias, top_k=32)
    assert got.top_log_probs is not None and got.top_classes is not None
    finite = min(32, len({*classes.tolist(), *y.tolist()}))
    assert bool((got.top_log_probs[:, :finite] > -torch.inf).all())
    assert bool((got.top_log_probs[:, finite:] == -torch.inf).all())
    assert bool((got.top_classes[:, finite:] == -100).all())
    of_finite = got.top_classes[:, :finite]
    assert bool(((of_finite >= 0) & (of_finite < 1000)).all())
    want = (h @ w.t() + bias).log_softmax(1).topk(finite, 1)
    torch.testing.assert_close(got.top_log_probs[:, :finite], want.values, rtol=0, atol=1e-4)


def test_no_target_and_a_class_that_is_excluded(
    device: str, small_tiles: PortableTiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Class 0 stands for the target; its logit may be -inf."""
    if device == "cpu":
        KERNELS["kernels of sm_90a"].serve(monkeypatch, small_tiles)
    h = torch.randn(40, 48, device=device).bfloat16()
    w = torch.randn(830, 48, device=device).bfloat16()
    bias = torch.zeros(830, device=device)
    bias[0] = -torch.inf
    got = cutefce.linear_log_probs(h, w, linear_bias=bias, top_k=4)
    assert got.top_log_probs is not None
    want = (h.double() @ w.double().t() + bias).log_softmax(1).topk(4)
    torch.testing.assert_close(got.top_log_probs.double(), want.values, rtol=0, atol=1e-3)


def test_shapes(device: str) -> None:
    h, w = torch.randn(2, 3, 16, device=device), torch.randn(50, 16, device=device)
    got = cutefce.linear_log_probs(h, w, top_k=4)
    assert got.log_probs is got.lse is None
    assert got.top_log_probs is not None and got.top_log_probs.shape == (2, 3, 4)
    assert got.top_classes is not None and got.top_classes.shape == (2, 3, 4)
    assert torch.equal(got.top_classes, (h @ w.t()).topk(4).indices)
    assert cutefce.linear_log_probs(h[:0], w, top_k=4).top_log_probs.shape == (0, 3, 4)
    assert cutefce.linear_log_probs(h, w, outputs=("lse",)).top_classes is None


@pytest.mark.parametrize("at_once", [1, 7, 64])
def test_parts_of_the_tokens(
    at_once: int, small_tiles: PortableTiles, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is found of blocks is too much for all tokens at a time."""
    h, w = torch.randn(64, 16, device=device), torch.randn(900, 16, device=device)
    y = torch.randint(900, (64,), device=device)
    floors = (h @ w.t()).topk(20).values[:, -1]
    want = cutefce.linear_log_probs(h, w, y, top_k=8, logit_floor=floors)
    monkeypatch.setattr(top_classes, "FOUND_BYTES", at_once * top_classes.found_bytes(8, 8, 4))
    got = cutefce.linear_log_probs(h, w, y, top_k=8, logit_floor=floors)
    torch.testing.assert_close(got.top_log_probs, want.top_log_probs)
    assert got.top_classes is not None and want.top_classes is not None
    assert torch.equal(got.top_classes, want.top_classes)


@pytest.mark.parametrize(
    "head", rest_slow([(1024, torch.float32), (512, torch.bfloat16), (64, torch.float32)])
)
@pytest.mark.parametrize("common", rest_slow([2000, 100]))
@pytest.mark.parametrize("floor", rest_slow([True, False]))
def test_memory_on_a_cpu_is_predicted(
    floor: bool, common: int, head: tuple[int, torch.dtype]
) -> None:
    """A bias has all tokens choose some blocks, whose rows are then at their most."""
    hidden, dtype = head
    h, w = torch.randn(1024, hidden).to(dtype), torch.randn(20000, hidden).to(dtype)
    y, bias = torch.randint(20000, (1024,)), torch.zeros(20000)
    bias[:common] = 1e3
    floors = torch.zeros(1024) if floor else None
    asked = LossOptions(reduction="outputs", outputs="lse", top_k=8)
    step, tensors = StepOptions(MINIMUM, False, False, False), {"logit_floor": floors}
    given = TensorOptions(linear_bias=bias, **tensors)
    plan = plan_for(LossCall(h, w, y, step, asked, given, Sharding()))
    more: Any = {"linear_bias": bias, "workspace": "min", **tensors}

    def call() -> None:
        with torch.no_grad():
            cutefce.linear_log_probs(h, w, y, top_k=8, **more)

    assert 0.7 * plan.workspace_bytes < peak_of(call, "cpu") <= 1.02 * plan.workspace_bytes
