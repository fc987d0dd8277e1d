"""What the forward of a training step keeps for its backward, beside the tensors of the graph.

How much is kept is the plan's decision, which a graph compiler must not see.  So the forward
returns statistics, whose shape depends on the inputs' alone, and the rest is found by them: it is
freed with their memory, when the graph is.  It only saves time.  A backward that does not find it,
because the statistics were offloaded or the graph is used a second time, computes it again, with
the same bits.
"""

import weakref
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cutefce.ops.interface.options import LossOptions, TensorOptions
from cutefce.ops.planning.planner import Plan
from cutefce.ops.rows.loss_parts import LossParts
from cutefce.ops.rows.selection import RowSelection
from cutefce.ops.rows.statistics import RowStats
from cutefce.ops.sampling.kernels import KernelSamples
from cutefce.ops.sampling.samples import Samples
from cutefce.ops.strategies.hidden_sums import HiddenSums
from cutefce.ops.strategies.weight_sums import WeightSums
from cutefce.ops.torch_compat import capture_id


class GradSums(NamedTuple):
    """Sums of the gradients; those of dW and of the bias are for the reduced loss."""

    dx: HiddenSums
    dw: WeightSums
    dbias: Tensor | None
    """(V,) in the dtype of sums; None if not computed."""


@dataclass
class Kept:
    """The results of a forward that its backward uses."""

    plan: Plan
    exps: Tensor
    """(N, K) exponentials of the kept columns, with "windows"."""
    dw: Tensor | None = None
    """(V, D) memory of dW, which holds the exponentials of aliased columns."""
    sums: GradSums | None = None
    """Sums of the gradients, with gradients in forward."""
    samples: Samples | KernelSamples | None = None
    """Entries of the exponentials, with sampled gradients."""
    class_row: Tensor | None = None
    """(D,) that of `LossInputs`."""
    soft: LossParts | None = None
    """Soft targets with their logits, and the terms that they make."""
    selection: RowSelection | None = None
    """Which tokens were computed; None for all."""
    stats: RowStats | None = None
    """Statistics of these tokens, in their order; None for those of all."""
    arch: str | None = None
    """Architecture of the kernels that served the forward; None of the portable path."""
    capture: int | None = field(default_factory=lambda: capture_id())
    """The CUDA graph capture in which the forward ran; None if in none."""

    def own(self, x: Tensor) -> Tensor:
        """Return x to be overwritten: a copy if the backward runs outside of the forward's capture.

        A replay of either would otherwise find, or overwrite, what the other has written.
        """
        return x if self.capture == capture_id() else x.clone()

    def take_dw(self) -> Tensor | None:
        """Return the memory of dW, to be overwritten; later backwards get None."""
        dw: Tensor | None = vars(self).pop("dw", None)  # one step, for threads that share a graph
        return None if dw is None else self.own(dw)

    def take_sums(self) -> GradSums | None:
        """Return the sums of the gradients, to be overwritten; later backwards get None."""
        sums: GradSums | None = vars(self).pop("sums", None)
        if sums is None:
            return None
        return GradSums(sums.dx.map(self.own), sums.dw.map(self.own), sums.dbias)


def consumes_exps(options: LossOptions, tensors: TensorOptions) -> bool:
    """Return whether a backward overwrites the exponentials that the forward has kept."""
    return options.scales_exps or tensors.target_indices is not None


_kept: dict[int, tuple["weakref.ref[torch.UntypedStorage]", Any]] = {}


def keep(stats: Tensor, kept: Any) -> None:
    """Keep `kept` as long as the memory of `stats`."""
    storage = stats.untyped_storage()
    key = id(storage)  # the storage stays the same object while its memory lives
    _kept[key] = weakref.ref(storage, lambda _: _kept.pop(key, None)), kept


def forget(stats: Tensor) -> None:
    """Keep nothing with `stats` any longer."""
    _kept.pop(id(stats.untyped_storage()), None)


def kept_with(stats: Tensor) -> Any:
    """Return what is kept with `stats`, None if there is nothing."""
    storage = stats.untyped_storage()
    reference, kept = _kept.get(id(storage), (None, None))
    return kept if reference is not None and reference() is storage else None
