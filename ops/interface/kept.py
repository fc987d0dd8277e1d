"""What the forward of a training step keeps for its backward, beside the tensors of the graph.

How much is kept is the plan's decision, which a graph compiler must not see.  So the forward
returns statistics, whose shape depends on the inputs' alone, and the rest is found by them: it is
freed with their memory, when the graph is.  It only saves time.  A backward that does not find it,
because the statistics were offloaded or the graph is used a second time, computes it again, with
the same bits.
"""

import weakref
from dataclasses import dataclass

import torch
from torch import Tensor

from cutefce.ops.planning.planner import Plan
from cutefce.ops.strategies.grad_accumulator import GradAccumulator


@dataclass
class Kept:
    """The results of a forward that its backward uses."""

    plan: Plan
    exps: Tensor
    """(N, K) exponentials of the kept columns, with "windows"."""
    dw: Tensor | None = None
    """(V, D) memory of dW, which holds the exponentials of aliased columns."""
    sums: tuple[GradAccumulator, GradAccumulator] | None = None
    """Sums of dX and dW, with gradients in forward."""

    def take_dw(self) -> Tensor | None:
        """Return the memory of dW, to be overwritten; later backwards get None."""
        dw: Tensor | None = vars(self).pop("dw", None)  # one step, for threads that share a graph
        return dw

    def take_sums(self) -> tuple[GradAccumulator, GradAccumulator] | None:
        """Return the sums of the gradients, to be overwritten; later backwards get None."""
        sums: tuple[GradAccumulator, GradAccumulator] | None = vars(self).pop("sums", None)
        return sums


_kept: dict[int, tuple["weakref.ref[torch.UntypedStorage]", Kept]] = {}


def keep(stats: Tensor, kept: Kept) -> None:
    """Keep `kept` as long as the memory of `stats`."""
    storage = stats.untyped_storage()
    key = id(storage)  # the storage stays the same object while its memory lives
    _kept[key] = weakref.ref(storage, lambda _: _kept.pop(key, None)), kept


def kept_with(stats: Tensor) -> Kept | None:
    """Return what is kept with `stats`, None if there is nothing."""
    storage = stats.untyped_storage()
    reference, kept = _kept.get(id(storage), (None, None))
    return kept if reference is not None and reference() is storage else None
