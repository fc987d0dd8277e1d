"""Sums of gradients over windows and chunks: in fewer bits, or in memory that is needed later."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

import cutefce
from bench.harness.accuracy import relative_error
from bench.harness.reference import unfused
from cutefce.cute_kernels.problem import LOW_BITS
from tests.support.backends import Backend, on_backends
from tests.support.layouts import (
    CHUNKS,
    COLUMNS,
    SMALL_TILES,
    WINDOWS,
    Layout,
    pinned,
    windows_in_chunks,
)
from tests.support.options import OPTIONS, PER_TOKEN, OptionsCase, options_case
from tests.support.reference import (
    Case,
    assert_as_accurate,
    evaluate,
    logits_case,
    random_case,
    wide_logits,
)
from tests.support.tiers import pairwise

UPSTREAM = -0.37


@dataclass(frozen=True)
class Variant:
    """Another way to sum gradients, and how far its results may be from the plain way's."""

    layout: Layout
    plain: Layout
    dx: float
    """Relative to the norm, as are those of dW."""
    dw: float = 0.0
    frozen: bool = False
    """Whether it serves frozen weights alone."""


STORED = WINDOWS["some aliased, some kept"]
SHORT = Layout(in_chunks=True, kept=COLUMNS, chunk=32)
FROZEN = windows_in_chunks(64, COLUMNS)
VARIANTS = {
    "dX in 20 bits": Variant(replace(STORED, hidden_bits=4), STORED, 2.0**-10),
    "dX in 24 bits": Variant(replace(STORED, hidden_bits=8), STORED, 2.0**-12),
    "short chunks": Variant(SHORT, CHUNKS["in one chunk"], 2.0**-9, 2.0**-9),
    "windows in chunks": Variant(windows_in_chunks(64, 128), FROZEN, 2.0**-12, frozen=True),
}


def skip_unserved(layout: Layout, backend: Backend) -> None:
    """Skip layouts of the kernels' host code alone."""
    if backend.arch is None and layout.window % SMALL_TILES.reference_block:
        pytest.skip("the portable path has windows of whole reference blocks")


def step(
    x: OptionsCase, layout: Layout | None, upstream: float = 1.0, **more: Any
) -> tuple[Tensor, ...]:
    """Return the gradients that x has with an upstream gradient for all tokens."""
    leaves = x.leaves
    with pinned(layout):
        loss = cutefce.linear_cross_entropy(
            leaves[0], leaves[1], x.case.y, **x.with_leaves(leaves), **more
        )
        return torch.autograd.grad(loss, leaves, torch.full_like(loss, upstream))


def gradients(
    x: OptionsCase, variant: Variant, layout: Layout, upstream: float = 1.0, **more: Any
) -> tuple[Tensor, ...]:
    """Return the gradients that a variant has: of all, or of h alone."""
    if not variant.frozen:
        return step(x, layout, upstream, **more)
    h, w, *_ = x.leaves
    with pinned(layout):
        loss = cutefce.linear_cross_entropy(h, w.detach(), x.case.y, **x.options, **more)
        return torch.autograd.grad(loss, h, torch.full_like(loss, upstream))


FEW = "linear_bias", "weight", "label_smoothing", "z_loss", "softcap", "temperature (N,)"


@on_backends(emulated=1, variant=VARIANTS, name=[*OPTIONS], few={"name": FEW})
def test_options(variant: Variant, name: str, backend: Backend) -> None:
    """Rows that do not count are 0, whatever they hold."""
    skip_unserved(variant.layout, backend)
    per_token = name in PER_TOKEN
    if per_token and not (variant.frozen or not variant.layout.in_chunks):
        pytest.skip("no plan: tokens' factors are known after the forward")
    sizes, how = (backend.tokens, 48, 333), {"dtype": backend.dtype, "device": backend.device}
    x = options_case([name], *sizes, ignored=0.3, **how)
    backend.hide_ignored(x.case)
    ignored = x.case.y == -100
    more: dict[str, Any] = {"reduction": "none" if per_token else "mean"}
    want = gradients(x, variant, variant.plain, **more)
    got = gradients(x, variant, variant.layout, **more)
    assert not got[0][ignored].any()
    assert relative_error(got[0], want[0]) <= variant.dx
    if not variant.frozen:
        apart = relative_error(got[1], want[1])
        assert apart <= variant.dw, f"dW: {apart}"


@on_backends(
    columns=[layout for layout in WINDOWS.values() if layout.kept != COLUMNS],
    bits=[None, *LOW_BITS],
    emulated=1,
)
def test_sums_over_windows_are_as_accurate_as_unfused(
    columns: Layout, bits: int | None, backend: Backend
) -> None:
    case = random_case(backend.tokens, 48, 333, dtype=backend.dtype, device=backend.device)
    case.upstream.fill_(UPSTREAM)
    scalar = replace(case, upstream=torch.tensor(UPSTREAM, device=backend.device))

    def loss(h: Tensor, w: Tensor) -> Tensor:
        return cutefce.linear_cross_entropy(h, w, case.y, reduction="sum")

    with pinned(replace(columns, hidden_bits=bits)):
        assert_as_accurate(evaluate(scalar, loss), case, ("dx", "dw"))


@on_backends(variant=VARIANTS, ignored=[0.0, 0.5, 0.95, 1.0])
def test_ignored_rows(variant: Variant, ignored: float, backend: Backend) -> None:
    """Rows move to their places in their own memory; a second call has the same bits."""
    skip_unserved(variant.layout, backend)
    case = random_case(150, 48, 333, dtype=backend.dtype, device=backend.device, ignored=0)
    off = torch.rand(150) < ignored
    case.y[off] = -100
    backend.hide_ignored(case)
    x = OptionsCase(case, {"reduction": "sum"})
    want = gradients(x, variant, variant.plain, 0.37)
    got = gradients(x, variant, variant.layout, 0.37)
    again = gradients(x, variant, variant.layout, 0.37)
    assert not got[0][off].any()
    assert relative_error(got[0], want[0]) <= 2.0**-8 * (ignored < 1)
    for a, b in zip(got[1:], want[1:], strict=True):
        assert relative_error(a, b) <= 2.0**-7 * (ignored < 1)
    assert all(map(torch.equal, got, again)), "equal bits of a second call"


# a frozen head, a frozen model


def gradient(
    case: Case, upstream: Tensor, trained: str, layout: Layout | None, **options: Any
) -> tuple[Tensor, Tensor]:
    """Return the gradient of a frozen head's h, or of w for frozen h, and that of float64."""
    h, w = case.h.clone().requires_grad_(trained == "h"), case.w.clone()
    w.requires_grad_(trained == "w")
    reduction = "sum" if upstream.ndim == 0 else "none"
    with pinned(layout):
        loss = cutefce.linear_cross_entropy(h, w, case.y, reduction=reduction, **options)
        leaf = h if trained == "h" else w
        (got,) = torch.autograd.grad(loss, leaf, upstream.to(loss.dtype))
    wide_h, wide_w = (x.detach().double() for x in (h, w))
    leaf = (wide_h if trained == "h" else wide_w).requires_grad_()
    exact = unfused(wide_h, wide_w, case.y, reduction=reduction)
    return got, torch.autograd.grad(exact, leaf, upstream.double())[0]


def assert_close(case: Case, got: Tensor, exact: Tensor, upstream: Tensor, trained: str) -> None:
    """Assert that the error is at most the project's factor of that of float32 logits."""
    if case.h.dtype != torch.bfloat16:
        assert relative_error(got, exact) < 100 * torch.finfo(case.h.dtype).eps
        return
    rows = upstream.expand(len(case.y)).float()
    wide = wide_logits(Case(case.h, case.w, case.y, rows))
    other = wide.dx if trained == "h" else wide.dw
    assert relative_error(got, exact) <= 1.35 * relative_error(other, exact)


UPSTREAMS = {"one": torch.ones(()), "0.37": torch.tensor(0.37), "each token's": None}


FROZEN_LAYOUTS = CHUNKS | {
    "chunks of 40, windows of 64": windows_in_chunks(40, 64),
    "one chunk, windows of 128": windows_in_chunks(150, 128),
    "chunks of 64, windows of 304": windows_in_chunks(64, 304),
}


@on_backends(layout=FROZEN_LAYOUTS, upstream=UPSTREAMS)
def test_a_frozen_head(layout: Layout, upstream: Tensor | None, backend: Backend) -> None:
    skip_unserved(layout, backend)
    case = random_case(150, 48, 333, dtype=backend.dtype, device=backend.device)
    upstream = case.upstream if upstream is None else upstream.to(backend.device)
    got, exact = gradient(case, upstream, "h", layout)
    assert_close(case, got, exact, upstream, "h")


HIGH = {
    "in the first window": lambda rows: rows % 60,
    "in the last window": lambda rows: 320 + rows % 13,
    "in any window": lambda rows: rows * 37 % 333,
}
FAR_LAYOUTS = {
    "whole": windows_in_chunks(16, COLUMNS),
    "windows of 64": windows_in_chunks(16, 64),
    "windows of 128": windows_in_chunks(16, 128),
}


@on_backends(
    layout=FAR_LAYOUTS,
    place=HIGH,
    every={"all rows": 1, "some rows": 7, "one row": 39},
    height=[20.0, 60.0, 1e4],
)
def test_far_rows_of_chunks_are_computed_again(
    layout: Layout, place: Any, every: int, height: float, backend: Backend
) -> None:
    """Their first sums overflow, those of other chunks stay."""
    skip_unserved(layout, backend)
    torch.manual_seed(1)
    logits, y = torch.randn(40, 333), torch.randint(333, (40,))
    rows = torch.arange(1, 40, every)
    high = place(rows)
    y[rows] = torch.where(y[rows] == high, (high + 1) % 333, y[rows])
    logits[rows, high] = height
    y[::5] = -100
    case = logits_case(logits.to(backend.dtype), y, backend.device)
    clean = case.h.clone()
    backend.hide_ignored(case)
    got, _ = gradient(case, case.upstream, "h", layout)
    _, exact = gradient(replace(case, h=clean), case.upstream, "h", None)
    assert not got[::5].any()
    assert relative_error(got, exact) < 2.0**-8


@on_backends(few_backends=True, emulated=1, layout=FROZEN_LAYOUTS)
def test_outputs_of_chunks_are_those_of_windows(layout: Layout, backend: Backend) -> None:
    skip_unserved(layout, backend)
    case = random_case(backend.tokens, 48, 333, dtype=backend.dtype, device=backend.device)
    case.h[20] *= 100  # a far row
    names = "lse", "sum_p_squared", "mean_logit", "is_top1", "argmax", "rank"
    results = []
    for own in (layout, WINDOWS["everything kept"]):
        h = case.h.clone().requires_grad_()
        with pinned(own):
            got = cutefce.linear_log_probs(h, case.w, case.y, outputs=names)
            assert got.lse is not None
            loss = (got.log_probs * case.upstream + got.lse * case.upstream.flip(0)).sum()
            (dx,) = torch.autograd.grad(loss, h)
        results.append((*(x.detach() for x in got if x is not None), dx))
    for a, b in zip(*(result[:-1] for result in results), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    assert relative_error(results[0][-1], results[1][-1]) < 4 * torch.finfo(backend.dtype).eps


def test_entropys_gradient_has_no_chunks() -> None:
    """Its factors of exponentials are those of the backward."""
    case = random_case(1500, 64, 3000, dtype=torch.float32)
    h = case.h.requires_grad_()
    got = cutefce.linear_log_probs(h, case.w, case.y, outputs=("entropy",), workspace="min")
    assert got.entropy is not None
    dx = torch.autograd.grad(got.entropy.sum(), h)[0]
    wide = h.detach().double().requires_grad_()
    log_p = (wide @ case.w.double().t()).log_softmax(1)[case.y >= 0]
    exact = torch.autograd.grad(-(log_p.exp() * log_p).sum(), wide)[0]
    assert relative_error(dx, exact) < 1e-5


@pairwise(upstream=[1.0, 0.37], chunk=[400, 64], low_bits=[8, 4], name=["plain", "label_smoothing"])
def test_sums_over_chunks_are_rounded_once(
    name: str, upstream: float, chunk: int, low_bits: int, device: str
) -> None:
    """Rounded before they are multiplied, they would be off by 1.4 times as much."""
    names = [] if name == "plain" else [name]
    x = options_case(names, 1500, 64, 3000, dtype=torch.bfloat16, device=device)
    x = OptionsCase(x.case, x.options | {"reduction": "sum"})
    wide = replace(x.case, h=x.case.h.double(), w=x.case.w.double())
    exact = step(OptionsCase(wide, x.options), None, upstream)
    of_windows, of_chunks = (
        [relative_error(a, b) for a, b in zip(step(x, layout, upstream), exact, strict=True)]
        for layout in (
            Layout(window=4096, kept=3072),
            Layout(in_chunks=True, window=4096, kept=3072, chunk=chunk, low_bits=low_bits),
        )
    )
    for windows, chunks in zip(of_windows, of_chunks, strict=True):
        assert chunks <= 1.05 * windows


def class_probs(case: Case) -> dict[str, Any]:
    """Return three soft targets of each token, none of the ignored ones."""
    classes = classes_of(case)
    probs = torch.rand(classes.shape, device=classes.device)
    return {"target_indices": classes, "target_probs": probs * (classes != -100)}


def classes_of(case: Case) -> Tensor:
    """Return three classes (N, 3) of each token; a seventh of the tokens are ignored."""
    classes = torch.randint(len(case.w), (len(case.y), 3), device=case.y.device)
    classes[::7] = -100
    return classes


OUTPUTS = "lse", "entropy", "sum_p_squared", "argmax"
ALONE: dict[str, Callable[[Case], Any]] = {
    "a mean": lambda x: cutefce.linear_cross_entropy(x.h, x.w, x.y),
    "losses and lse": lambda x: cutefce.linear_cross_entropy(
        x.h, x.w, x.y, reduction="none", label_smoothing=0.1, return_lse=True
    ),
    "outputs": lambda x: cutefce.linear_log_probs(
        x.h, x.w, x.y, outputs=(*OUTPUTS, "mean_logit", "is_top1", "rank")
    ),
    "outputs of no class": lambda x: cutefce.linear_log_probs(x.h, x.w, outputs=OUTPUTS),
    "outputs of several classes": lambda x: cutefce.linear_log_probs(
        x.h, x.w, target_indices=classes_of(x), outputs=OUTPUTS
    ),
    "soft targets": lambda x: cutefce.linear_cross_entropy(
        x.h, x.w, reduction="none", **class_probs(x)
    ),
}
"""Calls without gradients."""


@on_backends(few_backends=True, layout=CHUNKS, call=ALONE)
def test_chunks_without_gradients_give_the_results_of_one(
    layout: Layout, call: Callable[[Case], Any], backend: Backend
) -> None:
    case = random_case(backend.tokens, 48, 333, dtype=backend.dtype, device=backend.device)
    case.h[20] *= 100  # a far row
    results = []
    for own in (layout, WINDOWS["nothing kept"]):
        torch.manual_seed(0)
        with pinned(own), torch.no_grad():
            found = call(case)
        results.append([found] if isinstance(found, Tensor) else [*found])
    for a, b in zip(*results, strict=True):
        assert a is b is None or torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5) is None
