"""The arithmetic of a tile of logits, in plain torch functions that a compiler can fuse.

R rows, C classes.  `a` and `b` (R, C) are logits of two sides with log-sum-exps (R,), so that a's
probabilities are exp(a - lse_a).  Every function writes to its first argument.

A divergence from a to b is summed as Σ_v a (log a - log b) + b - a over probabilities: the last two
add up to 0 over all classes, and with them each term is 0 or more, and exact to rounding where both
are close.  A wrong log-sum-exp changes such a sum in second order alone.
"""

import torch
from torch import Tensor


def add_lse_(lse: Tensor, logits: Tensor) -> None:
    """Add exp(logits) (R, C) to the exponentials whose logarithm is `lse` (R,)."""
    lse.copy_(torch.logaddexp(lse, logits.logsumexp(1)))


def add_kl_(out: Tensor, a: Tensor, b: Tensor, lse_a: Tensor, lse_b: Tensor) -> None:
    """Add KL(a || b) of these classes to `out` (R,)."""
    log_a, log_b = a - lse_a[:, None], b - lse_b[:, None]
    p, q = log_a.exp(), log_b.exp()
    distance = log_b.sub_(log_a)
    terms = _difference(p, q, distance).sub_(distance.mul_(p))
    # a class with probability 0, whose logit may be -inf, has no term but that of b
    out.add_(torch.where(p == 0, q, terms).sum(1))


def add_mixture_kl_(
    out: Tensor, a: Tensor, b: Tensor, lse_a: Tensor, lse_b: Tensor, share: Tensor
) -> None:
    """Add KL(a || m) of these classes to `out` (R,), with m = share a + (1 - share) b."""
    log_a, log_b = a - lse_a[:, None], b - lse_b[:, None]
    p, q = log_a.exp(), log_b.exp()
    to_b = _difference(p, q, log_b - log_a).mul_(1 - share)
    distance = log_a.sub_(log_b)
    terms = _log_ratio(distance, share).mul_(p)
    out.add_(torch.where(p == 0, 0, terms).add_(to_b).sum(1))


def kl_factors_of_first_(
    out: Tensor,
    a: Tensor,
    b: Tensor,
    lse_a: Tensor,
    lse_b: Tensor,
    kl: Tensor,
    cap: Tensor | None,
    boost: Tensor | None,
) -> None:
    """Write the factors of a's logits, for `kl` = KL(a || b), to `out` (R, C)."""
    log_a, log_b = a - lse_a[:, None], b - lse_b[:, None]
    p = log_a.exp()
    terms = log_a.sub_(log_b).sub_(kl[:, None]).mul_(p)
    out.copy_(_boosted(torch.where(p == 0, 0, terms), a, cap, boost))


def kl_factors_of_second_(
    out: Tensor,
    b: Tensor,
    a: Tensor,
    lse_b: Tensor,
    lse_a: Tensor,
    kl: Tensor,
    cap: Tensor | None,
    boost: Tensor | None,
) -> None:
    """Write the factors of b's logits, for KL(a || b), to `out` (R, C); `kl` is not read."""
    log_a, log_b = a - lse_a[:, None], b - lse_b[:, None]
    p, q = log_a.exp(), log_b.exp()
    terms = _difference(p, q, log_b.sub_(log_a))
    out.copy_(_boosted(terms, b, cap, boost))


def mixture_factors_(
    out: Tensor,
    a: Tensor,
    b: Tensor,
    lse_a: Tensor,
    lse_b: Tensor,
    kl: Tensor,
    cap: Tensor | None,
    boost: Tensor | None,
    share: Tensor,
) -> None:
    """Write the factors of a's logits, for share KL(a || m) + (1 - share) KL(b || m), to `out`.

    m = share a + (1 - share) b, and `kl` is KL(a || m).  More than eight parameters: fused kernels
    take tensors.
    """
    log_a, log_b = a - lse_a[:, None], b - lse_b[:, None]
    p = log_a.exp()
    terms = _log_ratio(log_a.sub_(log_b), share).sub_(kl[:, None]).mul_(p).mul_(share)
    out.copy_(_boosted(torch.where(p == 0, 0, terms), a, cap, boost))


def _difference(p: Tensor, q: Tensor, distance: Tensor) -> Tensor:
    """Return q - p of probabilities with log q - log p = `distance`, accurate where it is small."""
    return torch.where(distance.abs() < 1, distance.expm1().mul_(p), q - p)


def _log_ratio(distance: Tensor, share: Tensor) -> Tensor:
    """Return log a - log m, with m = share a + (1 - share) b and log a - log b = `distance`."""
    fall = (-distance.abs()).expm1()
    is_above = distance > 0
    # m relative to the larger one of a and b
    rest = fall.mul_(torch.where(is_above, 1 - share, share)).log1p()
    return torch.where(is_above, 0, distance).sub_(rest)


def _boosted(terms: Tensor, logits: Tensor, cap: Tensor | None, boost: Tensor | None) -> Tensor:
    """Return derivatives by logits u as those by what the softcap was applied to, times `boost`."""
    if cap is not None:
        terms.mul_((logits / cap[:, None]).square_().neg_().add_(1))
    return terms if boost is None else terms.mul_(boost)
