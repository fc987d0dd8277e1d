"""The fastest layout within a budget.

Layouts come in families that store more and more: of each family, the one that stores the most
within the budget is a candidate.
"""

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from cutefce.ops.planning.budget import MINIMUM

WORTH, FREE = (5, 4), 4 << 20
"""Memory that "min" may take, over the least of any program, and bytes that it may take beside:
so much is often worth half of the time."""


class Costed(Protocol):
    """A plan, seen from its cost."""

    @property
    def workspace_bytes(self) -> int:
        """Predicted peak memory beyond the inputs and the gradients."""

    @property
    def seconds(self) -> float:
        """Predicted time of forward and backward."""


L = TypeVar("L")
P = TypeVar("P", bound=Costed)


def fastest_within(families: Sequence[Sequence[L]], planned: Callable[[L], P], budget: int) -> P:
    """Return the fastest plan of a layout within `budget` bytes, or the one that takes the least.

    Each layout of a family takes more memory, and less time, than the one before.  The first and
    the last may not.
    """
    made: dict[L, P] = {}

    def of(x: L) -> P:
        if x not in made:
            made[x] = planned(x)
        return made[x]

    parts = [part for x in families for part in (x[:1], x[-1:], x[1:-1]) if part]
    found = None
    if budget != MINIMUM:
        found = _fastest(parts, of, budget)
    if found is None:
        least = min(of(x).workspace_bytes for part in parts for x in (part[0], part[-1]))
        limit = least * WORTH[0] // WORTH[1] + FREE if budget == MINIMUM else least
        found = _fastest(parts, of, limit)
    assert found is not None, "the least fits"
    return found


def _fastest(parts: Sequence[Sequence[L]], of: Callable[[L], P], limit: int) -> P | None:
    """Return the fastest plan of at most `limit` bytes, the smallest one of those; None if none is.

    Each layout of a part takes more memory, and less time, than the one before.
    """
    best = None
    for part in parts:
        if best is not None and of(part[-1]).seconds >= best.seconds:
            continue
        found = _most_within(part, limit, lambda x: of(x).workspace_bytes)
        if found is not None and (best is None or _cost(of(found)) < _cost(best)):
            best = of(found)
    return best


def _cost(x: Costed) -> tuple[float, int]:
    return x.seconds, x.workspace_bytes


def _most_within(family: Sequence[L], limit: int, size: Callable[[L], int]) -> L | None:
    """Return the last layout of at most `limit` bytes.

    Bytes grow about linearly, so that a guess between two that are known is nearly right.
    """
    low, high = 0, len(family) - 1
    if size(family[high]) <= limit:
        return family[high]
    if size(family[low]) > limit:
        return None
    while high - low > 1:
        least, most = size(family[low]), size(family[high])
        guess = low + (limit - least) * (high - low) // max(most - least, 1)
        guess = min(max(guess, low + 1), high - 1)
        if size(family[guess]) <= limit:
            low = guess
            if low + 1 < high and size(family[low + 1]) > limit:
                break
        else:
            high = guess
    return family[low]
