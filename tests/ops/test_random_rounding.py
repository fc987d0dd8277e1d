"""dW's sums in bfloat16, rounded at random: `accum_dtype`."""

from typing import Any

import pytest
import torch
from torch import Tensor

import cutefce
from bench.harness.accuracy import relative_error
from cutefce.ops.primitives.portable_gradients import scale_at_random
from cutefce.ops.rows.kept_sums import round_at_random_
from tests.support.layouts import Layout, pinned, pinned_plan
from tests.support.reference import Case, random_case
from tests.support.tiers import rest_slow


def rounded(values: Tensor, seed: int) -> Tensor:
    """Return float32 `values` (N, D) rounded at random, as bfloat16."""
    kept = torch.empty_like(values, dtype=torch.bfloat16)
    seeds, rows = torch.tensor([seed], dtype=torch.int32), torch.arange(len(values)).int()
    round_at_random_(kept.view(torch.int16), values, rows, seeds)
    return kept


def seeds(count: int) -> list[int]:
    return torch.randint(1 << 31, (count,), generator=torch.Generator().manual_seed(0)).tolist()


@pytest.mark.parametrize("hidden", [1, 7, 64])
def test_the_mean_over_seeds_is_the_number(hidden: int) -> None:
    values, repeats = torch.randn(4000 // hidden, hidden), 500
    results = torch.stack([rounded(values, seed) for seed in seeds(repeats)]).double()
    unit = 2.0 ** (values.double().abs().log2().floor() - 7)
    assert ((results - values).abs() < unit).all()  # one of the two numbers beside it
    errors = (results.mean(0) - values) / unit
    assert float(errors.square().mean().sqrt()) <= 1.2 * 6**-0.5 / repeats**0.5
    assert float(errors.abs().max()) <= 5.5 * 0.5 / repeats**0.5


def test_random_bits_of_places_are_independent() -> None:
    """Of neighbours, of the same place with other seeds, and in the size of each bit."""
    values = torch.full((256, 256), 1.0 + 2**-8)  # between two numbers
    ups = torch.stack([rounded(values, seed) > 1 for seed in seeds(16)]).double() - 0.5
    limit = 5 * 0.25 / (15 * 255 * 255) ** 0.5
    pairs = {
        "columns": (ups[:, :, 1:], ups[:, :, :-1]),
        "rows": (ups[:, 1:], ups[:, :-1]),
        "seeds": (ups[1:], ups[:-1]),
    }
    for a, b in pairs.values():
        assert abs(float((a * b).mean())) <= limit
    assert abs(float(ups.mean())) <= 2 * limit


def test_numbers_of_16_bits_and_no_numbers_stay() -> None:
    values = torch.tensor([[1.5, -0.0, 2**-133, torch.inf, -torch.inf, torch.nan, 3e38, -7.0]])
    exact = values.bfloat16()
    for seed in seeds(20):
        torch.testing.assert_close(
            rounded(exact.float(), seed), exact, rtol=0, atol=0, equal_nan=True
        )


def test_a_factor_is_rounded_at_random_too() -> None:
    sums, results = torch.randn(50, 40).bfloat16(), []
    for seed in seeds(400):
        kept = sums.clone()
        scale_at_random(kept, torch.tensor(0.37), torch.tensor([seed], dtype=torch.int32))
        results.append(kept.double())
    want = sums.float() * 0.37
    nearest = relative_error(want.bfloat16(), want.double())
    assert relative_error(torch.stack(results).mean(0), want.double()) <= 0.15 * nearest
    kept = sums.clone()
    scale_at_random(kept, torch.tensor(1.0), torch.tensor([5], dtype=torch.int32))
    assert torch.equal(kept, sums)


def grad_weight(case: Case, chunk: int, low_bits: int) -> Tensor:
    """Return dW of a sum of losses over chunks."""
    with pinned(Layout(in_chunks=True, kept=1024, chunk=chunk, low_bits=low_bits)):
        return call(case)


@pytest.mark.parametrize("chunk", rest_slow([100, 600, 37]))
def test_the_error_of_the_mean_of_64_steps_is_an_eighth(chunk: int, device: str) -> None:
    """Beside sums in 24 bits, which differ by the rounding of these alone."""
    case = random_case(600, 32, 900, dtype=torch.bfloat16, device=device)
    exact = grad_weight(case, chunk, 8).double()
    torch.manual_seed(0)
    steps = [grad_weight(case, chunk, 0).double() for _ in range(64)]
    # of the nearest numbers; 24 bits are rounded once
    rounding = 2.0**-8 * 3**-0.5 / 2**0.5
    one = sum(relative_error(step, exact) for step in steps) / 64
    mean = relative_error(sum(steps[1:], steps[0]) / 64, exact)
    assert mean <= 1.15 * (one**2 / 64 + rounding**2) ** 0.5
    assert relative_error(steps[0], steps[1]) > 0


def test_the_seed_of_torch_repeats_a_step(device: str) -> None:
    case = random_case(600, 32, 900, dtype=torch.bfloat16, device=device)
    results = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        results.append(grad_weight(case, 100, 0))
    assert torch.equal(*results[:2]) and not torch.equal(*results[1:])


def call(case: Case, **options: Any) -> Tensor:
    """Return dW of a call that has a plan of six chunks without low bits, if it asks for them."""
    leaf = case.w.detach().requires_grad_()
    loss = cutefce.linear_cross_entropy(case.h, leaf, case.y, reduction="sum", **options)
    return torch.autograd.grad(loss, leaf)[0]


@pytest.mark.slow
def test_the_option_takes_sums_of_16_bits() -> None:
    case = random_case(6144, 32, 8000, dtype=torch.bfloat16)
    leaf = case.w.detach().requires_grad_()
    options: dict[str, Any] = {"accum_dtype": torch.bfloat16, "workspace": "min"}
    plan = cutefce.plan(case.h, leaf, **options)
    exact = cutefce.plan(case.h, leaf, workspace="min")
    assert "bfloat16" in str(plan) and "bfloat16" not in str(exact)
    assert plan.in_forward and plan.low_bits == 0 and exact.low_bits > 0
    assert exact.workspace_bytes - plan.workspace_bytes == 8000 * 32 * exact.low_bits // 8
    torch.manual_seed(0)
    first = call(case, **options)
    torch.manual_seed(0)
    with pinned_plan(plan):
        assert torch.equal(call(case), first)
    assert not torch.equal(call(case, **options), first)
    head = cutefce.LinearCrossEntropyLoss(
        32, 8000, dtype=torch.bfloat16, reduction="sum", **options
    )
    head.load_state_dict({"linear.weight": case.w})
    torch.manual_seed(0)
    head(case.h, case.y).backward()
    assert head.linear.weight.grad is not None and torch.equal(head.linear.weight.grad, first)


def test_a_plan_of_all_tokens_at_once_ignores_it() -> None:
    case = random_case(200, 32, 900, dtype=torch.bfloat16)
    options: dict[str, Any] = {"workspace": "max"}
    assert torch.equal(call(case, **options), call(case, accum_dtype=torch.bfloat16, **options))


def test_a_compiled_call_draws_from_the_same_generator() -> None:
    case = random_case(3000, 32, 5000, dtype=torch.bfloat16)
    options: dict[str, Any] = {"accum_dtype": torch.bfloat16, "workspace": "min"}
    step = torch.compile(
        lambda h, w, y: cutefce.linear_cross_entropy(h, w, y, reduction="sum", **options),
        fullgraph=True,
        backend="aot_eager",
    )
    results = []
    for run in (step, step, None):
        torch.manual_seed(3)
        leaf = case.w.detach().requires_grad_()
        if run is None:
            results.append(call(case, **options))
        else:
            results.append(torch.autograd.grad(run(case.h, leaf, case.y), leaf)[0])
    assert torch.equal(results[0], results[1]) and torch.equal(results[1], results[2])
