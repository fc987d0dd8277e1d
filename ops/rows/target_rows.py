"""The targets' part of dW in plain torch: Σ c_e h_{i_e} over the entries of each target."""

from functools import cached_property

import torch
from torch import Tensor

from cutefce.ops.rows.blocks import blocks, row_block_size
from cutefce.ops.rows.soft_targets import TargetEntries, target_entries
from cutefce.ops.rows.targets import Targets


class TargetRows:
    """Entries with hidden states, which are summed by target when it is needed.

    On a CPU, entries of soft targets, which may be of all classes, are sorted: then those of some
    rows are added alone.
    """

    def __init__(self, h: Tensor, entries: TargetEntries, vocab: int) -> None:
        self.h, self.entries, self.vocab = h, entries, vocab

    @staticmethod
    def of(h: Tensor, coefficient: Tensor, targets: Targets, others: Tensor | None) -> "TargetRows":
        """Return those of h (N, D) with the coefficients (N,), and `others` (N, K)."""
        entries = target_entries(targets.safe_index, coefficient, targets.soft, others, None)
        if entries.rows is not None and h.is_cuda:  # those of no class have no coefficient
            entries = entries._replace(target=entries.target.clamp_(min=0))
        elif entries.rows is not None:
            entries = entries.sorted(targets.vocab)
        return TargetRows(h, entries, targets.vocab)

    def prepare(self) -> None:
        """Sum the entries of all targets, if they are not summed for some rows at a time."""
        if not self._is_sorted:
            _ = self._slots

    def totals(self, first: int, last: int) -> tuple[Tensor, Tensor]:
        """Return sums (L, D) in the dtype of sums, and for each row [first, last) its slot."""
        if not self._is_sorted:
            totals, slots = self._slots
            return totals, slots[first:last]
        totals = self.entries.coefficient.new_zeros(last - first, self.h.shape[1])
        self.add_to(totals, first)
        return totals, torch.arange(last - first, device=self.h.device)

    def add_to(self, out: Tensor, first: int) -> None:
        """Add the sums of the rows from `first` on to `out` (K, D), in a fixed order."""
        entries = self.entries
        if self._is_sorted:
            ends = torch.tensor([first, first + len(out)], dtype=torch.int32)
            part = slice(*torch.searchsorted(entries.target, ends).tolist())
            entries = TargetEntries(*(x[part] for x in entries if x is not None))
        self._add(out, entries.target - first, entries)

    @property
    def _is_sorted(self) -> bool:
        return self.entries.rows is not None and not self.h.is_cuda

    @cached_property
    def _slots(self) -> tuple[Tensor, Tensor]:
        """Sums (L, D), a slot for each target that occurs, and slot (V,).

        All other vocabulary entries share a slot of zeros.
        """
        target, count, vocab = self.entries.target, len(self.entries.target), self.vocab
        if count < vocab:
            # a target's slot is the number of its first entry
            order = torch.arange(count, device=self.h.device)
            slot = torch.full((vocab,), count, device=self.h.device)
            slot.scatter_reduce_(0, target, order, "amin")
        else:
            slot = torch.arange(vocab, device=self.h.device)
        sums = self.entries.coefficient.new_zeros(min(count + 1, vocab), self.h.shape[1])
        self._add(sums, slot[target], self.entries)
        return sums, slot

    def _add(self, out: Tensor, slot: Tensor, entries: TargetEntries) -> None:
        """Add c_e h_{i_e} to row slot_e (E,) of `out`, where it has that row, in a fixed order."""
        inside = (slot >= 0) & (slot < len(out))
        slot = torch.where(inside, slot, 0)
        for part in blocks(len(slot), row_block_size(self.h)):
            rows = self.h[part if entries.rows is None else entries.rows[part]]
            terms = rows * entries.coefficient[part, None]
            terms.masked_fill_(~inside[part, None], 0)
            if out.is_cuda:  # deterministic on CUDA, unlike index_add_
                out.index_put_((slot[part],), terms, accumulate=True)
            else:
                out.index_add_(0, slot[part], terms)
            del rows, terms  # freed before the next ones are allocated
