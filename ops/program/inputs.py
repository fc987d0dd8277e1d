"""The operands of a forward or backward."""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from cutefce.ops.primitives.primitives import Primitives
from cutefce.ops.rows.outputs import PartialOutputs
from cutefce.ops.rows.selection import RowSelection
from cutefce.ops.rows.targets import Targets
from cutefce.ops.sampling.samples import Sampling


class Ranks(Protocol):
    """What the ranks of a group exchange, each of which has some classes."""

    @property
    def rank(self) -> int:
        """The number of this one."""

    @property
    def count(self) -> int:
        """How many there are."""

    def target_logit(self, logit: Tensor, targets: Targets) -> Tensor:
        """Return r (N,) of all ranks from that of this one."""

    def soft_excess(self, excess: Tensor) -> Tensor:
        """Return the excess (N,) of the soft targets of all ranks from that of this one."""

    def partial_outputs(self, own: PartialOutputs) -> PartialOutputs:
        """Return the row reductions of all ranks, one part each."""

    def all_gather(self, x: Tensor) -> Tensor:
        """Return the x (...) of every rank as (R, ...)."""

    def all_reduce_(self, x: Tensor) -> Tensor:
        """Replace x by its sum over the ranks."""


@dataclass
class LossInputs:
    """The operands of a forward or backward, and the primitives that compute it.

    If kernels have selected rows, `targets` are in the order of the selection, and h in that of the
    call; N counts those that do not count, too.
    """

    primitives: Primitives
    h: Tensor
    """(N, D)"""
    w: Tensor
    """(V, D)"""
    targets: Targets
    dx_dtype: torch.dtype
    """Dtype of dX as it is returned: that of sums if ranks add theirs before it is rounded."""
    dw_dtype: torch.dtype
    """Dtype of dW: that of w, or of sums."""
    accumulate_into: Tensor | None = None
    """(V, D) buffer of the caller's to which dW is added, which is not returned then."""
    class_row: Tensor | None = None
    """(D,) Σ_v κ_v W_v over this rank's classes, for losses that depend on it."""
    sampling: Sampling | None = None
    """How a forward chooses entries, with sampled gradients."""
    ranks: Ranks | None = None
    """The other ranks; None for a call of one device."""
    selection: RowSelection | None = None
    """Which tokens these are; None for all."""

    @property
    def tokens(self) -> int:
        """Number of targets, N."""
        return self.targets.index.shape[0]

    def selected(self, scale: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        """Return h in the order of `targets`, rows times `scale` (N,) if given, in `out`."""
        selection, h = self.targets.selection, self.h
        if selection is not None:
            return self.primitives.projection.select(h, selection, scale, out)
        if scale is None:
            return h
        out = h.new_empty(h.shape) if out is None else out
        self.primitives.gradients.scale_rows(out, h, scale)
        return out
