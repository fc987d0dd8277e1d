"""Soft targets: K classes of every token, with probabilities that need not add up to 1.

The *lead* of a token, its class of the largest probability, is what the target is for a hard loss:
its exponential is left out of the sums, and logits are relative to its own.  With q_ik the
probabilities, c_ik the classes, y_i the lead, and the symbols of `loss_terms`,

    loss_i = A_i lse_i - B_i u_iy - Σ_k b_ik u_{i, c_ik} - Γ_i U_i + Z_i lse_i²
    b_ik = (1 - ε) t_i κ_{c_ik} q_ik, 0 where c_ik = y_i       B_i = the same Σ_k where c_ik = y_i
    A_i = B_i + Σ_k b_ik + ε t_i Σκ / V       Z_i = λ t_i       m_i = t_i, for "mean"

so that dL/du_iv = α_i p_iv - g_i Σ_k b_ik [v = c_ik] - γ_i κ_v at v ≠ y_i.  This is the loss of
`torch.nn.functional.cross_entropy` for probabilities that are 0 elsewhere.

The terms of the K classes are entries of the exponentials: with α_i = g_i a_i, in the place of e_iv

    e_iv - b_ik T_i / a_i        at v = c_ik, times the softcap's derivative

is put, computed of the class's own logit in the dtype of sums and rounded once, as the gradient of
a logit is: p and q cancel before they are rounded.  So dX's GEMM adds these terms.  So does dW's
where the factors of tokens are in the references of exponentials.  Where they are applied to the
hidden states, whose products are rounded too, the entries are 0 for dW's GEMM, and the terms are
added to its sums.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import torch
from torch import Tensor

from cutefce.ops.interface.options import LossOptions, TensorOptions
from cutefce.ops.rows.logit_map import LogitMap
from cutefce.ops.rows.loss_terms import LossTerms

if TYPE_CHECKING:
    from cutefce.ops.rows.statistics import RowStats

NO_CLASS = -1
"""The lead of a token with a bad probability or class, which is taken for a target out of range."""
LARGEST = torch.finfo(torch.float32).max
"""The largest probability of a class."""
WORDS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers of as many bytes as exponentials."""
LEAST_DERIVATIVE = 2.0**-24
"""The least |a|, in units of Σ|b|: z-loss can make it 0, by which entries are divided."""


@dataclass
class SoftTargets:
    """The classes of N tokens but their leads, ascending."""

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
    def of(
        y: Tensor,
        options: LossOptions,
        tensors: TensorOptions,
        vocab: int,
        own: slice,
        dtype: torch.dtype,
    ) -> tuple["SoftTargets | None", LossTerms]:
        """Return those of leads y (N,) among the `vocab` classes of all ranks, and their terms.

        This rank has the classes `own`; `dtype` is that of sums.  None where the lead is all.
        """
        index, q = tensors.target_indices, tensors.target_probs
        assert index is not None and q is not None
        index, epsilon, kappa = index.long(), options.label_smoothing, tensors.weight
        token = torch.ones(y.shape, dtype=dtype, device=y.device)
        if tensors.token_weights is not None:
            token = tensors.token_weights.to(dtype)
        factor = torch.where(y == options.ignore_index, 0, (1 - epsilon) * token)
        b = torch.where(factor[:, None] == 0, 0, q.to(dtype) * factor[:, None])
        if kappa is not None:
            kappa = kappa.to(dtype)
            b = b * kappa[index.clamp(0, vocab - 1)]
        is_lead = index == y[:, None]
        lead, b = torch.where(is_lead, b, 0).sum(1), b.masked_fill(is_lead, 0)
        others, smoothed, every = b.sum(1), lead.new_zeros(()), 0.0 * token
        if epsilon:
            every = epsilon / vocab * token
            smoothed = every * (vocab if kappa is None else kappa.sum())
        terms = LossTerms(
            lse=lead + others + smoothed,
            target=lead,
            class_row=every if epsilon else 0.0,
            lse_squared=options.z_loss * token if options.z_loss else 0.0,
            weight=token,
            class_weight=None if kappa is None else kappa[own],
            others=others,
        )
        if index.shape[1] == 1:
            return None, terms
        least = LEAST_DERIVATIVE * b.abs().sum(1)
        index, b, _ = joined(index, b)
        index = index - own.start if own.start else index
        absent = (b == 0) | (index < 0) | (index >= own.stop - own.start)
        index, b = index.masked_fill_(absent, 0), b.masked_fill_(absent, 0)
        return SoftTargets(index, b, least), terms

    @property
    def classes(self) -> tuple[Tensor, Tensor]:
        """The kernels' arguments, `index` and `coefficient`."""
        return self.index, self.coefficient

    def rows(self, rows: slice | Tensor) -> "SoftTargets":
        """Return those of some of the tokens."""
        more = (self.logits, self.excess)
        parts = (None if x is None else x[rows] for x in more)
        return SoftTargets(self.index[rows], self.coefficient[rows], self.least[rows], *parts)

    def bounded(self, a: Tensor | float) -> Tensor:
        """Return derivatives a (N,) by the log-sum-exps, moved away from 0."""
        a = torch.as_tensor(a, dtype=self.least.dtype, device=self.least.device)
        return torch.where(a.abs() < self.least, self.least.copysign(a), a)

    def entries(
        self, stats: "RowStats", a: Tensor, logits: LogitMap | None, *, of_exps: bool
    ) -> Tensor:
        """Return what takes the place of the exponentials of these classes, (N, K).

        These are relative to the references of `stats`; a (N,) are the derivatives by their lse.
        Without `of_exps`, return what is added to them: those in the dtype of sums are not rounded.
        """
        assert self.logits is not None
        terms = self.coefficient * (-stats.sum_exp / a)[:, None]
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
        """Return the excess (N,) of this rank's logits (N, K) over those of the leads (N,).

        It is 0 where a lead's logit is -inf: so is the loss infinite without it.
        """
        none = (self.coefficient == 0) | (lead == -torch.inf)[:, None]
        distance = torch.where(none, 0, logits - lead[:, None])
        return (self.coefficient * distance).sum(1)


class TargetEntries(NamedTuple):
    """What hidden states are multiplied by and added to rows of dW: Σ_{e: v_e = v} c_e h_{i_e}."""

    target: Tensor
    """(E,) int64 v, of which those outside [0, V) are left out."""
    coefficient: Tensor
    """(E,) c"""
    rows: Tensor | None
    """(E,) int64 i; None for e."""

    def sorted(self, vocab: int) -> "TargetEntries":
        """Return the same in the order of targets, int32: those below 0 as -1, others up to V.

        Entries of a target keep their order.
        """
        assert self.rows is not None
        target, order = self.target.clamp(-1, vocab).int().sort(stable=True)
        return TargetEntries(target, self.coefficient[order], self.rows[order])


def target_entries(
    index: Tensor,
    coefficient: Tensor,
    soft: SoftTargets | None,
    others: Tensor | None,
    order: Tensor | None,
) -> TargetEntries:
    """Return the entries of targets (N,) with their coefficients, and of soft ones with `others`.

    Token i has the hidden states of row order_i (N,), or i.
    """
    if soft is None or others is None:
        return TargetEntries(index, coefficient, order)
    width = 1 + others.shape[1]
    classes = torch.where(others == 0, NO_CLASS, soft.index)
    classes = torch.cat([index[:, None], classes], 1).flatten()
    factors = torch.cat([coefficient[:, None], others], 1).flatten()
    if order is None:
        order = torch.arange(len(index), device=index.device)
    return TargetEntries(classes, factors, order.repeat_interleave(width))


def leads(indices: Tensor, probs: Tensor, vocab: int, ignored: int) -> Tensor:
    """Return the class (...) of the largest probability of each token, of (..., K).

    `ignored` if all of them are 0, `NO_CLASS` if one is negative or not finite, or is of an index
    outside [0, vocab).
    """
    best = probs.argmax(-1, keepdim=True)
    lead = indices.gather(-1, best)[..., 0].long()
    lead = torch.where(_is_wrong(indices, probs, vocab).any(-1), NO_CLASS, lead)
    return torch.where((probs == 0).all(-1), ignored, lead)


def joined(index: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return each row's classes (N, K), ascending, and b (N, K): the last of equal ones has all.

    Also return their places before.  Their sums have a fixed order.
    """
    index, order = index.sort(dim=1, stable=True)
    b, step = b.gather(1, order), 1
    while step < index.shape[1]:  # of sorted classes, the last `step` of a run are summed
        equal = index[:, step:] == index[:, :-step]
        b[:, step:] += torch.where(equal, b[:, :-step], 0)
        step *= 2
    b[:, :-1].masked_fill_(index[:, 1:] == index[:, :-1], 0)
    return index, b, order


def check_values(y: Tensor, options: LossOptions, tensors: TensorOptions, vocab: int) -> None:
    """Raise ValueError or IndexError on a CPU for tokens y (N,) with a lead of `NO_CLASS`.

    `vocab` is that of all ranks.  A GPU is not synchronized for this.
    """
    indices, probs = tensors.target_indices, tensors.target_probs
    if y.device.type != "cpu" or indices is None or probs is None:
        return
    rows = y != options.ignore_index
    bad = rows[:, None] & ~((probs >= 0) & (probs <= LARGEST))
    if bool(bad.any()):
        raise ValueError(
            f"target_probs: got {float(probs[bad][0])}, expected numbers from 0 to {LARGEST:.3g}"
        )
    bad = rows[:, None] & _is_wrong(indices, probs, vocab)
    if bool(bad.any()):
        raise IndexError(
            f"target_indices: got {int(indices[bad][0])} with probability {float(probs[bad][0])}, "
            f"expected 0 <= index < {vocab} where the probability is not 0"
        )


def _is_wrong(indices: Tensor, probs: Tensor, vocab: int) -> Tensor:
    """Return where (..., K) a probability, or its index, is out of range."""
    outside = (probs != 0) & ((indices < 0) | (indices >= vocab))
    return outside | ~((probs >= 0) & (probs <= LARGEST))
