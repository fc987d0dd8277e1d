"""The tiers of the tests: what `make test` runs of a grid, and what only `make test-all` does."""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pytest
import torch

Values = Mapping[str, Any] | Sequence[Any]
"""The values of an axis: by their names, or named by `str`."""


_leaves_out_slow = False


def leave_out_slow() -> None:
    """Make no slow cases of grids, where none runs."""
    global _leaves_out_slow
    _leaves_out_slow = True


def rest_slow(values: Values, default: int = 1) -> list[Any]:
    """Return parameters of which all but the first `default` are slow."""
    return [
        pytest.param(value, id=name, marks=[pytest.mark.slow] if number >= default else [])
        for number, (name, value) in enumerate(named(values))
    ]


def pairwise(**axes: Values) -> pytest.MarkDecorator:
    """Parametrize by cases of a grid that have each pair of values of two axes.

    Cases with each triple of values are slow. Most faults need two things to meet: a layout and an
    option, a dtype and a size; the rest need three.
    """
    return pairwise_of({}, **axes)


def pairwise_of(few: Mapping[str, Values], **axes: Values) -> pytest.MarkDecorator:
    """Do so with the pairs of a `few` values, by their names, of some axes; all others are slow."""
    default = _covering({**axes, **few}, 2)
    rest = set() if _leaves_out_slow else _covering(axes, 3)
    params = []
    for case in itertools.product(*(named(values) for values in axes.values())):
        names = tuple(name for name, _ in case)
        if names in default or names in rest:
            marks = [] if names in default else [pytest.mark.slow]
            chosen = (value for _, value in case)
            params.append(pytest.param(*chosen, id="-".join(names), marks=marks))
    return pytest.mark.parametrize(list(axes), params)


def _covering(axes: Mapping[str, Values], strength: int) -> set[tuple[str, ...]]:
    """Return the names of the values of `covering` places."""
    names = [[name for name, _ in named(values)] for values in axes.values()]
    places = covering([len(values) for values in names], strength)
    return {tuple(map(list.__getitem__, names, place)) for place in places}


def covering(sizes: Sequence[int], strength: int) -> set[tuple[int, ...]]:
    """Return few places of a grid of `sizes`, among which all values of `strength` axes meet.

    Each place is the one with the most that is still missing: the greedy cover.
    """
    strength = min(strength, len(sizes))
    grid = torch.cartesian_prod(*map(torch.arange, sizes)).view(-1, len(sizes))
    # each choice of axes has a number for each of their values
    met, first = [], 0
    for axes in itertools.combinations(range(len(sizes)), strength):
        steps = [math.prod(sizes[axis] for axis in axes[i + 1 :]) for i in range(strength)]
        met.append(first + grid[:, list(axes)] @ torch.tensor(steps))
        first += math.prod(sizes[axis] for axis in axes)
    covered, missing = torch.stack(met, 1), bytearray(b"\1" * first)
    counted, rows, chosen = torch.frombuffer(missing, dtype=torch.uint8), covered.tolist(), set()
    # what a place covers only shrinks: none has more than this after a pass
    for most in range(len(met), 0, -1):
        for number in (counted[covered].sum(1) == most).nonzero()[:, 0].tolist():
            if sum(map(missing.__getitem__, rows[number])) == most:
                chosen.add((*grid[number].tolist(),))
                for place in rows[number]:
                    missing[place] = 0
    return chosen


def named(values: Values) -> list[tuple[str, Any]]:
    """Return the values of an axis with their names."""
    pairs: Iterable[tuple[str, Any]] = (
        values.items() if isinstance(values, Mapping) else ((str(value), value) for value in values)
    )
    return list(pairs)
