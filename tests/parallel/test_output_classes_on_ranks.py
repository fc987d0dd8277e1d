"""Log-probabilities and outputs of tokens whose classes different ranks own."""

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

import cutefce
from tests.parallel.test_options_on_ranks import assert_equal_one, shares
from tests.support.outputs import OUTPUTS, ValuesCase, values_case
from tests.support.ranks import Ranks, each_value, group

Results = list[tuple[Any, ...]]


def values(x: ValuesCase, sequence_parallel: bool | None) -> Results:
    """Return values and gradients of every workspace; of one process if None.

    Values are those of the most likely classes, too, where calls have them.
    """
    more = {} if "kept_classes" in x.own.options else {"top_k": 5}
    results: Results = []
    for workspace in ("min", "max", 60_000):
        leaves, own, sharing = x.own.leaves, x, dict[str, Any]()
        if sequence_parallel is not None:
            leaves, options = shares(x.own, sequence_parallel)
            names = "group", "shards", "sequence_parallel"
            sharing = {name: options.pop(name) for name in names}
            own = replace(x, own=replace(x.own, options=options))
        found = own.values(leaves, workspace=workspace, **sharing, **more)
        gradients = torch.autograd.grad(x.total(found), leaves)
        results.append((*(v.detach() for v in found if v is not None), *gradients))
    return results


TRANSFORMS = {
    "plain": [],
    "linear_bias": ["linear_bias"],
    "scale and temperature": ["negative logit_scale", "temperature (N,)"],
    "all": ["linear_bias", "logit_scale", "softcap", "temperature (N,)"],
    "kept_classes": ["temperature (N,)", "kept_classes"],
    "logit_floor": ["temperature (N,)", "logit_floor"],
}


@each_value(
    names=TRANSFORMS, classes={"a class": None, "6": 6, "none": 0}, sequence_parallel=[False, True]
)
def test_values_equal_one_process(
    names: list[str], classes: int | None, sequence_parallel: bool, ranks: Ranks
) -> None:
    x = values_case(names, classes, 60, 16, 333, outputs=OUTPUTS, dtype=torch.float64)
    results = ranks.run(2, values, x, sequence_parallel)
    assert_equal_one(results, values(x, None), sequence_parallel, len(x.own.leaves))


def most_likely(floor: bool, is_shared: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the eight most likely classes of 15, of which each of three ranks has five."""
    torch.manual_seed(0)
    h, w, y = torch.randn(40, 8), torch.randn(15, 8), torch.arange(40) % 15
    below_four = (h @ w.t()).topk(5).values[:, 3:].mean(1)
    more: dict[str, Any] = {"logit_floor": below_four} if floor else {}
    if is_shared:
        rank, more["group"] = dist.get_rank(), group(3)
        w = w[5 * rank : 5 * rank + 5]
    found = cutefce.linear_log_probs(h, w, y, top_k=8, **more)
    assert found.top_classes is not None and found.top_log_probs is not None
    return found.top_classes, found.top_log_probs


@each_value(floor=[False, True])
def test_ranks_with_fewer_classes_than_are_asked_for(floor: bool, ranks: Ranks) -> None:
    """What fills up a rank's list is no target of another rank."""
    classes, log_probs = most_likely(floor, False)
    for own_classes, own_log_probs in ranks.run(3, most_likely, floor, True):
        assert torch.equal(own_classes, classes)
        torch.testing.assert_close(own_log_probs, log_probs)


def test_ranks_are_as_accurate_as_one(ranks: Ranks) -> None:
    x = values_case([], 6, 60, 16, 333, dtype=torch.bfloat16)
    for a, b in zip(*ranks.run(2, values, x, False), strict=True):
        assert torch.equal(a[0], b[0])
        found = replace_log_probs(x, a[0])
        x.check((found, (a[-2], torch.cat([a[-1], b[-1]]))))


def replace_log_probs(x: ValuesCase, log_probs: torch.Tensor) -> Any:
    """Return values of the case with these log-probabilities."""
    return x.values(x.own.leaves)._replace(log_probs=log_probs)
