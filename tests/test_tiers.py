"""The default tier sees each pair of a grid's values."""

import itertools

import pytest

from tests.support.tiers import covering_pairs, pairwise, rest_slow


@pytest.mark.parametrize("sizes", [(3,), (2, 5), (4, 3, 2), (5, 4, 3, 2, 2)], ids=str)
def test_each_pair_is_in_few_places(sizes: tuple[int, ...]) -> None:
    chosen = covering_pairs(sizes)
    for (i, first), (j, second) in itertools.combinations(enumerate(sizes), 2):
        for pair in itertools.product(range(first), range(second)):
            assert any((places[i], places[j]) == pair for places in chosen)
    largest = sorted(sizes)[-2:]
    least = largest[0] * largest[-1] if len(sizes) > 1 else sizes[0]
    assert len(chosen) <= 1.5 * least


def test_the_rest_of_a_grid_is_slow() -> None:
    params = pairwise(a=[1, 2], b={"x": 3, "y": 4}, c=[5, 6]).args[1]
    assert [param.id for param in params][:2] == ["1-x-5", "1-x-6"]
    assert sum(not param.marks for param in params) == 4
    assert [bool(param.marks) for param in rest_slow([1, 2, 3], 2)] == [False, False, True]
