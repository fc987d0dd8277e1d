"""Row sums of parts of the classes."""

from typing import Any, NamedTuple

from torch import Tensor

from cutefce.ops.outputs.needs import SUMS_OF_ALL, SUMS_OF_OTHERS
from cutefce.ops.rows.targets import Targets


class PartialSums(NamedTuple):
    """Row sums of exponentials (N, P), each relative to its own reference (N, P)."""

    sums: Tensor
    references: Tensor
    of_all: Tensor | None = None
    """(4, N, P) the first fields of `PartialOutputs`, if asked for."""
    largest: Tensor | None = None
    """(N, P) the largest u of the classes but the target, if asked for or with `of_others`."""
    of_others: Tensor | None = None
    """(2, N, P) the class of `largest`, and how many u are above the target's, if asked for."""

    @staticmethod
    def empty(like: Tensor, count: int, targets: Targets) -> "PartialSums":
        """Return uninitialized sums of `count` parts, with the dtype and rows of `like` (N,)."""
        options, size = targets.options, (len(like), count)
        of_all = like.new_empty((SUMS_OF_ALL, *size)) if options.reduces_all else None
        of_others = like.new_empty((SUMS_OF_OTHERS, *size)) if options.reduces_others else None
        largest = like.new_empty(size) if options.keeps_largest else None
        sums, references = like.new_empty((2, *size))
        return PartialSums(sums, references, of_all, largest, of_others)

    def part(self, rows: slice, parts: slice) -> "PartialSums":
        """Return the sums of some rows and parts."""
        some: Any = [None if x is None else x[..., rows, parts] for x in self]
        return PartialSums(*some)
