"""K classes of every token whose log-probabilities are outputs, each with a gradient.

With the classes c_ik, their log-probabilities log p_ik and the upstream gradients g_ik of these,

    dL/du_iv = α_i p_iv + Σ_k g_ik [v = c_ik]        α_i = dL/dlse_i - Σ_k g_ik

To a backward they are soft targets whose coefficients b = -g come with the upstream gradients.  The
*lead* of a token is its first class that is not ignored.

Their entries take the place of exponentials of any dtype, and a backward puts all of them: another
backward finds the entries of this one.  With the gradient of entropy, exponentials e become
e (a + b log e) first, which contains all factors of a token.
"""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import torch
from torch import Tensor

from cutefce.ops.rows.logit_map import LogitMap
from cutefce.ops.rows.loss_terms import GivenTargets
from cutefce.ops.soft_targets.leads import NO_CLASS, is_outside, sort_own, sum_equal
from cutefce.ops.soft_targets.targets import SoftTargets

if TYPE_CHECKING:
    from cutefce.ops.rows.statistics import RowStats


class ClassGradients(NamedTuple):
    """The upstream gradients of N tokens with K classes each."""

    values: Tensor
    """(N, K) g in the order of the classes; the last of several equal classes has their sum."""
    others: Tensor
    """(N,) Σ_k g_ik over the classes of all ranks but the lead."""
    by_softmax: Tensor
    """(N,) α without that of entropy, moved away from 0."""


@dataclass(kw_only=True)
class OutputClasses(SoftTargets):
    """The classes of N tokens; `coefficient` is 1, or 0 where nothing is put.

    They ascend, in a backward each class once.  `excess` are the logits (N, K) of the classes of
    all ranks but leads, in the order of the call.
    """

    replaces: ClassVar[bool] = True

    order: Tensor
    """(N, K) int64: places of the classes in the call."""
    is_lead: Tensor
    """(N, K) bool, in the order of the call."""
    counts: Tensor
    """(N, K) bool: the class is not ignored; in the order of the call."""
    vocab: int
    """Rows of this rank's weight."""
    gradients: ClassGradients | None = None
    """In a backward."""

    @staticmethod
    def of_leads(x: GivenTargets) -> "OutputClasses | None":
        """Return those of leads; None where the lead is all."""
        index, ignored, own = x.tensors.target_indices, x.options.ignore_index, x.own
        assert index is not None
        if index.shape[1] == 1:
            return None
        index = index.long()
        counts = (index != ignored) & (x.y != ignored)[:, None]
        is_lead = index == x.y[:, None]
        vocab = own.stop - own.start
        index, order = sort_own(index, ~counts | is_lead, own)
        absent = index == vocab
        return OutputClasses(
            index=index.masked_fill_(absent, 0),
            coefficient=absent.logical_not().to(x.dtype),
            least=x.y.new_zeros(x.y.shape, dtype=x.dtype),
            order=order,
            is_lead=is_lead,
            counts=counts,
            vocab=vocab,
        )

    def excess_of(self, logits: Tensor, lead: Tensor) -> Tensor:
        """Return this rank's logits (N, K), 0 of other classes: those of all ranks add up."""
        own = torch.where(self.coefficient == 0, 0, logits)
        return torch.empty_like(own).scatter_(1, self.order, own)

    def log_probs(self, stats: "RowStats") -> Tensor:
        """Return the log-probabilities (N, K) of the classes of all ranks, 0 of ignored ones."""
        assert self.excess is not None
        loss = stats.loss[:, None]
        values = (self.excess - stats.lse[:, None]).clamp_(max=0)
        values = torch.where(self.is_lead | loss.isnan(), -loss, values)
        return values.masked_fill_(~self.counts, 0)

    def take(self, upstream: Tensor) -> tuple["OutputClasses", Tensor]:
        """Return these in the form of a backward, and upstream gradients as of the leads alone.

        `upstream` (K + 2, N) are those of log-probabilities, lse and entropy; (3, N) remain.
        """
        assert self.logits is not None and self.gradients is None
        values, of_lse = upstream[:-2].t(), upstream[-2]
        values = torch.where(self.counts, values, 0)
        lead = torch.where(self.is_lead, values, 0).sum(1)
        values = values.masked_fill(self.is_lead, 0)
        others, size = values.sum(1), values.abs().sum(1) + lead.abs() + of_lse.abs()
        absent = self.coefficient == 0
        index = self.index.masked_fill(absent, self.vocab)
        values = sum_equal(index, values.gather(1, self.order).masked_fill_(absent, 0))
        put = index < self.vocab
        put[:, :-1] &= index[:, 1:] != index[:, :-1]
        part = replace(
            self,
            index=index.masked_fill_(~put, 0),
            coefficient=put.to(values.dtype),
            least=torch.finfo(size.dtype).eps / 2 * size,
        )
        part.gradients = ClassGradients(values, others, part.bounded(of_lse - lead - others))
        return part, torch.stack([lead, *upstream[-2:]])

    def entries_by_log(
        self, stats: "RowStats", a: Tensor, b: Tensor, logits: LogitMap | None
    ) -> Tensor:
        """Return what takes the place of e (a + b log e), with a and b (N,)."""
        assert self.logits is not None and self.gradients is not None
        log_e = self.logits - stats.reference[:, None]
        e = log_e.exp()
        entries = torch.where(e == 0, 0, e * (a[:, None] + b[:, None] * log_e))
        values = self.gradients.values
        if logits is not None:
            values = values * logits.derivative(self.logits)
        return (entries + values).masked_fill_(self.coefficient == 0, 0)


def class_leads(indices: Tensor, vocab: int, ignored: int) -> Tensor:
    """Return the first class (...) of each token that is not `ignored`, of (..., K).

    `ignored` if all are, `NO_CLASS` if one is outside [0, vocab).
    """
    indices = indices.long()
    counts = indices != ignored
    first = counts.to(torch.uint8).argmax(-1, keepdim=True)
    lead = indices.gather(-1, first)[..., 0]
    wrong = (counts & is_outside(indices, vocab)).any(-1)
    # what is ignored may be `NO_CLASS`
    return torch.where(wrong, NO_CLASS - (ignored == NO_CLASS), lead)
