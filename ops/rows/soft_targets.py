"""Soft targets: K classes of every token, with probabilities that need not add up to 1.

The *lead* of a token, its class of the largest probability, is what the target is for a hard loss:
its exponential is left out of the sums, and logits are relative to its own.  Of all K classes,
exponentials of 16 bits are stored as 0: their part of the gradients, where p and q may be nearly
equal, is computed of their logits in the dtype of sums.  With q_ik the probabilities, c_ik the
classes, y_i the lead, and the symbols of `loss_terms`,

    loss_i = A_i lse_i - B_i u_iy - Σ_k b_ik u_{i, c_ik} - Γ_i U_i + Z_i lse_i²
    b_ik = (1 - ε) t_i κ_{c_ik} q_ik, 0 where c_ik = y_i       B_i = the same Σ_k where c_ik = y_i
    A_i = B_i + Σ_k b_ik + ε t_i Σκ / V       Z_i = λ t_i       m_i = t_i, for "mean"

so that dL/du_iv = α_i p_iv - g_i Σ_k b_ik [v = c_ik] - γ_i κ_v at v ≠ y_i.  This is the loss of
`torch.nn.functional.cross_entropy` for probabilities that are 0 elsewhere.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from cutefce.ops.interface.options import LossOptions, TensorOptions
from cutefce.ops.rows.logit_map import by_rows
from cutefce.ops.rows.loss_terms import LossTerms

NO_CLASS = -1
"""The lead of a token with a bad probability or class, which is taken for a target out of range."""


@dataclass
class SoftTargets:
    """The classes of N tokens but their leads."""

    index: Tensor
    """(N, K) int64 rows of this rank's weight; 0 where `coefficient` is."""
    coefficient: Tensor
    """(N, K) b, in the dtype of sums; 0 for leads, ignored tokens and classes of other ranks."""
    distinct: Tensor | None = None
    """(N, K) bool: which have one, but for repetitions of a class; None if exponentials are stored
    of these classes too, because they are not rounded."""
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
        counts = (y != options.ignore_index)[:, None] & (q != 0)
        b = q.to(dtype) * ((1 - epsilon) * token)[:, None]
        if kappa is not None:
            kappa = kappa.to(dtype)
            b = b * kappa[index.clamp(0, vocab - 1)]
        is_lead = index == y[:, None]
        lead = torch.where(counts & is_lead, b, 0).sum(1)
        b = torch.where(counts & ~is_lead, b, 0)
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
        index = index - own.start if own.start else index
        here = (b != 0) & (index >= 0) & (index < own.stop - own.start)
        return SoftTargets(torch.where(here, index, 0), torch.where(here, b, 0)), terms

    def exclude(self) -> None:
        """Have exponentials of these classes stored as 0."""
        here = self.coefficient != 0
        self.distinct = here & ~_repeats(torch.where(here, self.index, NO_CLASS))

    def rows(self, rows: slice | Tensor) -> "SoftTargets":
        """Return those of some of the tokens."""
        more = (self.distinct, self.logits, self.excess)
        parts = (None if x is None else x[rows] for x in more)
        return SoftTargets(self.index[rows], self.coefficient[rows], *parts)

    def gradients(self, scale: Tensor, upstream: Tensor, reference: Tensor) -> Tensor:
        """Return dL/du (N, K) of these classes, beyond that of stored exponentials.

        `upstream` are the gradients of the losses, () or (N,).
        `scale` (N,) are the factors of exponentials relative to `reference` (N,).  That of a class
        that occurs twice is the sum of both.
        """
        target = -by_rows(upstream, self.coefficient) * self.coefficient
        if self.distinct is None:
            return target
        assert self.logits is not None
        exps = torch.where(self.distinct, (self.logits - reference[:, None]).exp(), 0)
        return target.addcmul_(scale[:, None], exps)

    def clear(self, exps: Tensor, first: int) -> None:
        """Make exponentials `exps` (N, W) of the classes from `first` on 0 at these classes."""
        if self.distinct is None:
            return
        column = self.index - first
        inside = self.distinct & (column >= 0) & (column < exps.shape[1])
        # several may write to one place, which gets the least value in any order; the bits of
        # numbers from 0 on are integers in the same order, and of those no float32 copy is made
        least = torch.where(inside, 0, torch.iinfo(torch.int16).max).to(torch.int16)
        bits, column = exps.view(torch.int16), column.masked_fill_(~inside, 0)
        bits.scatter_reduce_(1, column, least, "amin")

    def excess_of(self, logits: Tensor, lead: Tensor) -> Tensor:
        """Return the excess (N,) of this rank's logits (N, K) over those of the leads (N,)."""
        distance = torch.where(self.coefficient == 0, 0, logits - lead[:, None])
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


def _repeats(index: Tensor) -> Tensor:
    """Return where (N, K) another element of the row has the same value, but at one of them."""
    values, order = index.sort(1)
    equal = torch.zeros_like(index, dtype=torch.bool)
    equal[:, 1:] = values[:, 1:] == values[:, :-1]
    return torch.empty_like(equal).scatter_(1, order, equal)


def check_values(y: Tensor, options: LossOptions, tensors: TensorOptions, vocab: int) -> None:
    """Raise ValueError or IndexError on a CPU for tokens y (N,) with a lead of `NO_CLASS`.

    `vocab` is that of all ranks.  A GPU is not synchronized for this.
    """
    indices, probs = tensors.target_indices, tensors.target_probs
    if y.device.type != "cpu" or indices is None or probs is None:
        return
    rows = y != options.ignore_index
    bad = rows[:, None] & ~((probs >= 0) & probs.isfinite())
    if bool(bad.any()):
        raise ValueError(
            f"target_probs: got {float(probs[bad][0])}, expected finite numbers, 0 or more"
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
    return outside | ~(probs >= 0) | (probs == torch.inf)
