"""What divergences are compared with, in plain torch with logits."""

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, cast
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

import cutefce
from cutefce.ops import torch_compat
from cutefce.ops.divergence import operators
from cutefce.ops.divergence import plan as plans
from cutefce.ops.divergence.plan import DivergencePlan
from cutefce.ops.divergence.problem import DivergenceLayout, DivergenceProblem
from tests.support.once import once
from tests.support.reference import distance
from tests.support.sound_programs import check

FORMS: dict[str, dict[str, Any]] = {
    "forward KL": {"divergence": "forward_kl"},
    "reverse KL": {"divergence": "reverse_kl"},
    "JSD": {"divergence": "jsd"},
    "JSD, mostly student": {"divergence": "jsd", "beta": 0.1},
    "JSD, nearly teacher": {"divergence": "jsd", "beta": 0.999},
    "total variation": {"divergence": "tv"},
}
PLANS: dict[str, DivergenceLayout] = {
    "two passes": DivergenceLayout(64, 32 * 64, passes=2),
    "one pass": DivergenceLayout(96, 32 * 96),
    "some kept": DivergenceLayout(96, 24 * 96, kept=40),
    "all kept": DivergenceLayout(64, 32 * 64, kept=1 << 20),
    "one tile": DivergenceLayout(1 << 20, 1 << 40),
    "kept in dW": DivergenceLayout(64, 64, kept=1, aliased=1 << 20),
    "more kept than dW has room for": DivergenceLayout(32, 32, kept=40, aliased=1 << 20),
}
"""Layouts, cut to the sizes; `aliased` tokens are as many as dW has room for, and all kept."""
RUNS = [(plan, "sum") for plan in PLANS]
RUNS += [(plan, "none") for plan, layout in PLANS.items() if not layout.kept]
"""Plans and reductions: factors are kept of a reduced divergence alone."""
NAMES = "student_input", "student_weight", "teacher_input", "teacher_weight"


@dataclass(frozen=True)
class Heads:
    """Inputs of one call, and the upstream gradient of each token's divergence."""

    tensors: tuple[Tensor, Tensor, Tensor, Tensor]
    target: Tensor
    upstream: Tensor
    biases: dict[str, Any] = field(default_factory=dict)

    @property
    def leaves(self) -> list[Tensor]:
        """Return what has gradients."""
        every = [*self.tensors, *self.biases.values()]
        return [x for x in every if x.requires_grad]

    def cast(self, dtype: torch.dtype) -> "Heads":
        """Return detached copies in another dtype, which require grad as these do."""

        def to(x: Tensor) -> Tensor:
            return x.detach().to(dtype).requires_grad_(x.requires_grad)

        h_s, w_s, h_t, w_t = map(to, self.tensors)
        biases = {name: to(x) for name, x in self.biases.items()}
        return replace(self, tensors=(h_s, w_s, h_t, w_t), biases=biases)


def heads(
    tokens: int,
    hidden: tuple[int, int],
    vocab: int,
    *,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    logit_std: float = 1.0,
    ignored: float = 0.2,
    trained: str = "both",
    biases: bool = False,
    seed: int = 0,
) -> Heads:
    """Draw two heads whose logits have the given standard deviation.

    With 16 bits, upstream gradients are powers of 2, by which no rounding changes: the roundings of
    a few large numbers would decide a comparison.
    """
    torch.manual_seed(seed)
    tensors = []
    for index, width in enumerate(hidden):
        grad = trained == "both" or index == 0
        h, w = torch.randn(tokens, width), torch.randn(vocab, width) * (logit_std / width**0.5)
        tensors += [x.to(device, dtype).requires_grad_(grad) for x in (h, w)]
    y = torch.randint(5, (tokens,))
    y[torch.rand(tokens) < ignored] = -100
    upstream = torch.randn(tokens, dtype=torch.promote_types(dtype, torch.float32))
    if dtype.itemsize == 2:
        upstream = upstream.sign() * 2.0 ** torch.randint(-2, 3, (tokens,))
    named = {}
    if biases:
        for name in ("student_bias", "teacher_bias"):
            named[name] = torch.randn(vocab).to(device, dtype).requires_grad_()
    return Heads(tuple(tensors), y.to(device), upstream.to(device), named)  # type: ignore[arg-type]


def several(*sizes: Any, **options: Any) -> list[Heads]:
    """Draw three heads of many numbers, eight or 64 tokens' heads of few."""
    tokens, hidden, vocab = sizes
    numbers = tokens * vocab + max(hidden) * (tokens + vocab)
    count = max(8, 64 // tokens) if numbers < 1 << 17 else 3
    return [heads(*sizes, **options, seed=seed) for seed in range(count)]


def ours(case: Heads, **options: Any) -> list[Tensor]:
    """Return per-token divergences, or with reduction "sum" theirs, and all gradients of cutefce.

    Only reduced divergences keep factors.
    """
    given = *case.tensors, case.target
    losses = cutefce.linear_divergence(*given, **{"reduction": "none", **case.biases, **options})
    upstream = case.upstream.to(losses.dtype) if losses.ndim else None
    return [losses.detach(), *torch.autograd.grad(losses, case.leaves, upstream)]


def expected(case: Heads, wide: bool = False, **options: Any) -> list[Tensor]:
    """Return the same of logits, in the dtype of the inputs.

    With `wide`, logits of 16-bit inputs are float32, and their gradients are rounded.
    """
    logits = [model_logits(case, index, wide, **options) for index in (0, 1)]
    counts = case.target != -100
    losses = torch.where(counts, token_divergences(*logits, **options), 0)
    losses = losses.sum() if options.get("reduction") == "sum" else losses
    upstream = case.upstream.to(losses.dtype) if losses.ndim else None
    return [losses.detach(), *torch.autograd.grad(losses, case.leaves, upstream)]


class _Rounded(torch.autograd.Function):
    """The identity, whose gradient is rounded to 16 bits."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dtype: torch.dtype) -> tuple[Tensor]:
        ctx.dtype = dtype
        return (x.clone(),)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.to(ctx.dtype).to(gradient.dtype), None


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return x, whose gradient is rounded to `dtype`."""
    (result,) = torch_compat.apply_function(_Rounded, x, dtype)
    return cast(Tensor, result)


def model_logits(case: Heads, index: int, wide: bool = False, **options: Any) -> Tensor:
    """Return the logits (N, V) of the student (0) or the teacher (1)."""

    def of(name: str, default: Any) -> Any:
        value = options.get(name, default)
        return value[index] if isinstance(value, tuple) else value

    h, w = case.tensors[2 * index : 2 * index + 2]
    x = F.linear(h.float(), w.float()) if wide else F.linear(h, w)
    x = x * of("logit_scale", 1.0)
    bias = case.biases.get(NAMES[2 * index].replace("input", "bias"))
    x = x if bias is None else x + bias
    x = rounded(x, h.dtype) if wide else x.to(torch.promote_types(h.dtype, torch.float32))
    cap, temperature = of("softcap", None), of("temperature", 1.0)
    x = x if cap is None else cap * torch.tanh(x / cap)
    if isinstance(temperature, Tensor) and temperature.ndim:
        temperature = temperature[:, None]
    return cast(Tensor, x / temperature)


def token_divergences(
    student: Tensor,
    teacher: Tensor,
    *,
    divergence: str = "forward_kl",
    beta: float = 0.5,
    **_: Any,
) -> Tensor:
    """Return the divergences (...) of logits (..., V), by the definition."""
    log_p, log_q = student.log_softmax(-1), teacher.log_softmax(-1)
    if divergence == "jsd" and 0 < beta < 1:
        share = torch.tensor([1 - beta, beta], dtype=torch.float64).log().to(log_p)
        log_m = torch.logaddexp(log_p + share[0], log_q + share[1])
        return beta * _kl(log_q, log_m) + (1 - beta) * _kl(log_p, log_m)
    if divergence == "tv":
        return (log_p.exp() - log_q.exp()).abs().sum(-1) / 2
    is_reverse = divergence == "reverse_kl" or (divergence == "jsd" and beta == 1)
    return _kl(log_p, log_q) if is_reverse else _kl(log_q, log_p)


def _kl(log_a: Tensor, log_b: Tensor) -> Tensor:
    return (log_a.exp() * (log_a - log_b)).sum(-1)


def assert_as_accurate(cases: Sequence[Heads], **options: Any) -> None:
    """Assert that errors against float64 are those of unfused divergences or smaller.

    The factors are those of `tests.support.reference.assert_as_accurate`.  A norm is over all
    cases, so that no single rounding of a few numbers decides.
    """
    narrow = cases[0].tensors[0].dtype.itemsize == 2
    sums: Tensor | None = None
    for case in cases:
        got, (truth, other, wide) = ours(case, **options), _references(case, _known(options))
        rows = []
        for a, want, b, c in zip(got, truth, other, wide, strict=True):
            rounded = want.to(a.dtype)
            rows.append([distance(x, want) ** 2 for x in (a, b, c, rounded)])
        found = torch.tensor(rows, dtype=torch.float64)
        sums = found if sums is None else sums + found
    assert sums is not None
    for number, squares in enumerate(sums):
        error, unfused, wide_error, rounding = squares.sqrt().tolist()
        allowed = 2 * unfused + rounding
        if narrow and number:
            allowed = min(1.05 * unfused, 1.35 * wide_error)
        assert error <= allowed, f"{number}: error {error:.3g}, allowed {allowed:.3g}"


@once
def _references(case: Heads, options: dict[str, Any]) -> list[list[Tensor]]:
    """Return float64 results, those of logits, and of 16-bit inputs those of float32 logits."""
    truth, other = expected(case.cast(torch.float64), **options), expected(case, **options)
    narrow = case.tensors[0].dtype.itemsize == 2
    return [truth, other, expected(case, wide=True, **options) if narrow else other]


def _known(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options that change results."""
    return {name: value for name, value in options.items() if name != "workspace"}


@contextmanager
def planned(name: str) -> Iterator[None]:
    """Run calls by one of `PLANS`."""
    layout = PLANS[name]

    @functools.cache  # checking hundreds of steps takes longer than running them
    def plan(problem: DivergenceProblem, budget: int) -> DivergencePlan:
        tokens = 0 if problem.scales_rows else problem.student.tokens
        aliased = min(layout.aliased, problem.most_aliased, tokens)
        kept = min(max(layout.kept, aliased), tokens)
        found = plans.planned(problem, replace(layout, kept=kept, aliased=aliased))
        if problem.student.tokens:  # else nothing is written
            check(found.program)
        return found

    with mock.patch.object(operators, "make_plan", plan):
        yield
