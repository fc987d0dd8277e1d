"""Plans, seen from their cost, and the fastest one within a budget.

Layouts come in families that store more and more: of each family, the one that stores the most
within the budget is a candidate.
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import TypeVar

from cutefce.ops.budgets import MINIMUM

WORTH, FREE = (5, 4), 4 << 20
"""Memory that "min" may take, over the least of any program, and bytes that it may take beside:
so much is often worth half of the time."""
AS_FAST = 1.02
"""Time, over the least within this memory, for which "min" takes still less memory."""

_memory = attrgetter("workspace_bytes", "seconds")
_cost = attrgetter("seconds", "workspace_bytes")
L = TypeVar("L")
P = TypeVar("P", bound="Costed")


@dataclass(frozen=True, kw_only=True)
class Costed:
    """Base of plans: what they are compared by."""

    workspace_bytes: int = 0
    """Predicted peak memory beyond the inputs and the gradients."""
    seconds: float = 0.0
    """Predicted time of forward and backward; for comparing plans of one problem."""
    budget: int | None = field(default=None, compare=False)
    """Bytes that were asked for, if no plan takes as few."""

    def within(self: P, budget: int) -> P:
        """Return a plan that says so if it takes more than `budget` bytes."""
        if MINIMUM < budget < self.workspace_bytes:
            return replace(self, budget=budget)
        return self

    def predicted(self, budget: int | None) -> str:
        """Return what is printed of memory and time; `budget` are bytes that no plan is within."""
        is_long = self.seconds >= 1e-3
        time = f"{self.seconds * 1e3:.1f} ms" if is_long else f"{self.seconds * 1e6:.1f} µs"
        text = f"{_size(self.workspace_bytes)}, {time} predicted"
        if budget is not None:
            text += f"; no plan takes as little as the workspace of {_size(budget)}"
        return text


def _size(count: int) -> str:
    return f"{count / 2**20:.1f} MiB" if count >= 1 << 20 else f"{count} bytes"


def fastest_within(families: Sequence[Sequence[L]], planned: Callable[[L], P], budget: int) -> P:
    """Return the fastest plan of a layout within `budget` bytes, or the one that takes the least.

    Each layout of a family takes more memory, and less time, than the one before, but possibly the
    second and the last.
    """
    made: dict[L, P] = {}

    def of(x: L) -> P:
        if x not in made:
            made[x] = planned(x)
        return made[x]

    found = None
    if budget != MINIMUM:
        found = _fastest(families, of, budget)
    if found is None:
        ends = {x for family in families for x in (*family[:2], family[-1])}
        least = min(of(x).workspace_bytes for x in ends)
        limit = least * WORTH[0] // WORTH[1] + FREE if budget == MINIMUM else least
        found = _fastest(families, of, limit)
    assert found is not None, "the least fits"
    if budget == MINIMUM:
        slowest = AS_FAST * found.seconds
        found = min((x for x in made.values() if x.seconds <= slowest), key=_memory)
    return found.within(budget)


def _fastest(families: Sequence[Sequence[L]], of: Callable[[L], P], limit: int) -> P | None:
    """Return the fastest plan of at most `limit` bytes, the smallest one of those; None if none is.

    A family whose last layouts are not faster than a plan that fits has none that is.
    """
    best = None
    for family in families:
        if best is not None and all(of(x).seconds >= best.seconds for x in family[:-3:-1]):
            continue
        found = [x for x in (family[-1], family[0]) if of(x).workspace_bytes <= limit][:1]
        within = bisect_right(family[1:-1], limit, key=lambda x: of(x).workspace_bytes)
        if within:
            found.append(family[within])
        for x in found:
            if best is None or _cost(of(x)) < _cost(best):
                best = of(x)
    return best
