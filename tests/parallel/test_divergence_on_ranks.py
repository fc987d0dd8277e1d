"""Divergences of heads whose vocabulary is sharded equal those of one process."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import cutefce
from tests.parallel.test_vocab_parallel import part
from tests.support.divergence import FORMS, Heads, heads
from tests.support.ranks import Ranks, each_value, group
from tests.support.tiers import rest_slow

SHARDS = {"2 ranks": (67, 66), "2 ranks, very unequal": (1, 132), "4 ranks": (40, 50, 3, 40)}
OPTIONS: dict[str, Any] = {"softcap": (3.0, None), "logit_scale": (0.5, 2.0), "temperature": 1.5}


def results(
    case: Heads, sizes: tuple[int, ...] | None, form: dict[str, Any]
) -> list[tuple[Tensor, ...]]:
    """Return values and gradients of reductions and workspaces, of this rank's classes.

    The values are divergences and overlaps.
    """
    sharing: dict[str, Any] = {}
    h_s, w_s, h_t, w_t = case.tensors
    biases = dict(case.biases)
    if sizes is not None:
        w_s, w_t = (part(x.detach(), sizes).requires_grad_() for x in (w_s, w_t))
        biases = {k: part(x.detach(), sizes).requires_grad_() for k, x in biases.items()}
        sharing = {"group": group(len(sizes)), "shards": sizes}
    leaves = [h_s, w_s, h_t, w_t, *biases.values()]
    found = []
    for reduction in ("mean", "none"):
        for workspace in ("max", "min"):
            more = {"reduction": reduction, "workspace": workspace, **OPTIONS, **form}
            loss, overlap = cutefce.linear_divergence(
                h_s, w_s, h_t, w_t, case.target, return_overlap=True, **biases, **more, **sharing
            )
            upstream = case.upstream.to(loss.dtype) if loss.ndim else None
            values = torch.cat([loss.detach().reshape(-1), overlap])
            found.append((values, *torch.autograd.grad(loss, leaves, upstream)))
    return found


@each_value(form=FORMS, sizes=SHARDS)
def test_divergences_equal_one_process(
    sizes: tuple[int, ...], form: dict[str, Any], ranks: Ranks
) -> None:
    case = heads(60, (16, 12), 133, dtype=torch.float64, biases=True)
    shares = ranks.run(len(sizes), results, case, sizes, form)
    for *every, want in zip(*shares, results(case, None, form), strict=True):
        for number, one in enumerate(want):
            parts = [each[number] for each in every]
            if number in (0, 1, 3):  # the divergence, overlaps, and the gradients of hidden states
                assert all(torch.equal(x, parts[0]) for x in parts)
                torch.testing.assert_close(parts[0], one, rtol=1e-10, atol=1e-13)
            else:
                torch.testing.assert_close(torch.cat(parts), one, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("dtype", rest_slow([torch.bfloat16, torch.float32]))
def test_shared_divergences_are_rounded_once(dtype: torch.dtype, ranks: Ranks) -> None:
    case, form = heads(60, (16, 12), 133, dtype=dtype), {"divergence": "jsd"}
    shares = ranks.run(2, results, case, (67, 66), form)
    for first, second, want in zip(*shares, results(case, None, form), strict=True):
        torch.testing.assert_close(first[0], want[0], rtol=1e-5, atol=1e-6)
        for i, parts in enumerate(zip(first[1:], second[1:], strict=True), 1):
            got = parts[0] if i in (1, 3) else torch.cat(parts)
            error = (got.double() - want[i].double()).norm() / want[i].double().norm()
            assert float(error) <= 8 * torch.finfo(dtype).eps


def test_ignored_tokens_of_ranks_may_hold_anything(ranks: Ranks) -> None:
    case = heads(60, (16, 12), 133, dtype=torch.float64, ignored=0.4)
    want = ranks.run(2, results, case, (67, 66), {})
    with torch.no_grad():
        case.tensors[0][case.target == -100] = torch.nan
    for got, clean in zip(ranks.run(2, results, case, (67, 66), {}), want, strict=True):
        for a, b in zip(got, clean, strict=True):
            assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def another(case: Heads, what: str) -> None:
    """Call with an argument that differs on rank 1."""
    h_s, w_s, h_t, w_t = (part(x, (67, 66)) if len(x) == 133 else x for x in case.tensors)
    is_odd, target = dist.get_rank() == 1, case.target
    options: dict[str, Any] = {"divergence": "jsd", "group": group(2), "shards": (67, 66)}
    if is_odd and what == "beta":
        options["beta"] = 0.25
    if is_odd and what == "target":
        target = target.roll(1)
    if is_odd and what == "teacher_input":
        h_t = h_t[:, :5]
    cutefce.linear_divergence(h_s, w_s, h_t, w_t, target, **options)


@pytest.mark.parametrize("what", ["beta", "target", "teacher_input"])
def test_ranks_that_differ_raise_on_all(what: str, ranks: Ranks) -> None:
    case = heads(60, (16, 12), 133)
    for failed, message in ranks.outcomes(2, another, case, what):
        assert failed and f"{what}: got" in message
