"""The operands of a forward or backward."""

from dataclasses import dataclass

from torch import Tensor

from cutefce.ops.parallel.shard import VocabShard
from cutefce.ops.primitives.primitives import Primitives
from cutefce.ops.rows.selection import RowSelection
from cutefce.ops.rows.targets import Targets


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
    accumulate_into: Tensor | None = None
    """(V, D) buffer of the caller's to which dW is added, which is not returned then."""
    class_row: Tensor | None = None
    """(D,) Σ_v κ_v W_v over this rank's classes, for losses that depend on it."""
    ranks: VocabShard | None = None
    """The other ranks; None for a call of one device."""
    selection: RowSelection | None = None
    """Which tokens these are; None for all."""
