"""The arithmetic of a tile of logits, in plain torch functions that a compiler can fuse.

R rows, C classes.  `a` and `b` (R, C) are logits of two sides.  A row's log-sum-exp is the sum of
its `top` (R,), about the largest logit, and its `rest` (R,), so that a logarithm of a probability,
(a - top_a) - rest_a, is as exact as that of a log-softmax.  Every function writes to its first
argument.

A divergence from a to b is summed as Σ_v a (log a - log b) + b - a over probabilities: the last two
add up to 0 over all classes, and with them each term is 0 or more, and exact to rounding where both
are close.  A wrong log-sum-exp changes such a sum in second order alone.

Factors are the derivatives of a row's divergence by its logits, without their scale and
temperature, times `scale` (R,) and the softcap's derivative, of the bound κ, `cap` (R,), if given.
`kl` (R,) is the divergence of the row that they depend on.

Functions have more than eight parameters because fused kernels take tensors.
"""

import torch
from torch import Tensor


def add_exps_(top: Tensor, total: Tensor, logits: Tensor) -> None:
    """Add exp(logits - top) (R, C) to `total` (R,), raising `top` (R,) to the largest logit."""
    largest = torch.maximum(top, logits.amax(1))
    reference = torch.where(largest == -torch.inf, 0, largest)  # -inf - -inf is NaN
    sums = (logits - reference[:, None]).exp_().sum(1)
    total.copy_(sums + total * (top - reference).exp())
    top.copy_(largest)


def add_kl_(
    out: Tensor,
    a: Tensor,
    b: Tensor,
    top_a: Tensor,
    rest_a: Tensor,
    top_b: Tensor,
    rest_b: Tensor,
) -> None:
    """Add KL(a || b) of these classes to `out` (R,)."""
    p, q = _probabilities(a, top_a, rest_a), _probabilities(b, top_b, rest_b)
    distance = _distance(b, a, (top_b - top_a) + (rest_b - rest_a))
    terms = _difference(p, q, distance).sub_(distance.mul_(p))
    # a class with probability 0, whose logit may be -inf, has no term but that of b
    out.add_(torch.where(p == 0, q, terms).sum(1))


def add_mixture_kl_(
    out: Tensor,
    a: Tensor,
    b: Tensor,
    top_a: Tensor,
    rest_a: Tensor,
    top_b: Tensor,
    rest_b: Tensor,
    share: Tensor,
    other: Tensor,
) -> None:
    """Add KL(a || m) of these classes to `out` (R,), with m = share a + other b.

    More than eight parameters: see above.
    """
    p, q = _probabilities(a, top_a, rest_a), _probabilities(b, top_b, rest_b)
    distance = _distance(a, b, (top_a - top_b) + (rest_a - rest_b))
    to_b = _difference(p, q, -distance).mul_(other)
    terms = _log_ratio(distance, share, other).mul_(p)
    out.add_(torch.where(p == 0, 0, terms).add_(to_b).sum(1))


def kl_factors_of_first_(
    out: Tensor,
    a: Tensor,
    b: Tensor,
    top_a: Tensor,
    rest_a: Tensor,
    top_b: Tensor,
    rest_b: Tensor,
    kl: Tensor,
    cap: Tensor | None,
    scale: Tensor | None,
) -> None:
    """Write the factors of a's logits, for `kl` = KL(a || b), to `out` (R, C).

    More than eight parameters: see above.
    """
    p = _probabilities(a, top_a, rest_a)
    ratio = _distance(a, b, (top_a - top_b) + (rest_a - rest_b))
    terms = ratio.sub_(kl[:, None]).mul_(p)
    out.copy_(_scaled(torch.where(p == 0, 0, terms), a, cap, scale))


def kl_factors_of_second_(
    out: Tensor,
    b: Tensor,
    a: Tensor,
    top_b: Tensor,
    rest_b: Tensor,
    top_a: Tensor,
    rest_a: Tensor,
    kl: Tensor,
    cap: Tensor | None,
    scale: Tensor | None,
) -> None:
    """Write the factors of b's logits, for KL(a || b), to `out` (R, C); `kl` is not read.

    More than eight parameters: see above.
    """
    p, q = _probabilities(a, top_a, rest_a), _probabilities(b, top_b, rest_b)
    distance = _distance(b, a, (top_b - top_a) + (rest_b - rest_a))
    out.copy_(_scaled(_difference(p, q, distance), b, cap, scale))


def mixture_factors_(
    out: Tensor,
    a: Tensor,
    b: Tensor,
    top_a: Tensor,
    rest_a: Tensor,
    top_b: Tensor,
    rest_b: Tensor,
    kl: Tensor,
    cap: Tensor | None,
    scale: Tensor | None,
    share: Tensor,
    other: Tensor,
) -> None:
    """Write the factors of a's logits, for share KL(a || m) + other KL(b || m), to `out` (R, C).

    m = share a + other b, and `kl` is KL(a || m).  More than eight parameters: see above.
    """
    p = _probabilities(a, top_a, rest_a)
    distance = _distance(a, b, (top_a - top_b) + (rest_a - rest_b))
    terms = _log_ratio(distance, share, other).sub_(kl[:, None]).mul_(p).mul_(share)
    out.copy_(_scaled(torch.where(p == 0, 0, terms), a, cap, scale))


def _probabilities(logits: Tensor, top: Tensor, rest: Tensor) -> Tensor:
    """Return exp(logits - top - rest)."""
    return (logits - top[:, None]).sub_(rest[:, None]).exp_()


def _distance(a: Tensor, b: Tensor, of_sums: Tensor) -> Tensor:
    """Return log p_a - log p_b, of log-sum-exps that differ by `of_sums` (R,).

    The difference of close logits is exact, unlike that of their logarithms of probabilities.
    """
    return (a - b).sub_(of_sums[:, None])


def _difference(p: Tensor, q: Tensor, distance: Tensor) -> Tensor:
    """Return q - p of probabilities with log q - log p = `distance`, accurate where it is small."""
    return torch.where(distance.abs() < 1, distance.expm1().mul_(p), q - p)


def _log_ratio(distance: Tensor, share: Tensor, other: Tensor) -> Tensor:
    """Return log a - log m, with m = share a + other b and log a - log b = `distance`.

    The shares add up to 1.
    """
    excess = (-distance).expm1().mul_(other)  # m / a - 1
    is_close = excess.abs() < 0.5
    # otherwise relative to the larger one of a and b
    size, is_above = distance.abs(), distance > 0
    of_larger = torch.where(is_above, share, other)
    of_smaller = torch.where(is_above, other, share)
    far = torch.where(is_above, 0, distance)
    far.sub_(of_larger.addcmul_(of_smaller, (-size).exp_()).log_())
    return torch.where(is_close, excess.log1p_().neg_(), far)


def _scaled(terms: Tensor, logits: Tensor, cap: Tensor | None, scale: Tensor | None) -> Tensor:
    """Return derivatives by logits u as those by what the softcap was applied to, times `scale`."""
    if cap is not None:
        terms.mul_((logits / cap[:, None]).square_().neg_().add_(1))
    return terms if scale is None else terms.mul_(scale[:, None])
