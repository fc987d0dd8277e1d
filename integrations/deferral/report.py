"""How often the logits of a head were not needed, and what made them where they were."""

import itertools
from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch

from cutefce.ops import torch_compat


class DeferralReport(NamedTuple):
    """Counts of all deferred heads of a model, since `defer`.

    What torch.compile has compiled is counted when it is traced, not when it runs.
    """

    fused: int
    """Losses that were computed without logits."""
    fallbacks: dict[str, int]
    """How often logits were made all the same, by the operation or condition that needed them."""


class Counts:
    """The counts of one head."""

    def __init__(self, found: Mapping[str, int] | None = None) -> None:
        self.found = Counter(found)
        """By reason of a fallback; "" is a fused loss."""
        self.key = str(next(_numbers))
        _counts[self.key] = self

    def __reduce__(self) -> tuple[Any, ...]:
        return Counts, (dict(self.found),)  # a copy has a key of its own

    def add(self, reason: str = "") -> None:
        """Count a fused loss or, with a reason, a fallback."""
        if torch.compiler.is_compiling():
            _add_traced(self.key, reason)  # a counter in a graph would compile it for each value
        else:
            self.found[reason] += 1


_numbers = itertools.count()
_counts: "WeakValueDictionary[str, Counts]" = WeakValueDictionary()


@torch_compat.constant_in_graphs
def _add_traced(key: str, reason: str) -> int:
    _counts[key].found[reason] += 1
    return 0
