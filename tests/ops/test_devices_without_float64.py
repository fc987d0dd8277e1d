"""Inputs that are not float64 make no float64 tensors, which some devices do not have."""

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
from tests.support.options import LOSSES
from tests.support.tiers import pairwise, rest_slow

TOKENS, HIDDEN, VOCAB = 60, 16, 100
WORKSPACES: tuple[int | str, ...] = "min", 12_000, "max"
SCALARS: list[Any] = [17.5, 17, torch.tensor(17.5), torch.tensor([17])]
OUTPUTS = "lse", "entropy", "sum_p_squared", "mean_logit", "argmax"

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
    "ignore_index": [{"ignore_index": 3, "target": torch.arange(TOKENS)}],
    "temperature": [{"temperature": x} for x in (0.7, 2, torch.tensor(0.7), torch.rand(TOKENS))],
    "return_lse": [{"return_lse": True}],
    "samples": [{"gradient": "sampled", "samples": 16, "temperature": 0.7, "denominator": 7}],
    "workspace": [{"workspace": name} for name in (*WORKSPACES, None)],
    "denominator": [{"denominator": x} for x in (*SCALARS, 0)],
    "grad_output": [
        {"accumulate_into": torch.zeros(VOCAB, HIDDEN), "grad_output": x, "reduction": name}
        for x, name in zip(SCALARS, ("mean", "sum", "mean", "sum"), strict=True)
    ],
}
"""Calls with numbers, and with arguments that are no option of a loss."""


def inputs(dtype: torch.dtype) -> dict[str, Tensor]:
    """Return hidden states, a weight and targets, of which a fifth is ignored."""
    y = torch.randint(VOCAB, (TOKENS,))
    return {
        "input": torch.randn(TOKENS, HIDDEN, dtype=dtype, requires_grad=True),
        "linear_weight": torch.randn(VOCAB, HIDDEN, dtype=dtype, requires_grad=True),
        "target": torch.where(torch.rand(TOKENS) < 0.2, -100, y),
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
@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments_of_the_loss(name: str, dtype: torch.dtype, small_tiles: PortableTiles) -> None:
    """At every budget: in the default tier the first value, and each other one at one of them."""
    for number, options in enumerate(ARGUMENTS[name]):
        some = WORKSPACES[number % 3 :][:1] if number and dtype is DTYPES[0] else WORKSPACES
        assert_no_float64(partial(step, dtype, some, **options))


@pytest.mark.parametrize("name", LOSSES)
def test_losses(name: str, small_tiles: PortableTiles) -> None:
    x = LOSSES[name](TOKENS, HIDDEN, VOCAB, dtype=torch.bfloat16)
    assert_no_float64(lambda: [x.ours(workspace=workspace) for workspace in WORKSPACES])


def test_log_probs(small_tiles: PortableTiles) -> None:
    def run() -> None:
        for workspace in WORKSPACES:
            options: dict[str, Any] = {"outputs": OUTPUTS, "temperature": 0.7}
            found = linear_log_probs(**inputs(torch.bfloat16), workspace=workspace, **options)
            (found.log_probs.sum() + found.lse.sum() + 0.1 * found.entropy.sum()).backward()

    assert_no_float64(run)


@pytest.mark.parametrize("form", FORMS)
def test_divergences(form: str, small_tiles: PortableTiles) -> None:
    case = heads(TOKENS, (HIDDEN, 8), VOCAB, dtype=torch.bfloat16, biases=True)
    options: list[dict[str, Any]] = [
        {},
        {"logit_scale": (0.5, -2.0), "softcap": (2.0, None), "denominator": 7, "reduction": "mean"},
        *({"temperature": x} for x in (3.0, (0.5 + torch.rand(TOKENS), 2.0))),
    ]
    for given, workspace in zip(options, (*WORKSPACES, 12_000), strict=True):
        given |= FORMS[form] | {"workspace": workspace}
        assert_no_float64(partial(divergence, case, **given))


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
