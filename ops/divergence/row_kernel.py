"""The launch of the kernel that makes whole rows of logits into statistics and factors."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cutefce.cute_kernels.jit.cache import compiled
from cutefce.cute_kernels.spec.divergence import divergence_rows
from cutefce.ops.divergence.factors import FactorRows
from cutefce.ops.divergence.options import STUDENT, TEACHER, Divergence
from cutefce.ops.divergence.sides import Side
from cutefce.ops.primitives.dispatch import device_unsupported_reason, gpu_of

ALIGNMENT = 8
"""Classes that a row is a multiple of: it begins at 16 bytes, in 16 bits too."""


@dataclass(frozen=True)
class RowKernel:
    """The kernel of one call."""

    arch: str
    options: Divergence

    @staticmethod
    def of(sides: Sequence[Side], options: Divergence) -> "RowKernel | None":
        """Return the kernel that serves two sides, None if there is none."""
        if len(sides[STUDENT].w) % ALIGNMENT or any(side.cap is not None for side in sides):
            return None
        device = sides[STUDENT].h.device
        if any(device_unsupported_reason(device, side.h.dtype) for side in sides):
            return None
        return RowKernel(gpu_of(device).arch.name, options)

    def run(
        self,
        stats: Tensor,
        logits: Sequence[Tensor],
        outs: Sequence[FactorRows | None],
        scales: Sequence[Tensor | None],
    ) -> None:
        """Write the statistics (6, R) of logits (R, V) of both sides, and their factors to `outs`.

        Factors are multiplied by `scales` (), None for 1.  Both `outs` have the same rows, and
        windows of a power of 2 of classes, or one of all.
        """
        a = STUDENT if self.options.is_mixture else self.options.first
        b = STUDENT + TEACHER - a
        memory = [None if x is None else x.memory for x in outs]
        names = [None if x is None else str(x.dtype).removeprefix("torch.") for x in memory]
        spec = divergence_rows(self.arch, self.options.is_mixture, names[a], names[b])
        one = stats.new_ones(())
        shares = (self.options.share(i) if self.options.is_mixture else 1.0 for i in (a, b))
        numbers = [stats.new_full((), share) for share in shares]
        numbers += [one if (scale := scales[i]) is None else scale for i in (a, b)]
        exchange = stats.new_empty(stats.shape[1] * spec.EXCHANGE)
        operands = logits[a], logits[b], memory[a], memory[b], stats, exchange
        vocab, pitches = logits[0].shape[1], [0 if x is None else x.pitch for x in outs]
        given = next((x for x in outs if x is not None), None)
        first, columns = (0, vocab) if given is None else (given.first, given.columns)
        shift = 31 if columns >= vocab else columns.bit_length() - 1
        places = first, columns, shift, pitches[a], pitches[b]
        compiled(spec)(*operands, torch.stack(numbers), a, *places)
