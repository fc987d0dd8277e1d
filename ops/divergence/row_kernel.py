"""The launch of the kernel that makes whole rows of logits into statistics and factors."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cutefce.autotune_cache.verdicts import DIVERGENCES
from cutefce.cute_kernels.jit.cache import compiled
from cutefce.cute_kernels.spec.divergence import divergence_rows
from cutefce.ops.divergence.options import STUDENT, TEACHER, Divergence
from cutefce.ops.divergence.sides import Side
from cutefce.ops.dtypes import dtype_name
from cutefce.ops.primitives.dispatch import (
    device_unsupported_reason,
    gpu_of,
    unproven_reason,
)

ALIGNMENT = 8
"""Classes that a row is a multiple of: it begins at 16 bytes, in 16 bits too."""


@dataclass(frozen=True)
class RowKernel:
    """The kernel of one call."""

    arch: str
    options: Divergence
    numbers: Tensor
    """(4,) the shares of the kernel's a and b in a JSD's mixture, or 1/2 twice, the factor of total
    variation's derivative, or 1 twice of a KL; what factors of a, and of b, are multiplied by."""

    @staticmethod
    def of(
        sides: Sequence[Side], options: Divergence, scales: Sequence[Tensor | None]
    ) -> "RowKernel | None":
        """Return the kernel that serves two sides, with these scales; None if there is none."""
        if len(sides[STUDENT].w) % ALIGNMENT or any(side.cap is not None for side in sides):
            return None
        device = sides[STUDENT].h.device
        if any(_unsupported_reason(side) for side in sides):
            return None
        if len({side.h.dtype for i, side in enumerate(sides) if any(options.gradients(i))}) > 1:
            return None  # verified kernels write the factors of both sides in one dtype
        return RowKernel.with_scales(gpu_of(device).arch.name, options, scales, sides[STUDENT].h)

    @staticmethod
    def with_scales(
        arch: str, options: Divergence, scales: Sequence[Tensor | None], like: Tensor
    ) -> "RowKernel":
        """Return the kernel whose factors are multiplied by `scales` (), on the device of `like`.

        None is 1.
        """
        numbers, order = like.new_ones(4, dtype=torch.float32), _order(options)
        for place, i in enumerate(order):
            if options.first is None:
                numbers[place] = options.share(i)
            if (scale := scales[i]) is not None:
                numbers[place + len(order)] = scale
        return RowKernel(arch, options, numbers)

    def run(
        self,
        stats: Tensor,
        logits: Sequence[Tensor],
        outs: Sequence[Sequence[Tensor]],
        sums: Sequence[Tensor | None],
        first: int = 0,
    ) -> None:
        """Write the statistics (7, R) of logits (R, V) of both sides, and their factors to `outs`.

        Those of a side are matrices (T, C) of windows of classes, of a power of 2 or of all, at
        equal distances in one memory: the first and the second are given, or none if its factors
        are not wanted.  The rows begin with row `first` of these.  `sums` are those of
        `write_logits`.
        """
        (a, b), numbers = _order(self.options), self.numbers
        if self.options.first is None and outs[b] and not outs[a]:
            (a, b), numbers = (b, a), numbers.view(2, 2).flip(1).view(4)
        memory = [_memory_from(x[0]) if x else None for x in outs]
        wanted, given = [len(x) > 0 for x in outs], all(x is not None for x in sums)
        form = "kl" if self.options.first is not None else self.options.divergence
        spec = divergence_rows(self.arch, form, wanted[a], wanted[b], given)
        exchange = stats.new_empty(stats.shape[1] * spec.EXCHANGE)
        own_sums = (sums[a], sums[b]) if given else (None, None)
        operands = logits[a], logits[b], *own_sums, memory[a], memory[b], stats, exchange
        windows = outs[a] or outs[b] or logits[:1]
        columns, narrow = windows[0].shape[1], windows[0].dtype == torch.float16
        shift = columns.bit_length() - 1 if len(windows) > 1 else 31
        pitches = [x[1].storage_offset() - x[0].storage_offset() if len(x) > 1 else 0 for x in outs]
        places = int(narrow), first, columns, shift, pitches[a], pitches[b]
        compiled(spec)(*operands, numbers, a, *places)


def _memory_from(x: Tensor) -> Tensor:
    """Return the memory from a matrix on, as 16 bits of any dtype."""
    size = x.untyped_storage().nbytes() // x.element_size() - x.storage_offset()
    return x.as_strided((size,), (1,)).view(torch.bfloat16)


def _unsupported_reason(side: Side) -> str | None:
    """Return why the kernel cannot read the logits of a side, None if it can."""
    device, dtype = side.h.device, side.h.dtype
    return device_unsupported_reason(device, dtype) or unproven_reason(
        device, dtype_name(dtype), DIVERGENCES
    )


def _order(options: Divergence) -> tuple[int, int]:
    """Return the sides that the kernel has as a and b."""
    a = STUDENT if options.first is None else options.first
    return a, STUDENT + TEACHER - a
