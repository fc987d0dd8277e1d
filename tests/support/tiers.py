"""The tiers of the tests: what `make test` runs of a grid, and what only `make test-all` does."""

import itertools
import math
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
    """Parametrize by cases of a grid that have each pair of values of two axes.

    Cases with each triple of values are slow. Most faults need two things to meet: a layout and an
    option, a dtype and a size; the rest need three.
    """
    return pairwise_of({}, **axes)


def pairwise_of(few: Mapping[str, Values], **axes: Values) -> pytest.MarkDecorator:
    """Do so with the pairs of a `few` values of some axes; all others are slow."""
    of_axes = {name: named(values) for name, values in axes.items()}
    of_few = {name: named(few.get(name, values)) for name, values in axes.items()}
    places = [[of_axes[name].index(x) for x in values] for name, values in of_few.items()]
    default = {
        tuple(at[place] for at, place in zip(places, case, strict=True))
        for case in covering([len(values) for values in places], 2)
    }
    params = []
    for case in sorted(default | covering([len(values) for values in of_axes.values()], 3)):
        chosen = [values[place] for values, place in zip(of_axes.values(), case, strict=True)]
        marks = [] if case in default else [pytest.mark.slow]
        name = "-".join(name for name, _ in chosen)
        params.append(pytest.param(*(value for _, value in chosen), id=name, marks=marks))
    return pytest.mark.parametrize(list(axes), params)


def covering(sizes: Sequence[int], strength: int) -> set[tuple[int, ...]]:
    """Return few places of a grid of `sizes`, among which all values of `strength` axes meet.

    Each place is the one with the most that is still missing: the greedy cover.
    """
    strength = min(strength, len(sizes))
    bits: dict[tuple[tuple[int, int], ...], int] = {}
    covered = {
        places: sum(
            1 << bits.setdefault(values, len(bits))
            for values in itertools.combinations(enumerate(places), strength)
        )
        for places in itertools.product(*map(range, sizes))
    }
    missing, chosen = (1 << len(bits)) - 1, set()
    # what a place covers only shrinks: none has more than this after a pass
    for most in range(math.comb(len(sizes), strength), 0, -1):
        for places, covers in covered.items():
            if (covers & missing).bit_count() == most:
                chosen.add(places)
                missing &= ~covers
    return chosen


def named(values: Values) -> list[tuple[str, Any]]:
    """Return the values of an axis with their names."""
    pairs: Iterable[tuple[str, Any]] = (
        values.items() if isinstance(values, Mapping) else ((str(value), value) for value in values)
    )
    return list(pairs)
