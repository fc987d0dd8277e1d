"""What the forward of a training step keeps for its backward, beside the tensors of the graph.

How much is kept is the plan's decision, which a graph compiler must not see.  So the forward
returns statistics, whose shape depends on the inputs' alone, and the rest is found by them: it is
freed with their memory, when the graph is.  It only saves time.  A backward that does not find it,
because the statistics were offloaded or the graph is used a second time, computes it again, with
the same bits.
"""

import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cutefce.ops.program.plan import Plan
from cutefce.ops.program.run import Left
from cutefce.ops.rows.selection import RowSelection
from cutefce.ops.rows.statistics import RowStats
from cutefce.ops.rows.targets import Targets


@dataclass
class Kept:
    """The results of a forward that its backward uses."""

    plan: Plan
    left: Left
    targets: Targets
    """Those of the tokens that were computed, with the logits of soft ones."""
    selection: RowSelection | None = None
    """Which tokens these are; None for all."""
    stats: RowStats | None = None
    """Statistics of these tokens, in their order; None if those that were returned are."""
    class_row: Tensor | None = None
    """(D,) that of `LossInputs`."""


_kept: dict[int, tuple["weakref.ref[torch.UntypedStorage]", Any]] = {}


def keep(stats: Tensor, kept: Any) -> None:
    """Keep `kept` as long as the memory of `stats`."""
    storage = stats.untyped_storage()
    key = id(storage)  # the storage stays the same object while its memory lives
    _kept[key] = weakref.ref(storage, lambda _: _kept.pop(key, None)), kept


def kept_with(stats: Tensor) -> Any:
    """Return what is kept with `stats`, None if there is nothing."""
    storage = stats.untyped_storage()
    reference, kept = _kept.get(id(storage), (None, None))
    return kept if reference is not None and reference() is storage else None
