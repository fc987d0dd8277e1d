"""Options and outputs that ranks share equal those of one process."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import cutefce
from tests.parallel.test_vocab_parallel import part
from tests.support.options import LOSSES, OptionsCase, options_case
from tests.support.ranks import Ranks, each_value, group, mesh
from tests.support.reference import Case
from tests.support.tiers import pairwise, rest_slow

WORKSPACES = "max", "min", 60_000
SHARINGS = {"tp": False, "sp": True}
sharings = pytest.mark.parametrize("sequence_parallel", SHARINGS.values(), ids=SHARINGS)


def halves(x: Tensor) -> tuple[int, int]:
    """Return how many rows of x each of two ranks has."""
    return len(x) - len(x) // 2, len(x) // 2


def shares(x: OptionsCase, sequence_parallel: bool) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    """Return this rank's leaves, and all arguments by name."""
    h = part(x.case.h, (len(x.case.h) // 2,) * 2) if sequence_parallel else x.case.h
    sizes = halves(x.case.w)
    own, options = Case(h, part(x.case.w, sizes), x.case.y, x.case.upstream), dict(x.options)
    if "linear_bias" in options:
        options["linear_bias"] = part(options["linear_bias"], sizes)
    local = OptionsCase(own, options)
    leaves = local.leaves
    sharing = {"group": group(2), "shards": sizes, "sequence_parallel": sequence_parallel}
    return leaves, local.with_leaves(leaves) | sharing


def losses(x: OptionsCase, sequence_parallel: bool | None) -> list[tuple[Tensor, ...]]:
    """Return loss and gradients of every reduction and workspace; of one process if None."""
    results = []
    for reduction in ("mean", "none"):
        for workspace in WORKSPACES:
            leaves, options = arguments(x, sequence_parallel)
            more: dict[str, Any] = {"reduction": reduction, "workspace": workspace}
            target = None if "target_indices" in options else x.case.y
            loss = cutefce.linear_cross_entropy(leaves[0], leaves[1], target, **options, **more)
            upstream = x.case.upstream.to(loss.dtype) if loss.ndim else None
            results.append((loss.detach(), *torch.autograd.grad(loss, leaves, upstream)))
    return results


def arguments(
    x: OptionsCase, sequence_parallel: bool | None
) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    """Return leaves and arguments of this rank, or of one process if None."""
    if sequence_parallel is not None:
        return shares(x, sequence_parallel)
    leaves = x.leaves
    return leaves, x.with_leaves(leaves)


def assert_equal_one(
    results: list[list[tuple[Tensor, ...]]],
    wanted: list[tuple[Tensor, ...]],
    sequence_parallel: bool,
    leaves: int,
) -> None:
    """Assert that ranks' values are the same, and their parts together those of one process."""
    for first, second, want in zip(*results, wanted, strict=True):
        values = len(want) - leaves
        for a, b, one in zip(first[:values], second[:values], want[:values], strict=True):
            assert torch.equal(a, b)
            torch.testing.assert_close(a, one)
        if sequence_parallel:
            torch.testing.assert_close(torch.cat([first[values], second[values]]), want[values])
        else:
            assert torch.equal(first[values], second[values])
            torch.testing.assert_close(first[values], want[values])
        for i in range(values + 1, len(want)):  # weight and bias
            assert (len(first[i]), len(second[i])) == halves(want[i])
            torch.testing.assert_close(torch.cat([first[i], second[i]]), want[i])


IN_RANKS = {name: make for name, make in LOSSES.items() if "probabilities" not in name}


@each_value(make=IN_RANKS, sequence_parallel=SHARINGS)
def test_losses_equal_one_process(
    make: Callable[..., OptionsCase], sequence_parallel: bool, ranks: Ranks
) -> None:
    x = make(60, 16, 203, dtype=torch.float64, ignored=0.3)
    results = ranks.run(2, losses, x, sequence_parallel)
    assert_equal_one(results, losses(x, None), sequence_parallel, len(x.leaves))


@sharings
def test_a_mean_over_weights_that_add_up_to_0_is_infinite(
    sequence_parallel: bool, ranks: Ranks
) -> None:
    x = options_case(["token_weights"], 60, 16, 203, dtype=torch.float64, ignored=0)
    weights = torch.tensor([1.0, -1.0, 2.0, -2.0], dtype=torch.float64).repeat(15)
    x.options["token_weights"] = weights
    wanted = losses(x, None)
    for first, second, want in zip(
        *ranks.run(2, losses, x, sequence_parallel), wanted, strict=True
    ):
        if want[0].ndim == 0:
            assert want[0].isinf() and first[0] == second[0] == want[0]


def added(
    x: OptionsCase, sequence_parallel: bool | None, grad_output: float | None = None
) -> list[tuple[Tensor, ...]]:
    """Return losses, dX and buffers to which each workspace has added dW twice."""
    results: list[tuple[Tensor, ...]] = []
    for workspace in WORKSPACES:
        leaves, options = arguments(x, sequence_parallel)
        h, w = leaves
        buffer = torch.ones(w.shape, dtype=torch.float32 if w.dtype.itemsize == 2 else w.dtype)
        for _ in range(2):
            given: dict[str, Any] = {"workspace": workspace, "grad_output": grad_output} | options
            loss = cutefce.linear_cross_entropy(h, w, x.case.y, accumulate_into=buffer, **given)
            loss.backward(loss.new_tensor(grad_output or 1))
        assert w.grad is None and h.grad is not None
        results.append((loss.detach(), h.grad, buffer))
    return results


@each_value(dtype=[torch.float64, torch.bfloat16], sequence_parallel=SHARINGS)
def test_sums_equal_one_process(dtype: torch.dtype, sequence_parallel: bool, ranks: Ranks) -> None:
    x = options_case([], 60, 16, 203, dtype=dtype, ignored=0.3)
    results = ranks.run(2, added, x, sequence_parallel)
    assert_equal_one(results, added(x, None), sequence_parallel, 2)


@pytest.mark.parametrize("sequence_parallel", rest_slow({"sp": True, "tp": False}))
def test_sums_of_the_forward_equal_one_process(sequence_parallel: bool, ranks: Ranks) -> None:
    x = options_case([], 1100, 16, 203, dtype=torch.float64, ignored=0.3)
    given: dict[str, Any] = {"accumulate_into": torch.zeros_like(x.case.w), "grad_output": 0.25}
    plans = [cutefce.plan(*x.leaves, workspace=each, **given) for each in WORKSPACES]
    assert {plan.adds_in_forward for plan in plans} == {True, False}
    results = ranks.run(2, added, x, sequence_parallel, 0.25)
    assert_equal_one(results, added(x, None, 0.25), sequence_parallel, 2)
    for failed, message in ranks.outcomes(2, one_gives_another, x):
        assert failed and "grad_output: got" in message


def one_gives_another(x: OptionsCase) -> None:
    added(x, False, 0.25 * (1 + dist.get_rank()))


def test_a_buffer_of_one_rank_alone_raises_on_all(ranks: Ranks) -> None:
    x = options_case([], 60, 16, 203)
    for failed, message in ranks.outcomes(2, one_sided, x):
        assert failed and "accumulate_into given: got" in message


def one_sided(x: OptionsCase) -> None:
    leaves, options = shares(x, False)
    buffer = torch.zeros_like(leaves[1]) if dist.get_rank() else None
    cutefce.linear_cross_entropy(*leaves, x.case.y, accumulate_into=buffer, **options)


@each_value(
    make={
        "together": LOSSES["class indices, smoothing and all factors"],
        "softcap": LOSSES["softcap"],
        "soft": LOSSES["soft targets, alone"],
    },
    sequence_parallel=SHARINGS,
)
def test_16_bit_results_are_near_those_of_one_process(
    make: Callable[..., OptionsCase], sequence_parallel: bool, ranks: Ranks
) -> None:
    """Exponentials of soft targets are stored as 0 by the ranks that own them."""
    x = make(60, 16, 203, dtype=torch.bfloat16, ignored=0.3)
    results, wanted = ranks.run(2, losses, x, sequence_parallel), losses(x, None)
    for first, second, want in zip(*results, wanted, strict=True):
        assert torch.equal(first[0], second[0])
        torch.testing.assert_close(first[0], want[0], rtol=1e-5, atol=1e-5)
        dx = torch.cat([first[1], second[1]]) if sequence_parallel else first[1]
        for got, one in zip((dx, torch.cat([first[2], second[2]])), want[1:3], strict=True):
            error = float((got.double() - one.double()).norm() / one.double().norm())
            assert error <= torch.finfo(torch.bfloat16).eps


def on_gpu(x: OptionsCase, sequence_parallel: bool | None) -> list[tuple[Tensor, ...]]:
    """Return the losses and gradients of this rank's GPU."""
    case = Case(*(tensor.cuda() for tensor in (x.case.h, x.case.w, x.case.y, x.case.upstream)))
    options = {k: v.cuda() if isinstance(v, Tensor) else v for k, v in x.options.items()}
    found = losses(OptionsCase(case, options), sequence_parallel)
    return [(*(tensor.cpu() for tensor in row),) for row in found]


@pytest.mark.gpu
@pairwise(make=IN_RANKS, sequence_parallel=SHARINGS, tokens={"all rows": 60, "counted rows": 1200})
def test_gpus_share_every_option(
    make: Callable[..., OptionsCase], sequence_parallel: bool, tokens: int, gpu_ranks: Ranks
) -> None:
    if len(gpu_ranks.pipes) < 2:
        pytest.skip("needs 2 GPUs")
    x = make(tokens, 16, 333, dtype=torch.bfloat16, ignored=0.3)
    (wanted,) = gpu_ranks.run(1, on_gpu, x, None)
    first, second = gpu_ranks.run(2, on_gpu, x, sequence_parallel)
    for one, a, b in zip(wanted, first, second, strict=True):
        assert torch.equal(a[0], b[0])
        torch.testing.assert_close(a[0], one[0], rtol=1e-5, atol=1e-5)
        parts = [torch.cat([a[i], b[i]]) for i in range(1, len(one))]
        if not sequence_parallel:
            assert torch.equal(a[1], b[1])
            parts[0] = a[1]
        for got, want in zip(parts, one[1:], strict=True):
            error = float((got.double() - want.double()).norm() / want.double().norm())
            assert error <= torch.finfo(torch.bfloat16).eps


def placed(x: OptionsCase, sharded_tokens: bool) -> list[Tensor]:
    """Return loss and gradients of distributed tensors, gathered."""
    tp = mesh()["tp"]
    placement = Shard(0) if sharded_tokens else Replicate()
    plain, options = x.leaves, dict(x.options)
    placements = [placement, Shard(0), Shard(0)]
    leaves: list[Any] = [
        distribute_tensor(leaf.detach(), tp, [each]).requires_grad_()
        for leaf, each in zip(plain, placements, strict=True)
    ]
    options["linear_bias"] = leaves[2]
    for name in ("weight", "temperature"):
        options[name] = distribute_tensor(options[name], tp, [Replicate()])
    loss = cutefce.linear_cross_entropy(leaves[0], leaves[1], x.case.y, **options)
    loss.backward()
    results = [loss.detach()]
    for leaf in leaves:
        assert isinstance(leaf.grad, DTensor) and leaf.grad.placements == leaf.placements
        results.append(leaf.grad.full_tensor())
    return results


@sharings
def test_distributed_options(sequence_parallel: bool, ranks: Ranks) -> None:
    """A bias is sharded as the weight is; values of tokens and classes may be replicated."""
    names = ["linear_bias", "weight", "label_smoothing", "temperature (N,)"]
    x = options_case(names, 60, 16, 203, dtype=torch.float64, ignored=0.3)
    wanted = x.ours(reduction="mean")
    for results in ranks.run(4, placed, x, sequence_parallel):
        torch.testing.assert_close(results, [*wanted])
