"""The kernel of rows of two models' logits, emulated, against float64."""

import dataclasses
import functools
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

pytest.importorskip("cutlass")

from cutefce.cute_kernels.spec.divergence import DivergenceRowsSpec
from cutefce.ops.divergence import kernels
from cutefce.ops.divergence.inputs import DivergenceInputs, Side
from cutefce.ops.divergence.options import FIRST, Divergence
from tests.emulation.hopper import run
from tests.support import tiers
from tests.support.divergence import heads, ours, planned, token_divergences
from tests.support.divergence_models import sums_of, windows_of
from tests.support.reference import distance
from tests.support.tiers import rest_slow

BETA = 0.25
SIZES = {
    "some blocks have no class": (2, 40),
    "one vector of each thread": (3, 2000),
    "held and read again": (2, 5 * 2048 + 264),
}
STUDENT, TEACHER = 0, 1
FORMS = {"jsd": STUDENT, "forward_kl": TEACHER, "reverse_kl": STUDENT, "tv": STUDENT}
"""The side that the kernel has first."""


class Result(NamedTuple):
    """What the kernel writes."""

    stats: Tensor
    """(7, R)"""
    factors: list[Tensor | None]
    """(R, V) of the student and of the teacher."""

    def divergence(self, form: str, beta: float = BETA) -> Tensor:
        """Return the divergences (R,)."""
        of_student, of_teacher, variation = self.stats[4], self.stats[5], self.stats[6]
        if form == "tv":
            return variation
        if form == "jsd":
            return (1 - beta) * of_student + beta * of_teacher
        return of_teacher if form == "forward_kl" else of_student


def computed(
    logits: list[Tensor],
    form: str,
    wanted: tuple[bool, bool] = (True, True),
    columns: int | None = None,
    beta: float = BETA,
    held: int = 1,
    parts: int = 0,
    dtype: torch.dtype = torch.bfloat16,
    **options: Any,
) -> Result:
    """Return the result of the emulated kernel, for logits (R, V) of student and teacher.

    Their sums are given in some `parts`, or made by the kernel.
    Factors are in windows of `columns` classes, None for one of all; other memory is not written.
    """
    (rows, vocab), first = logits[0].shape, FORMS[form]
    stats = torch.full((7, rows + 1), torch.nan)[:, :rows]
    columns, before, shift = columns or vocab, 0 if columns is None else 3, 31
    if columns < vocab:
        shift = columns.bit_length() - 1
    pitches = [8 + 16 * side + (rows + before) * columns for side in (STUDENT, TEACHER)]
    sizes = [-(-vocab // columns) * pitch for pitch in pitches]
    places = [torch.full((size,), torch.nan, dtype=dtype) for size in sizes]
    memories = [
        place.view(torch.bfloat16) if given else None
        for place, given in zip(places, wanted, strict=True)
    ]
    a, b = wanted[first], wanted[1 - first]
    own = "kl" if form in FIRST else form
    kernel = DivergenceRowsSpec("sm_90a", own, a, b, 64, held, sums_given=parts > 0)
    sums = [sums_of(x, parts) if parts else None for x in logits]
    shares = {"jsd": [1 - beta, beta], "tv": [0.5, 0.5]}.get(form, [1.0, 1.0])
    run(
        kernel,
        logits[first],
        logits[1 - first],
        sums[first],
        sums[1 - first],
        memories[first],
        memories[1 - first],
        stats,
        torch.full((rows * kernel.EXCHANGE,), torch.nan),
        torch.tensor([*shares, 2.0, 4.0]),
        first,
        int(dtype == torch.float16),
        before,
        columns,
        shift,
        pitches[first],
        pitches[1 - first],
        **options,
    )
    factors: list[Tensor | None] = [None, None]
    for side, place in enumerate(places):
        if wanted[side]:
            written = torch.cat(windows_of(place, vocab, rows, before, columns, pitches[side]), 1)
            assert place.isfinite().sum() <= written.numel()
            factors[side] = written.float() / (2.0 if side == first else 4.0)
    return Result(stats, factors)


def random_logits(rows: int, vocab: int, spread: float = 1.0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rows)
    student = 3 * torch.randn(rows, vocab, generator=generator)
    return [student, student + spread * torch.randn(rows, vocab, generator=generator)]


def check(
    logits: list[Tensor],
    form: str,
    bound: float = 2e-5,
    beta: float = BETA,
    dtype: torch.dtype = torch.bfloat16,
    **options: Any,
) -> None:
    """Compare with float64: statistics, and factors that are rounded once."""
    got = computed(logits, form, beta=beta, dtype=dtype, **options)
    wide = [x.double().requires_grad_() for x in logits]
    want = token_divergences(*wide, divergence=form, beta=beta)
    gradients = torch.autograd.grad(want.sum(), wide)
    for side, x in enumerate(wide):
        top, rest = got.stats[2 * side : 2 * side + 2].double()
        torch.testing.assert_close(top, x.amax(1).detach(), rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(top + rest, x.logsumexp(1).detach(), rtol=2e-7, atol=1e-6)
    variation = token_divergences(*wide, divergence="tv").detach()
    for found, value in ((got.divergence(form, beta), want), (got.stats[6], variation)):
        assert ((found.double() - value).abs() <= bound * value).all()
    for factors, gradient in zip(got.factors, gradients, strict=True):
        if factors is not None:
            rounding = distance(gradient.to(dtype), gradient)
            assert distance(factors, gradient) <= 1.05 * rounding + 1e-7 * float(gradient.norm())


SMALL = 2, 304
HELD = {"all held": (2, 2048 + 264), "not all held": (2, 5 * 2048 + 264)}
GIVEN: dict[str, tuple[tuple[int, int], float, dict[str, Any]]] = {
    f"random, {name}": (size, 1.0, {}) for name, size in tiers.named(SIZES)
}
"""Sizes and spreads of logits, and how the kernel runs."""
GIVEN |= {
    f"several vectors, {name}, factors {wanted}": (size, 1.0, {"wanted": wanted, "held": 3})
    for name, size in HELD.items()
    for wanted in ((True, True), (True, False))
}
GIVEN |= {
    f"sums of {parts} parts are given, {held} held, factors {wanted}": (
        size,
        1.0,
        {"wanted": wanted, "held": held, "parts": parts},
    )
    for size, parts in (((3, 40), 2), ((2, 5 * 2048 + 264), 35))
    for wanted in ((True, True), (True, False), (False, True))
    for held in (1, 2, 4)
}
GIVEN |= {
    f"factors {wanted}": (SMALL, 1.0, {"wanted": wanted, "seed": 1})
    for wanted in ((False, False), (True, False), (False, True))
}
GIVEN |= {f"windows of {n}": (SMALL, 1.0, {"columns": n}) for n in (64, 256)}
GIVEN |= {
    "float16": (SMALL, 1.0, {"dtype": torch.float16}),
    "close": (SMALL, 1e-3, {"bound": 1e-3}),
    "near": (SMALL, 0.1, {"bound": 5e-5}),
    "apart": (SMALL, 0.3, {"bound": 5e-5}),
}


@pytest.mark.slow
@pytest.mark.parametrize("given", GIVEN.values(), ids=GIVEN)
@pytest.mark.parametrize("form", FORMS)
def test_rows(form: str, given: tuple[tuple[int, int], float, dict[str, Any]]) -> None:
    size, spread, how = given
    check(random_logits(*size, spread), form, **how)


@pytest.mark.parametrize("beta", [0.999, 0.001])
def test_a_mixture_of_nearly_one_side(beta: float) -> None:
    """Where log a - log m is as small as the other side's share, for all but a few classes.

    The emulation has exact exponentials and logarithms: this bounds the error of the formula.
    """
    check(random_logits(*SMALL), "jsd", bound=2e-6, beta=beta)


@pytest.mark.slow
@pytest.mark.parametrize("form", rest_slow([*FORMS], default=2))
def test_classes_that_both_exclude(form: str) -> None:
    logits = random_logits(2, 304)
    for x in logits:
        x[:, 200:] = -torch.inf
    got, want = computed(logits, form), computed([x[:, :200].clone() for x in logits], form)
    torch.testing.assert_close(got.stats[4:], want.stats[4:])
    for a, b in zip(got.factors, want.factors, strict=True):
        assert a is not None and b is not None
        torch.testing.assert_close(a[:, :200], b, rtol=2**-7, atol=1e-7)
        assert not a[:, 200:].any()


@pytest.mark.slow
@pytest.mark.parametrize("parts", rest_slow([0, 2]))
@pytest.mark.parametrize("form", rest_slow([*FORMS], default=2))
def test_rows_of_no_number_stay_alone(form: str, parts: int) -> None:
    logits = random_logits(3, 304)
    good = computed(logits, form)
    logits[1][1, 7] = torch.nan
    check_alone(good, computed(logits, form, parts=parts), form)


def check_alone(good: Result, bad: Result, form: str) -> None:
    """Compare all rows but the second one, which has no numbers in `bad`."""
    assert bad.divergence(form)[1].isnan()
    for a, b in zip((bad.stats.t(), *bad.factors), (good.stats.t(), *good.factors), strict=True):
        assert a is not None and b is not None
        torch.testing.assert_close(a[[0, 2]], b[[0, 2]], rtol=1e-6, atol=1e-6)
    assert all(x is not None and x[1].isnan().any() for x in bad.factors)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("trained", "plan"), [("both", "some kept"), ("student", "more kept than dW has room for")]
)
@pytest.mark.parametrize("form", FORMS)
def test_a_step_launches_it(
    form: str, trained: str, plan: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values and gradients of a call, some of whose factors the kernel writes."""
    case = heads(24, (16, 24), 304, dtype=torch.bfloat16, trained=trained)
    options: dict[str, Any] = {"divergence": form, "reduction": "sum"}
    options |= {"beta": BETA} if form == "jsd" else {}
    with planned(plan):
        want = ours(case, **options)
    launched = []

    def emulated(kernel: DivergenceRowsSpec) -> Any:
        launched.append(kernel)
        return functools.partial(run, dataclasses.replace(kernel, threads=64, held=1))

    monkeypatch.setattr(kernels, "compiled", emulated)

    def of(x: DivergenceInputs) -> kernels.RowKernel:
        return kernels.RowKernel.on("sm_90a", x)

    monkeypatch.setattr(kernels.RowKernel, "of", staticmethod(of))
    with planned(plan):
        got = ours(case, **options)
    assert any(kernel.factors_a or kernel.factors_b for kernel in launched)
    for a, b in zip(got, want, strict=True):
        assert distance(a, b) <= 2**-9 * float(b.double().norm())


@pytest.mark.slow
@pytest.mark.parametrize("trains_both", [False, True])
def test_factors_of_two_dtypes_have_no_kernel(
    trains_both: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Verified kernels write those of both sides in one dtype."""
    gpu = SimpleNamespace(arch=SimpleNamespace(name="sm_90a"))
    monkeypatch.setattr(kernels, "_unsupported_reason", lambda *_: None)
    monkeypatch.setattr(kernels, "gpu_of", lambda *_: gpu)
    sides = [
        Side(torch.zeros(4, 8, dtype=dtype), torch.zeros(16, 8, dtype=dtype), None)
        for dtype in (torch.bfloat16, torch.float16)
    ]
    trained = [True] * 3 + [trains_both] * 3
    options = Divergence("forward_kl", 0.5, "mean", -100, 0, 1.0, 1.0, None, None, trained)
    given: Any = sides, options, None, None, torch.ones(()), None, None
    kernel = kernels.RowKernel.of(DivergenceInputs(*given))
    assert (kernel is None) == trains_both
