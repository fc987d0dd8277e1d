"""Diverged rows of a loss that ranks share end as those of torch, on every rank."""

import re
from unittest import mock

import pytest
import torch

from cutefce.ops.parallel import shard
from tests.parallel.test_vocab_parallel import joined, share_in_layout, shared
from tests.support.layouts import LAYOUTS, Layout
from tests.support.non_finite import (
    OVERFLOWS,
    ROW,
    WEIGHTS,
    assert_no_healthier,
    assert_same_kind,
    broken_case,
    healthy_case,
    names,
    torch_result,
)
from tests.support.ranks import Ranks, each_value, group
from tests.support.reference import Case
from tests.support.tiers import rest_slow

SIZES = (167, 166)


SOME_LAYOUTS = {
    name: LAYOUTS[name] for name in ("nothing kept", "some aliased, some kept", "in chunks")
}


@each_value(
    name=list(names(torch.float32)), layout=SOME_LAYOUTS, dtype=[torch.float32, torch.bfloat16]
)
def test_losses_and_gradients_end_as_those_of_torch(
    name: str, layout: Layout, dtype: torch.dtype, ranks: Ranks
) -> None:
    """The target is on either rank, as may be the logit that is not finite."""
    case = broken_case(name, dtype)
    want = torch_result(case)
    results = ranks.run(2, share_in_layout, case, SIZES, False, layout)
    for loss, dx, _ in results:
        assert_same_kind(loss, want.loss.sum() if layout.in_chunks else want.loss)
        assert_no_healthier(dx, want.dx)
    assert_no_healthier(torch.cat([dw for _, _, dw in results]), want.dw)
    if name not in WEIGHTS:
        clean = ranks.run(2, share_in_layout, healthy_case(dtype), SIZES, False, layout)
        others = torch.arange(len(case.y)) != ROW
        assert torch.equal(results[0][1][others], clean[0][1][others])


@pytest.mark.parametrize("name", rest_slow(["h NaN", *OVERFLOWS], default=3))
def test_an_ignored_row_may_hold_anything(name: str, ranks: Ranks) -> None:
    case, clean = broken_case(name, torch.float32), healthy_case(torch.float32)
    case.y[ROW] = clean.y[ROW] = -100
    for budget in ("max", "min"):
        options = {"reduction": "none", "workspace": budget}
        got, want = (
            joined(ranks.run(2, shared, each, SIZES, False, options), False)
            for each in (case, clean)
        )
        assert torch.equal(got.loss, want.loss)
        assert torch.equal(got.dx, want.dx)
        assert not got.dx[ROW].any()


def ignored_by_one(case: Case, compared: bool) -> str:
    """Return the error of a call for which rank 0 alone ignores `ROW`.

    Unless targets are `compared`, ranks know their shape alone, as on a GPU.
    """
    y = case.y.clone()  # ranks are sent the same memory
    if group(2).rank() == 0:
        y[ROW] = -100
    known = shard._known if compared else lambda x: str(getattr(x, "shape", x))
    with mock.patch.object(shard, "_known", known):
        try:
            shared(Case(case.h, case.w, y, case.upstream), SIZES, False, {})
        except (IndexError, ValueError) as error:
            return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize("compared", [True, False])
@pytest.mark.parametrize("target", [7, 300])
def test_ranks_that_ignore_different_tokens_all_raise(
    target: int, compared: bool, ranks: Ranks
) -> None:
    case = healthy_case(torch.float32)
    case.y[ROW] = target
    expected = "ValueError: target: got .* with hash" if compared else "IndexError: target: got"
    for error in ranks.run(2, ignored_by_one, case, compared):
        assert re.match(expected, error)
