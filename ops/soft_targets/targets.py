"""Soft targets: K classes of every token, with probabilities that need not add up to 1.

The *lead* of a token, its class of the largest probability, is what the target is for a hard loss:
its exponential is left out of the sums, and logits are relative to its own.  With q_ik the
probabilities, c_ik the classes, y_i the lead, and the symbols of `ops.rows.loss_terms`,

    loss_i = A_i lse_i - B_i u_iy - Σ_k b_ik u_{i, c_ik} - Γ_i U_i + Z_i lse_i²
    b_ik = (1 - ε) t_i κ_{c_ik} q_ik, 0 where c_ik = y_i       B_i = the same Σ_k where c_ik = y_i
    A_i = B_i + Σ_k b_ik + ε t_i Σκ / V       Z_i = λ t_i       m_i = t_i, for "mean"

so that dL/du_iv = α_i p_iv - g_i Σ_k b_ik [v = c_ik] - γ_i κ_v at v ≠ y_i.  This is the loss of
`torch.nn.functional.cross_entropy` for probabilities that are 0 elsewhere.

The terms of the K classes are entries of the exponentials: with α_i = g_i a_i, in the place of e_iv

    e_iv - b_ik T_i / a_i        at v = c_ik, times the softcap's derivative

is put, computed of the class's own logit in the dtype of sums and rounded once, as the gradient of
a logit is: p and q cancel before they are rounded.  So dX's GEMM adds these terms, and dW's, where
the factors of tokens are in the references of exponentials, or applied to these and to entries
before they are rounded.
"""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch
from torch import Tensor, is_tensor

from cutefce.ops.rows.logit_map import LogitMap
from cutefce.ops.rows.loss_terms import GivenTargets, LossTerms
from cutefce.ops.soft_targets.leads import sort_own, sum_equal

if TYPE_CHECKING:
    from cutefce.ops.rows.statistics import RowStats

S = TypeVar("S", bound="SoftTargets")
WORDS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers of as many bytes as exponentials."""
LEAST_DERIVATIVE = 2.0**-24
"""The least |a|, in units of Σ|b|: z-loss can make it 0."""


@dataclass
class SoftTargets:
    """The classes of N tokens but their leads, of this rank, ascending; then what is none."""

    replaces: ClassVar[bool] = False
    """Whether entries take the place of exponentials in the dtype of sums, and are put late."""

    index: Tensor
    """(N, K) int64 rows of this rank's weight; 0 where `coefficient` is."""
    coefficient: Tensor
    """(N, K) b, in the dtype of sums; 0 for leads, ignored tokens and classes of other ranks.

    The last of several equal classes has their sum, the others 0."""
    least: Tensor
    """(N,) the least |a|."""
    logits: Tensor | None = None
    """(N, K) the model's logits of these classes, once they are computed."""
    excess: Tensor | None = None
    """(N,) Σ_k b (u - u_y) over the classes of all ranks, set when logits of leads are known."""

    @staticmethod
    def of(x: GivenTargets) -> tuple["SoftTargets | None", LossTerms]:
        """Return those of leads, None where the lead is all, and the terms of the losses."""
        index, q, kappa = x.tensors.target_indices, x.tensors.target_probs, x.class_factors()
        assert index is not None and q is not None
        token, factor = x.token_factors(), 1 - x.options.label_smoothing
        index, scale = index.long(), torch.where(x.y == x.options.ignore_index, 0, factor * token)
        b = torch.where(scale[:, None] == 0, 0, q.to(x.dtype) * scale[:, None])
        if kappa is not None:
            b = b * kappa[index.clamp(0, len(kappa) - 1)]
        is_lead = index == x.y[:, None]
        lead, b = torch.where(is_lead, b, 0).sum(1), b.masked_fill(is_lead, 0)
        others, least = b.sum(1), LEAST_DERIVATIVE * b.abs().sum(1)
        terms = LossTerms.of_classes(x, token, lead, others)
        if index.shape[1] == 1:
            return None, terms
        index, order = sort_own(index, b == 0, x.own)
        b = sum_equal(index, b.gather(1, order))
        b.masked_fill_(index == x.own.stop - x.own.start, 0)
        return SoftTargets(index.masked_fill_(b == 0, 0), b, least), terms

    @property
    def classes(self) -> tuple[Tensor, Tensor]:
        """The kernels' arguments, `index` and `coefficient`."""
        return self.index, self.coefficient

    def rows(self: S, rows: slice | Tensor) -> S:
        """Return those of some of the tokens."""
        own: dict[str, Any] = {name: x[rows] for name, x in vars(self).items() if is_tensor(x)}
        return replace(self, **own)

    def bounded(self, a: Tensor | float) -> Tensor:
        """Return derivatives a (N,) by the log-sum-exps, moved away from 0."""
        a = torch.as_tensor(a, dtype=self.least.dtype, device=self.least.device)
        return torch.maximum(a.abs(), self.least).copysign_(a)

    def entries(
        self, terms: Tensor, stats: "RowStats", a: Tensor, logits: LogitMap | None, *, of_exps: bool
    ) -> Tensor:
        """Return what takes the place of the exponentials of these classes, (N, K).

        These are relative to the references of `stats`; `terms` (N, K) are what losses add to the
        derivatives by logits, and a (N,) the derivatives by lse.  Without `of_exps`, return what is
        added to exponentials: those in the dtype of sums are not rounded, and fit their sum T, from
        which one of a class's own logit differs where the class has most of the probability.
        """
        assert self.logits is not None
        terms = over_scale(terms, stats, a)
        if of_exps:
            terms += (self.logits - stats.reference[:, None]).exp_()
        if logits is not None:
            terms *= logits.cap_derivative(self.logits)
        return terms.masked_fill_(self.coefficient == 0, 0)

    def put(self, entries: Tensor | None, exps: Tensor, first: int) -> None:
        """Write `entries` (N, K) to exponentials `exps` (N, W) of the columns from `first` on.

        They are added to exponentials of their dtype unless they replace them.  None is for 0.
        """
        if entries is None:
            entries = self.coefficient.new_zeros(()).expand(self.index.shape)
        column = self.index - first
        inside = (self.coefficient != 0) & (column >= 0) & (column < exps.shape[1])
        if exps.dtype == entries.dtype and not self.replaces:
            added = torch.where(inside, entries, 0)
            exps.scatter_add_(1, column.masked_fill_(~inside, 0), added)
            return
        # an entry of another window repeats one of this window, or what there is in column 0
        one = inside.to(torch.uint8).argmax(1, keepdim=True)
        any_inside = inside.gather(1, one)
        column = torch.where(inside, column, column.gather(1, one).masked_fill_(~any_inside, 0))
        entries = entries.to(exps.dtype)
        other = torch.where(any_inside, entries.gather(1, one), exps[:, :1])
        put, words = torch.where(inside, entries, other), WORDS[exps.element_size()]
        # a CPU makes float32 copies of 16-bit numbers
        exps.view(words).scatter_(1, column, put.view(words))

    def excess_of(self, logits: Tensor, lead: Tensor) -> Tensor:
        """Return the excess (N,) of this rank's logits (N, K) over those of the leads (N,)."""
        distance = (logits - lead[:, None]).masked_fill_(self.coefficient == 0, 0)
        return (self.coefficient * distance).sum(1)


def over_scale(terms: Tensor, stats: "RowStats", a: Tensor) -> Tensor:
    """Return `terms` (N, K) over the factors a / T of exponentials, a (N,); 0 where a is.

    In this order, since T / a overflows where gradients are small.
    """
    quotients = (terms / a[:, None]).masked_fill_((a == 0)[:, None], 0)
    return quotients.mul_(stats.sum_exp[:, None])
