"""What the steps of a program launch: one implementation of the forward and of the backward."""

from copy import copy
from dataclasses import dataclass

from cutefce.cute_kernels.config import PortableTiles
from cutefce.ops.primitives.portable_gradients import PortableGradients
from cutefce.ops.primitives.portable_projection import PortableProjection
from cutefce.ops.rows.selection import CountedRows


@dataclass(frozen=True)
class Primitives:
    """One implementation of the steps; all tensors of a call are on one device."""

    config: PortableTiles
    projection: PortableProjection
    gradients: PortableGradients
    counted: CountedRows | None = None
    """How many rows count, where products are of these alone."""

    def behind(self, first: int) -> "Primitives":
        """Return the same for a chunk of the tokens from `first` on."""
        if self.counted is None or not first:
            return self
        projection, gradients = copy(self.projection), copy(self.gradients)
        counted = projection.counted = gradients.counted = self.counted.behind(first)
        return Primitives(self.config, projection, gradients, counted)
