"""The tiers of the tests: what `make test` runs of a grid, and what only `make test-all` does."""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pytest

Values = Mapping[str, Any] | Sequence[Any]
"""The values of an axis: by their names, or named by `str`."""


def rest_slow(values: Values, default: int = 1) -> list[Any]:
    """Return parameters of which all but the first `default` are slow."""
    return [
        pytest.param(value, id=name, marks=[pytest.mark.slow] if number >= default else [])
        for number, (name, value) in enumerate(named(values))
    ]


def pairwise(**axes: Values) -> pytest.MarkDecorator:
    """Parametrize by the product of axes; what it takes to see each pair of values is not slow.

    Most faults need two things to meet: a strategy and an option, a dtype and a size.
    """
    of_axes = [named(values) for values in axes.values()]
    default = covering_pairs([len(values) for values in of_axes])
    params = []
    for places in itertools.product(*(range(len(values)) for values in of_axes)):
        chosen = [values[place] for values, place in zip(of_axes, places, strict=True)]
        marks = [] if places in default else [pytest.mark.slow]
        name = "-".join(name for name, _ in chosen)
        params.append(pytest.param(*(value for _, value in chosen), id=name, marks=marks))
    return pytest.mark.parametrize(list(axes), params)


def pairwise_of(few: Mapping[str, Values], **axes: Values) -> pytest.MarkDecorator:
    """Do so with the pairs of a `few` values of some axes; all others are slow."""
    default = {x.id for x in pairwise(**{**axes, **few}).args[1] if not x.marks}
    params = [
        pytest.param(*x.values, id=x.id, marks=[] if x.id in default else [pytest.mark.slow])
        for x in pairwise(**axes).args[1]
    ]
    return pytest.mark.parametrize(list(axes), params)


def covering_pairs(sizes: Sequence[int]) -> set[tuple[int, ...]]:
    """Return few places of a grid of `sizes` among which each pair of two axes' values is.

    Each place is the one of the most pairs that are still missing: the greedy cover.
    """
    grid = {places: _pairs(places) for places in itertools.product(*map(range, sizes))}
    missing = set().union(*grid.values())
    chosen = set()
    while missing:
        best = max(grid, key=lambda places: len(grid[places] & missing))
        chosen.add(best)
        missing -= grid.pop(best)
    return chosen or set(itertools.product(*map(range, sizes)))


def _pairs(places: tuple[int, ...]) -> set[tuple[tuple[int, int], ...]]:
    return set(itertools.combinations(enumerate(places), 2))


def named(values: Values) -> list[tuple[str, Any]]:
    """Return the values of an axis with their names."""
    pairs: Iterable[tuple[str, Any]] = (
        values.items() if isinstance(values, Mapping) else ((str(value), value) for value in values)
    )
    return list(pairs)
