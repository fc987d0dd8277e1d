"""Inputs that are not float64 make no float64 tensors, which some devices do not have."""

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import cutefce
from cutefce.cute_kernels.config import PortableTiles
from tests.support.divergence import FORMS, heads
from tests.support.divergence import ours as divergence
from tests.support.float64 import assert_no_float64, float64_results
from tests.support.tiers import pairwise, rest_slow

TOKENS, HIDDEN, VOCAB = 60, 16, 100
WORKSPACES: tuple[int | str, ...] = "min", 12_000, "max"
ON_RANKS = {"group", "shards", "sequence_parallel"}
"""Arguments of calls in tests/parallel."""
SCALARS: list[Any] = [17.5, 17, torch.tensor(17.5), torch.tensor([17])]
INDICES = torch.randint(VOCAB, (TOKENS, 5))
PROBS = torch.rand(TOKENS, 5)

linear_cross_entropy: Callable[..., Any] = cutefce.linear_cross_entropy
linear_log_probs: Callable[..., Any] = cutefce.linear_log_probs
linear_divergence: Callable[..., Any] = cutefce.linear_divergence

DTYPES = [torch.bfloat16, torch.float32, torch.float16]
few_dtypes = pytest.mark.parametrize("dtype", rest_slow(DTYPES))


def test_float64_is_seen() -> None:
    x = torch.ones(3, requires_grad=True)
    assert float64_results(lambda: (x.double().sum().float() + 2.0).backward())
    assert not float64_results(lambda: x.mul(0.5).sum().backward())


ARGUMENTS: dict[str, list[dict[str, Any]]] = {
    "target_indices": [{"target": None, "target_indices": INDICES, "target_probs": PROBS}],
    "target_probs": [
        {
            "target": None,
            "target_indices": torch.where(PROBS < 0.3, -100, INDICES),
            "target_probs": torch.where(PROBS < 0.3, 0, PROBS),
        }
    ],
    "linear_bias": [{"linear_bias": torch.randn(VOCAB, requires_grad=True)}],
    "weight": [{"weight": torch.rand(VOCAB)}],
    "reduction": [{"reduction": name} for name in ("mean", "sum", "none")],
    "ignore_index": [{"ignore_index": 3, "target": INDICES[:, 0]}],
    "label_smoothing": [{"label_smoothing": 0.1}],
    "options": [{"options": None}],
    "token_weights": [{"token_weights": torch.rand(TOKENS)}],
    "z_loss": [{"z_loss": 1e-2}],
    "logit_scale": [{"logit_scale": 0.3}],
    "softcap": [{"softcap": 2.5}],
    "temperature": [{"temperature": x} for x in (0.7, 2, torch.tensor(0.7), torch.rand(TOKENS))],
    "return_lse": [{"return_lse": True}],
    "gradient": [{"gradient": "sampled", "temperature": 0.7, "denominator": 7}],
    "samples": [{"gradient": "sampled", "samples": 16}],
    "workspace": [{"workspace": name} for name in (*WORKSPACES, None)],
    "denominator": [{"denominator": x} for x in (*SCALARS, 0)],
    "accumulate_into": [{"accumulate_into": torch.zeros(VOCAB, HIDDEN), "denominator": 2}],
    "grad_output": [
        {"accumulate_into": torch.zeros(VOCAB, HIDDEN), "grad_output": x, "reduction": name}
        for x, name in zip(SCALARS, ("mean", "sum", "mean", "sum"), strict=True)
    ],
    "outputs": [{"outputs": ("lse", "entropy", "sum_p_squared", "mean_logit", "argmax")}],
}
"""Calls with each argument of the losses; a new one needs its own here."""


def parameters(function: Callable[..., Any]) -> list[str]:
    """Return the keywords of a call on one device."""
    given = inspect.signature(function).parameters.values()
    return [x.name for x in given if x.kind == x.KEYWORD_ONLY and x.name not in ON_RANKS]


def inputs(dtype: torch.dtype, vocab: tuple[int, ...] = (VOCAB,)) -> dict[str, Tensor]:
    """Return hidden states, a weight and targets, of which a fifth is ignored."""
    y = torch.randint(vocab[0], (TOKENS, *vocab[1:]))
    return {
        "input": torch.randn(TOKENS, HIDDEN, dtype=dtype, requires_grad=True),
        "linear_weight": torch.randn(*vocab, HIDDEN, dtype=dtype, requires_grad=True),
        "target": torch.where(torch.rand(y.shape) < 0.2, -100, y),
    }


def step(dtype: torch.dtype, budgets: Sequence[int | str] = WORKSPACES, **options: Any) -> None:
    """Run forward and backward of a loss, at some budgets unless one is given."""
    given = inputs(dtype) | options
    upstream = options.get("grad_output", 1.0)
    for workspace in [options["workspace"]] if "workspace" in options else budgets:
        loss = linear_cross_entropy(**given | {"workspace": workspace})
        value = loss.loss if isinstance(loss, cutefce.LossOutput) else loss
        value.backward(torch.full_like(value, float(upstream)))


@few_dtypes
@pytest.mark.parametrize("name", parameters(linear_cross_entropy))
def test_arguments_of_the_loss(name: str, dtype: torch.dtype, small_tiles: PortableTiles) -> None:
    """At every budget: in the default tier the first value, and each other one at one of them."""
    for number, options in enumerate(ARGUMENTS[name]):
        some = WORKSPACES[number % 3 :][:1] if number and dtype is DTYPES[0] else WORKSPACES
        assert_no_float64(partial(step, dtype, some, **options))


@few_dtypes
@pytest.mark.parametrize("name", rest_slow(["outputs", "temperature", "gradient", "softcap"]))
def test_arguments_of_log_probs(name: str, dtype: torch.dtype, small_tiles: PortableTiles) -> None:
    def run(options: dict[str, Any]) -> None:
        options = {k: v for k, v in options.items() if k != "denominator"}
        for workspace in WORKSPACES:
            found = linear_log_probs(**inputs(dtype) | {"workspace": workspace} | options)
            total = found.log_probs.sum()
            for x in (found.lse, found.entropy):
                total = total if x is None else total + 0.1 * x.sum()
            total.backward()

    for options in ARGUMENTS[name]:
        assert_no_float64(partial(run, options))


DIVERGENCES: dict[str, list[dict[str, Any]]] = {
    "divergence": [{}],  # each is
    "beta": [{"divergence": "jsd", "beta": x} for x in (0, 0.1, 1)],
    "student_bias": [{}],
    "teacher_bias": [{"softcap": (3.0, None)}],
    "logit_scale": [{"logit_scale": 0.25}, {"logit_scale": (0.5, -2.0)}],
    "softcap": [{"softcap": 3.0}, {"softcap": (2.0, None)}],
    "temperature": [
        {"temperature": x}
        for x in (3.0, (0.7, 2.0), (0.5 + torch.rand(TOKENS), 2.0), (torch.tensor(1.5), 1))
    ],
    "reduction": [{"reduction": name} for name in ("mean", "sum", "none")],
    "ignore_index": [{"ignore_index": 3}],
    "denominator": [{"denominator": x, "reduction": "mean"} for x in (*SCALARS, 0)],
    "workspace": [{"workspace": name} for name in (*WORKSPACES, None)],
}
"""Calls with each argument of a divergence; a new one needs its own here."""


@few_dtypes
@pytest.mark.parametrize("name", parameters(linear_divergence))
def test_arguments_of_divergences(
    name: str, dtype: torch.dtype, small_tiles: PortableTiles
) -> None:
    case = heads(TOKENS, (HIDDEN, 8), VOCAB, dtype=dtype, biases=name.endswith("bias"))

    def run(options: dict[str, Any]) -> None:
        for form, workspace in zip(FORMS.values(), (*WORKSPACES, *WORKSPACES), strict=False):
            divergence(case, **{"workspace": workspace} | form | options)

    for options in DIVERGENCES[name]:
        assert_no_float64(partial(run, options))


def test_mixed_precision() -> None:
    def run() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            step(torch.float32, temperature=0.7, denominator=7)
            divergence(heads(TOKENS, (HIDDEN, 8), VOCAB), temperature=0.7)
        given = inputs(torch.bfloat16)
        given["linear_weight"] = given["linear_weight"].detach().float().requires_grad_()
        linear_cross_entropy(**given, temperature=0.7, denominator=7).backward()

    assert_no_float64(run)


def test_what_is_not_a_training_step() -> None:
    given = inputs(torch.float32)
    options: dict[str, Any] = {"temperature": 0.7, "denominator": 7}
    buffer = torch.zeros(VOCAB, HIDDEN)
    teacher = torch.randn(TOKENS, 8), torch.randn(VOCAB, 8)

    def run() -> None:
        with torch.no_grad():
            linear_cross_entropy(**given, **options)
            linear_log_probs(**given, temperature=0.7)
        for name in ("input", "linear_weight"):
            frozen = given | {name: given[name].detach()}
            linear_cross_entropy(**frozen, **options).backward()
        every = torch.full_like(given["target"], -100)
        linear_cross_entropy(**given | {"target": every}, **options).backward()
        h, w = given["input"], given["linear_weight"]
        cutefce.plan(h, w, accumulate_into=buffer, grad_output=0.5)
        cutefce.plan_divergence(h, w, *teacher, temperature=0.7)

    assert_no_float64(run)


@pairwise(
    name=["denominator", "temperature", "grad_output"],
    number=[17.5, 1 / 3, 16777217, 1e-30, 1e-50, 1e30, 1e300],
)
def test_numbers_have_the_results_of_float64_tensors(name: str, number: float) -> None:
    """Also those that float32 has not: a number is rounded once, and only 0 counts as 0."""
    results = []
    for value in (number, torch.tensor(float(number), dtype=torch.float64)):
        torch.manual_seed(0)
        given, options = inputs(torch.float32), {name: value}
        upstream = torch.tensor(1.0)
        if name == "grad_output":
            options["accumulate_into"] = torch.zeros(VOCAB, HIDDEN)
            upstream = torch.tensor(number, dtype=torch.float32)
        loss = linear_cross_entropy(**given, **options, workspace="min")
        loss.backward(upstream)
        results.append((loss, *(x.grad for x in given.values()), options.get("accumulate_into")))
    for got, want in zip(*results, strict=True):
        assert got is want or torch.equal(got.nan_to_num(7.0), want.nan_to_num(7.0))


def test_float64_inputs_have_float64_numbers() -> None:
    h, w, y = (x.detach() for x in inputs(torch.float64).values())
    for options in ({"denominator": 1 / 3}, {"temperature": 1 / 3}):
        loss = linear_cross_entropy(h, w, y, **options)
        tensors = {k: torch.tensor(x, dtype=torch.float64) for k, x in options.items()}
        assert torch.equal(loss, linear_cross_entropy(h, w, y, **tensors))
        rounded = {k: x.float().double() for k, x in tensors.items()}
        assert not torch.equal(loss, linear_cross_entropy(h, w, y, **rounded))


def test_a_scalar_of_the_host_reaches_the_device_rounded() -> None:
    """On "meta", which is another device than a CPU."""
    h = torch.empty(TOKENS, HIDDEN, device="meta")
    w = torch.empty(VOCAB, HIDDEN, device="meta")
    y = torch.empty(TOKENS, dtype=torch.long, device="meta")
    host = torch.tensor(7.5, dtype=torch.float64)

    def run() -> None:
        linear_cross_entropy(h, w, y, denominator=host)
        linear_divergence(h, w, h, w, denominator=host)

    assert_no_float64(run)
