"""The default tier sees each pair of a grid's values, the full one each triple."""

import itertools
import math

import pytest

from tests.support import tiers
from tests.support.tiers import covering, pairwise, rest_slow


@pytest.mark.parametrize("strength", [2, 3])
@pytest.mark.parametrize("sizes", [(3,), (2, 5), (4, 3, 2), (5, 4, 3, 2, 2)], ids=str)
def test_values_of_some_axes_meet_in_few_places(sizes: tuple[int, ...], strength: int) -> None:
    strength = min(strength, len(sizes))
    chosen = covering(sizes, strength)
    for axes in itertools.combinations(range(len(sizes)), strength):
        for values in itertools.product(*(range(sizes[axis]) for axis in axes)):
            assert any(tuple(places[axis] for axis in axes) == values for places in chosen)
    least = math.prod(sorted(sizes)[-strength:])
    assert len(chosen) <= 1.5 * least


def test_the_rest_of_a_grid_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiers, "_leaves_out_slow", False)
    params = pairwise(a=[1, 2], b={"x": 3, "y": 4}, c=[5, 6]).args[1]
    assert [param.id for param in params][:2] == ["1-x-5", "1-x-6"]
    assert sum(not param.marks for param in params) == 4
    assert [bool(param.marks) for param in rest_slow([1, 2, 3], 2)] == [False, False, True]
