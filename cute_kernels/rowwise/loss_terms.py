"""The loss of a token as a function of its statistics, where all tokens have the same terms.

With lse = ρ + log T, nll the token's cross entropy and U_i = Σ_v κ_v u_iv:

    loss_i = A nll_i + (A - B) (lse_i - nll_i) - Γ U_i + Z lse_i²
    ∂loss_i/∂lse_i = A + 2 Z lse_i

The host's `LossTerms` says what A, B, Γ and Z are.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from cutefce.cute_kernels.common.dsl import LN_2
from cutefce.cute_kernels.workspace import Stat


class Terms(NamedTuple):
    """A launch argument."""

    lse: Float32
    """A"""
    target: Float32
    """B"""
    class_row: Float32
    """Γ"""
    lse_squared: Float32
    """Z"""


def terms_argument(present: bool) -> Terms | None:
    """Return the argument to compile a kernel for, None for plain cross entropies."""
    return Terms(*[Float32(0.0)] * 4) if present else None


@cute.jit
def lse_of(stats: cute.Tensor, row: Int32) -> Float32:
    """Return the log-sum-exp of a row of stats (S, N)."""
    return stats[Stat.REFERENCE, row] + cute.math.log2(stats[Stat.SUM_EXP, row]) * LN_2


@cute.jit
def token_loss(terms: Any, class_logits: Any, stats: cute.Tensor, row: Int32) -> Float32:
    """Return the loss of a row; `class_logits` are U (N,), None if no loss depends on them."""
    nll = stats[Stat.LOSS, row]
    loss = nll
    if cutlass.const_expr(terms is not None):
        lse = lse_of(stats, row)
        loss = terms.lse * nll
        if cutlass.const_expr(class_logits is not None):
            loss += (terms.lse - terms.target) * (lse - nll) - terms.class_row * class_logits[row]
        if terms.lse_squared != 0.0:
            loss += terms.lse_squared * lse * lse
        if nll == Float32.inf:
            loss = terms.lse * nll  # the other terms may be infinite or NaN
    return loss


@cute.jit
def by_lse(terms: Any, stats: cute.Tensor, row: Int32) -> Float32:
    """Return the derivative of the loss of a row by its log-sum-exp; 1 without terms."""
    result = Float32(1.0)
    if cutlass.const_expr(terms is not None):
        result = terms.lse
        if terms.lse_squared != 0.0:
            result += 2.0 * terms.lse_squared * lse_of(stats, row)
    return result
