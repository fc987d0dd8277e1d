"""Row reductions of the logits, from those of parts of the classes.

With u_iv the logits, p_iv their softmax, and m_i the largest logit, the outputs of a token are

    lse              log Σ_v exp u_iv = m_i + log T_i                  T_i = Σ_v exp(u_iv - m_i)
    entropy          H_i = -Σ_v p_iv log p_iv = log T_i - Σ_v exp(u_iv - m_i) (u_iv - m_i) / T_i
    sum_p_squared    Σ_v p_iv²
    mean_logit       Σ_v u_iv / V
    is_top1          whether no other logit is above the target's
    argmax           the class of the largest logit; the target of equal ones, else the lowest
    rank             how many logits are above the target's

All but the last three are functions of the row alone, and the first three are formed so: equal rows
have equal bits, whatever their targets are.  Both terms of the entropy are at least 0, and T_i - 1
is a sum of its own: the digits of an entropy near 0 do not cancel.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from cutefce.cute_kernels.workspace import NUM_STATS
from cutefce.ops.interface.arguments import OF_ALL, OUTPUTS, LossOptions
from cutefce.ops.rows.blocks import blocks

COMBINED_BYTES = 32 << 20
"""What combining parts takes at a time; that of one token at least."""
MATRICES, MATRICES_OF_OTHERS = 7.25, 1.25
"""Matrices (N, P) that combining parts makes, with sums over all classes and without."""


class PartialOutputs(NamedTuple):
    """Reductions over parts P of the classes.

    Each is a contiguous (N, P) in the dtype of sums, or None if not asked for.  Sums over all
    classes are relative to the largest logit of the part; but for `distance`, they leave out that
    logit's exponential, 1.  All are 0 of an empty part.
    """

    largest: Tensor | None = None
    """The largest u of all classes; -inf of an empty part."""
    others: Tensor | None = None
    """Σ exp(u - largest)"""
    distance: Tensor | None = None
    """Σ (u - largest) exp(u - largest)"""
    squares: Tensor | None = None
    """Σ exp(2 (u - largest))"""
    other: Tensor | None = None
    """The largest u of the classes but the target; -inf of an empty part."""
    column: Tensor | None = None
    """Its class, as a number of the dtype of sums; the lowest of equal ones."""
    above: Tensor | None = None
    """How many u are above the target's, as such a number."""

    def combined(self) -> "PartialOutputs":
        """Return the reductions of all parts together, P = 1; of some rows at a time."""
        given = next((x for x in self if x is not None), None)
        if given is None:
            return self
        tokens, parts = given.shape
        size = max(1, int(COMBINED_BYTES // (MATRICES * parts * given.element_size())))
        if tokens <= size:
            return self._combined()
        every = [self._rows(rows)._combined() for rows in blocks(tokens, size)]
        return PartialOutputs(
            *(None if x[0] is None else torch.cat(x) for x in zip(*every, strict=True))
        )

    def _rows(self, rows: slice) -> "PartialOutputs":
        return PartialOutputs(*(None if x is None else x[rows] for x in self))

    def _combined(self) -> "PartialOutputs":
        result = PartialOutputs()
        if self.largest is not None and self.others is not None:
            result = self._combined_sums(self.largest, self.others)
        if self.other is not None and self.column is not None and self.above is not None:
            other = self.other.amax(1, keepdim=True)
            column = torch.where(self.other == other, self.column, torch.inf).amin(1, keepdim=True)
            column.masked_fill_(column == torch.inf, 0)  # of logits that are NaN
            above = self.above.sum(1, keepdim=True)
            result = result._replace(other=other, column=column, above=above)
        return result

    def _combined_sums(self, of_parts: Tensor, others: Tensor) -> "PartialOutputs":
        largest, owner = of_parts.max(1, keepdim=True)
        # what each part left out joins the others, but for one of the largest
        joins = torch.arange(of_parts.shape[1], device=owner.device) != owner
        apart = of_parts - torch.where(largest == -torch.inf, 0, largest)
        scale, total = apart.exp(), others + 1
        distance = squares = None
        if self.distance is not None:
            moved = total * apart.clamp(min=-1e30)  # the exponential of -inf is 0
            distance = (scale * (self.distance + moved)).sum(1, keepdim=True)
        if self.squares is not None:
            squares = (scale.square() * (self.squares + joins)).sum(1, keepdim=True)
        others = (scale * (others + joins)).sum(1, keepdim=True)
        return PartialOutputs(largest, others, distance, squares)

    def sums(self) -> dict[str, Tensor]:
        """Return lse and the outputs `OF_ALL` that are asked for, (N,), of all parts together."""
        if self.largest is None or self.others is None:
            return {}
        largest, others = self.largest[:, 0], self.others[:, 0]
        total, log_total = others + 1, others.log1p()
        found = {"lse": largest + log_total}
        if self.distance is not None:
            entropy = log_total - self.distance[:, 0] / total
            found["entropy"] = torch.where(largest == -torch.inf, torch.nan, entropy)
        if self.squares is not None:
            squares = (self.squares[:, 0] + 1) / total.square()
            found["sum_p_squared"] = torch.where(largest == -torch.inf, torch.nan, squares)
        return found


def stat_rows(outputs: Sequence[str]) -> dict[str, int]:
    """Return the row of each of `outputs` in the statistics, after those of every call.

    lse has one only beside others `OF_ALL` classes: else it follows from those of every call.
    """
    has_sums = not OF_ALL.isdisjoint(outputs)
    named = [name for name in OUTPUTS if name in outputs and (name != "lse" or has_sums)]
    return {name: NUM_STATS + row for row, name in enumerate(named)}


def row_count(options: LossOptions) -> int:
    """Return the rows of statistics beside those of every call."""
    return len(stat_rows(options.output_names)) + 2 * options.top_k


def reduce_outputs(
    partial: PartialOutputs | None,
    logit: Tensor,
    target: Tensor,
    class_mean: Tensor | None,
    outputs: Sequence[str],
) -> Tensor:
    """Return the `outputs` of all classes, stacked in the order of `stat_rows`.

    Args:
        partial: reductions of the parts of all ranks; None if no output needs them.
        logit: (N,) u_y, +inf for ignored tokens.
        target: (N,) classes in [0, V), of all ranks' classes.
        class_mean: (N,) Σ_v u / V; needed for "mean_logit" alone.
        outputs: names of outputs, at least one of them.
    """
    rows: dict[str, Tensor] = {}
    if class_mean is not None:
        rows["mean_logit"] = class_mean
    if partial is not None:
        every = partial.combined()
        rows |= every.sums()
        if every.other is not None and every.column is not None and every.above is not None:
            rows["rank"] = every.above[:, 0]
            is_top1 = every.other[:, 0] <= logit
            rows["is_top1"] = is_top1.to(every.other.dtype)
            rows["argmax"] = torch.where(is_top1, target.to(every.other.dtype), every.column[:, 0])
    return torch.stack([rows[name] for name in stat_rows(outputs)])
