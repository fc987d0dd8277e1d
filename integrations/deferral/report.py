"""How often the logits of a head were not needed, and what made them where they were."""

from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

import torch


class DeferralReport(NamedTuple):
    """Counts of all deferred heads of a model, since `defer`.

    What torch.compile has compiled is counted when it is traced, not when it runs.
    """

    fused: int
    """Losses that were computed without logits."""
    fallbacks: dict[str, int]
    """How often logits were made all the same, by the operation or condition that needed them."""


@dataclass
class Counts:
    """The counts of one head."""

    fused: int = 0
    fallbacks: Counter[str] = field(default_factory=Counter)

    def add(self, reason: str = "") -> None:
        """Count a fused loss or, with a reason, a fallback."""
        if torch.compiler.is_compiling():
            _add_constant(self, reason)  # a counter in the graph would compile it again each call
        elif reason:
            self.fallbacks[reason] += 1
        else:
            self.fused += 1


@torch.compiler.assume_constant_result  # runs while a graph is traced
def _add_constant(counts: Counts, reason: str) -> int:
    if reason:
        counts.fallbacks[reason] += 1
    else:
        counts.fused += 1
    return 0
