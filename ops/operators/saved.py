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

OF_NO_TARGET = "weight_cast", "accumulate_into", "grad_output"
"""Options that no backward takes from what was saved."""


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
    given: tuple[Tensor, ...] = ()
    """The tensors of the call whose memory `targets` may share."""

    def is_of(self, y: Tensor, tensors: TensorOptions) -> bool:
        """Whether a backward with these targets and options may use the results.

        A compiler that computes its arguments again, and tensors that may be changed while they are
        saved, give a backward others: the memory of the forward's may have been written since.  A
        buffer that the forward has added to cannot be written again.
        """
        if self.plan.adds_in_forward:
            return True
        address_of = torch_compat.address_of
        return [*map(address_of, self.given)] == [*map(address_of, of_targets(y, tensors))]


def of_targets(y: Tensor, tensors: TensorOptions) -> tuple[Tensor, ...]:
    """Return the targets y (N,), and the options that are tensors and that targets have."""
    given = tensors.given.items()
    return (y, *(x for name, x in given if name not in OF_NO_TARGET))


_saved: dict[int, tuple["weakref.ref[torch.UntypedStorage]", Any]] = {}


def save(stats: Tensor, results: Any) -> None:
    """Save `results` as long as the memory of `stats` lives."""
    storage = stats.untyped_storage()
    key = id(storage)  # the storage stays the same object while its memory lives
    _saved[key] = weakref.ref(storage, lambda _: _saved.pop(key, None)), results


def forget(stats: Tensor) -> None:
    """Free what is saved with `stats`."""
    _saved.pop(id(stats.untyped_storage()), None)


def saved_with(stats: Tensor) -> Any:
    """Return what is saved with `stats`, None if there is nothing."""
    storage = stats.untyped_storage()
    reference, results = _saved.get(id(storage), (None, None))
    return results if reference is not None and reference() is storage else None
