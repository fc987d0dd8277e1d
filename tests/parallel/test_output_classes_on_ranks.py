"""Log-probabilities of classes that different ranks own."""

import torch
from torch import Tensor

import cutefce
from tests.parallel.test_options_on_ranks import assert_equal_one, shares
from tests.support.output_classes import ClassesCase, classes_case
from tests.support.ranks import Ranks, each_value


def values(x: ClassesCase, sequence_parallel: bool | None) -> list[tuple[Tensor, ...]]:
    """Return values and gradients of every workspace; of one process if None."""
    results = []
    for workspace in ("min", "max"):
        leaves = x.own.leaves
        options = x.own.with_leaves(leaves)
        if sequence_parallel is not None:
            leaves, options = shares(x.own, sequence_parallel)
        found = cutefce.linear_log_probs(
            leaves[0],
            leaves[1],
            target_indices=x.index,
            outputs=x.outputs,
            workspace=workspace,
            **options,
        )
        total = x.total([getattr(found, name) for name in x.upstream])
        gradients = torch.autograd.grad(total, leaves)
        results.append((found.log_probs.detach(), *gradients))
    return results


@each_value(
    names={"plain": [], "transformed": ["linear_bias", "temperature (N,)", "softcap"]},
    sequence_parallel=[False, True],
)
def test_values_equal_one_process(names: list[str], sequence_parallel: bool, ranks: Ranks) -> None:
    outputs = ("lse",) if names else ("lse", "entropy")
    x = classes_case(names, 6, 60, 16, 333, outputs=outputs, dtype=torch.float64)
    results = ranks.run(2, values, x, sequence_parallel)
    assert_equal_one(results, values(x, None), sequence_parallel, len(x.own.leaves))


def narrow_values(x: ClassesCase) -> list[tuple[Tensor, ...]]:
    return values(x, False)


def test_ranks_are_as_accurate_as_one(ranks: Ranks) -> None:
    x = classes_case([], 6, 60, 16, 333, dtype=torch.bfloat16)
    first, second = ranks.run(2, narrow_values, x)
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a[0], b[0])
        x.check(([a[0]], [a[1], torch.cat([a[2], b[2]])]))
