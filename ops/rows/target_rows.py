"""The targets' part of dW in plain torch: Σ_{i: y_i = v} c_i h_i."""

from functools import cached_property

import torch
from torch import Tensor

from cutefce.ops.rows.blocks import blocks, row_block_size


def add_rows_(out: Tensor, index: Tensor, x: Tensor) -> None:
    """Add row i of x (N, ...) to row `index_i` of `out`, in an order that is always the same."""
    if out.is_cuda:
        out.index_put_((index,), x, accumulate=True)
    else:
        out.index_add_(0, index, x)


class TargetRows:
    """Targets (N,), inside [0, V), with coefficients (N,) and hidden states (N, D).

    They are summed by target when that is needed.
    """

    def __init__(self, h: Tensor, target: Tensor, coefficient: Tensor, vocab: int) -> None:
        self.h, self.target, self.coefficient, self.vocab = h, target, coefficient, vocab

    def totals(self, first: int, last: int) -> tuple[Tensor, Tensor]:
        """Return sums (L, D) in the dtype of sums, and for each row [first, last) its slot."""
        totals, slots = self._slots
        return totals, slots[first:last]

    def add_to(self, out: Tensor, first: int) -> None:
        """Add the sums of the rows from `first` on to `out` (K, D), in a fixed order."""
        self._add(out, self.target - first)

    @cached_property
    def _slots(self) -> tuple[Tensor, Tensor]:
        """Sums (L, D), a slot for each target that occurs, and slot (V,).

        All other vocabulary entries share a slot of zeros.
        """
        count, vocab = len(self.target), self.vocab
        if count < vocab:
            # a target's slot is the number of its first token
            order = torch.arange(count, device=self.h.device)
            slot = torch.full((vocab,), count, device=self.h.device)
            slot.scatter_reduce_(0, self.target, order, "amin")
        else:
            slot = torch.arange(vocab, device=self.h.device)
        sums = self.coefficient.new_zeros(min(count + 1, vocab), self.h.shape[1])
        self._add(sums, slot[self.target])
        return sums, slot

    def _add(self, out: Tensor, slot: Tensor) -> None:
        """Add c_i h_i to row slot_i (N,) of `out`, where it has that row, in a fixed order."""
        inside = (slot >= 0) & (slot < len(out))
        slot = torch.where(inside, slot, 0)
        for part in blocks(len(slot), row_block_size(self.h)):
            terms = self.h[part] * self.coefficient[part, None]
            terms.masked_fill_(~inside[part, None], 0)
            add_rows_(out, slot[part], terms)
            del terms  # freed before the next ones are allocated
