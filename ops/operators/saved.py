"""What the forward of a training step saves for its backward, beside the tensors of the graph.

The plan decides how much is saved, which a graph compiler must not see.  So the forward returns
statistics, whose shape depends on the inputs' alone.  The backward finds the rest by them.  It is
freed with their memory, when the graph is.  It only saves time.  A backward that does not find it,
because the statistics were offloaded or the graph is used a second time, computes it again, with
the same bits.
"""

import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cutefce.ops import torch_compat
from cutefce.ops.interface.arguments import TensorOptions
from cutefce.ops.program.plan import Plan
from cutefce.ops.program.run import SavedMemory
from cutefce.ops.rows.selection import RowSelection
from cutefce.ops.rows.statistics import RowStats
from cutefce.ops.rows.targets import Targets


@dataclass
class Saved:
    """The results of a forward that its backward uses."""

    plan: Plan
    memory: SavedMemory
    targets: Targets
    """Those of the tokens that were computed, with the logits of soft ones."""
    selection: RowSelection | None = None
    """Which tokens these are; None for all."""
    stats: RowStats | None = None
    """Statistics of these tokens, in their order; None if those that were returned are."""
    class_row: Tensor | None = None
    """(D,) that of `LossInputs`."""
    given: tuple[int, ...] = ()
    """Addresses of the tensors of the call, whose memory `targets` may share."""

    def is_of(self, y: Tensor, tensors: TensorOptions) -> bool:
        """Whether a backward with these targets and options may use the results.

        A compiler that computes its arguments again, and tensors that may be changed while they are
        saved, give a backward others: the memory of the forward's may have been written since.  A
        buffer that the forward has added to cannot be written again.
        """
        return self.plan.adds_in_forward or self.given == addresses(y, tensors)


def addresses(y: Tensor, tensors: TensorOptions) -> tuple[int, ...]:
    """Return those of the targets y (N,) and of the options that are tensors."""
    return tuple(map(torch_compat.address_of, (y, *tensors.given.values())))


_saved: dict[int, tuple["weakref.ref[torch.UntypedStorage]", Any]] = {}


def save(stats: Tensor, results: Any) -> None:
    """Save `results` as long as the memory of `stats` lives."""
    storage = stats.untyped_storage()
    key = id(storage)  # the storage stays the same object while its memory lives
    _saved[key] = weakref.ref(storage, lambda _: _saved.pop(key, None)), results


def saved_with(stats: Tensor) -> Any:
    """Return what is saved with `stats`, None if there is nothing."""
    storage = stats.untyped_storage()
    reference, results = _saved.get(id(storage), (None, None))
    return results if reference is not None and reference() is storage else None
