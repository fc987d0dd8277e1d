"""Probabilities of all classes as targets, as of `torch.nn.functional.cross_entropy`.

The *lead* of a token, its class of the largest probability, is what the target is for a hard loss:
its exponential is left out of the sums, and logits are relative to its own.  With q_iv the
probabilities, y_i the lead, and the symbols of `loss_terms`,

    loss_i = A_i (lse_i - u_iy) - Σ_v b_iv (u_iv - u_iy) + the terms of U_i and lse_i²
    b_iv = (1 - ε) t_i κ_v q_iv       A_i = Σ_v b_iv + ε t_i Σκ / V       m_i = t_i, for "mean"

so that dL/du_iv = α_i p_iv - g_i b_iv - γ_i κ_v.  Nothing is asked of q: it need not be 0 or more,
nor add up to 1, and no token is ignored for it.

Σ_v b_iv (u_iv - u_iy), the *excess*, is summed where the forward has a tile of logits.  The
backward computes logits again, and writes α_i p_iv - g_i b_iv in the place of exponentials, rounded
once: p and q cancel before.  So exponentials are never stored.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from cutefce.ops.interface.options import LossOptions, TensorOptions
from cutefce.ops.planning.step_memory import row_block_bytes
from cutefce.ops.primitives.elementwise import can_fuse, fused, weighted_sums_
from cutefce.ops.rows.loss_terms import LossTerms, token_factors


def no_others(x: Tensor) -> Tensor:
    """Return the sum of x over all ranks, of which there is one."""
    return x


@dataclass
class DenseTargets:
    """The probabilities of N tokens."""

    probs: Tensor
    """(N, V) q of this rank's classes, as given."""
    factor: Tensor
    """(N,) (1 - ε) t, in the dtype of sums; 0 for ignored tokens."""
    class_weight: Tensor | None
    """(V,) κ of this rank's classes; None for 1."""
    excess: Tensor | None = None
    """(N,) Σ_v κ_v q_v (u_v - u_y), which the tiles of a forward add up."""
    gradient: tuple[Tensor, Tensor] | None = None
    """a and c (N,) of a e_iv - c κ_v q_iv, which a backward writes for exponentials."""

    @staticmethod
    def of(
        y: Tensor,
        options: LossOptions,
        tensors: TensorOptions,
        vocab: int,
        own: slice,
        dtype: torch.dtype,
        add_ranks: Callable[[Tensor], Tensor] = no_others,
    ) -> tuple["DenseTargets", LossTerms]:
        """Return those of leads y (N,) among the `vocab` classes of all ranks, and their terms.

        This rank has the classes `own`; `dtype` is that of sums.  `add_ranks` returns the sum of a
        tensor over all ranks.
        """
        probs, token = tensors.target_probs, token_factors(y, tensors, dtype)
        assert probs is not None
        factor = torch.where(y == options.ignore_index, 0, (1 - options.label_smoothing) * token)
        kappa = None if tensors.weight is None else tensors.weight.to(dtype)
        own_kappa = None if kappa is None else kappa[own]
        row = (y - own.start).clamp(0, probs.shape[1] - 1)
        lead = probs.gather(1, row[:, None])[:, 0].to(dtype)
        if own_kappa is not None:
            lead = lead * own_kappa[row]
        lead = torch.where(row == y - own.start, lead, 0)
        sums = add_ranks(torch.stack([lead, _weighted_sums(probs, own_kappa, dtype)]))
        lead, total = torch.where(factor == 0, 0, sums * factor)
        b = lead, total - lead, total
        terms = LossTerms.of_probabilities(b, token, tensors, options, vocab, own)
        return DenseTargets(probs, factor, own_kappa), terms

    def rows(self, rows: slice | Tensor) -> "DenseTargets":
        """Return those of some of the tokens."""
        excess = None if self.excess is None else self.excess[rows]
        return DenseTargets(self.probs[rows], self.factor[rows], self.class_weight, excess)

    def largest(self) -> Tensor:
        """Return (N,) what no κ_v |q_iv| of a token is above."""
        norms: Tensor = torch.linalg.vector_norm(self.probs, torch.inf, dim=1)
        bound = norms.to(self.factor.dtype)
        return bound if self.class_weight is None else bound * self.class_weight.abs().amax()


def _weighted_sums(probs: Tensor, kappa: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return Σ_v κ_v q_iv (N,) of probabilities (N, V), in `dtype`."""
    sums = probs.new_empty(len(probs), dtype=dtype)
    if kappa is not None and can_fuse(probs):
        fused(weighted_sums_)(sums, probs, kappa[None])
        return sums
    size = max(1, row_block_bytes(probs.device.type) // (probs.shape[1] * dtype.itemsize))
    for start in range(0, len(probs), size):
        block = probs[start : start + size]
        if kappa is None:
            torch.sum(block, 1, dtype=dtype, out=sums[start : start + size])
        else:
            torch.mv(block.to(dtype), kappa, out=sums[start : start + size])
    return sums


def possible_leads(y: Tensor, tensors: TensorOptions) -> Tensor:
    """Return leads y (N,), the class of the largest bias in the place of those with q = 0.

    A bias may exclude a class of probability 0, whose logit is -inf then.
    """
    probs, bias = tensors.target_probs, tensors.linear_bias
    assert probs is not None
    if bias is None:
        return y
    return torch.where(probs.gather(1, y[:, None])[:, 0] == 0, bias.argmax(), y)
