"""What the steps of a program launch."""

from copy import copy

from cutefce.cute_kernels.config import PortableTiles
from cutefce.ops.primitives.portable_gradients import PortableGradients
from cutefce.ops.primitives.portable_projection import PortableProjection
from cutefce.ops.rows.selection import CountedRows


class Primitives(PortableProjection, PortableGradients):
    """One implementation of the steps, in plain torch; all tensors of a call are on one device."""

    def __init__(self, tiles: PortableTiles, counted: CountedRows | None = None) -> None:
        self.tiles, self.counted = tiles, counted

    def behind(self, first: int) -> "Primitives":
        """Return the same for a chunk of the tokens from `first` on."""
        if self.counted is None or not first:
            return self
        result = copy(self)
        result.counted = self.counted.behind(first)
        return result
