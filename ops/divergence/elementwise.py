"""The arithmetic of a tile of logits, in plain torch functions that a compiler can fuse.

R rows, C classes.  `a` and `b` (R, C) are logits of two sides.  A row's log-sum-exp is the sum of
its top, about the largest logit, and its rest, so that a logarithm of a probability, (a - top) -
rest, is as exact as that of a log-softmax; `lses` (R, 4) are top and rest of a, then of b.  Every
function writes to its first argument.

A divergence from a to b is summed as Σ_v a (log a - log b) + b - a over probabilities: the last two
add up to 0 over all classes, and with them each term is 0 or more, and exact to rounding where both
are close.  A wrong log-sum-exp changes such a sum in second order alone.

Total variation is ½ Σ_v |a - b|.  Its derivative by a's logits is ½ a (s - Σ_u a_u s_u), where s is
the sign of log a - log b: formed in the same way everywhere, so that a class has one sign.

Factors are the derivatives of a row's divergence by its logits, without their scale and
temperature, times `scale` (R,) and the derivative of the bound κ, `cap` (R,), if given.
`kl` (R,) is the divergence of the row that they depend on, or the sum of a s.
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
    variation: Tensor | None,
    a: Tensor,
    b: Tensor,
    lses: Tensor,
    share: Tensor | None,
    other: Tensor | None,
) -> None:
    """Add KL(a || b) of these classes to `out` (R,); with shares KL(a || share a + other b).

    Add their total variation to `variation` (R,), if given.
    """
    p, q = _probabilities(a, lses[:, :2]), _probabilities(b, lses[:, 2:])
    ratio = _ratio(a, b, lses)
    to_b = _difference(p, q, ratio.neg_() if share is None else -ratio)
    if variation is not None:
        variation.add_(to_b.abs().sum(1), alpha=0.5)
    if share is None or other is None:
        to_b.sub_(ratio.mul_(p))
        # a class with probability 0, whose logit may be -inf, has no term but that of b
        terms = torch.where(p == 0, q, to_b)
    else:
        terms = _log_ratio(ratio, share, other).mul_(p)
        terms = torch.where(p == 0, 0, terms).add_(to_b.mul_(other))
    out.add_(terms.sum(1))


def add_variation_(
    of_a: Tensor, of_b: Tensor, variation: Tensor, a: Tensor, b: Tensor, lses: Tensor
) -> None:
    """Add the total variation of these classes to `variation` (R,).

    Add Σ a s to `of_a` (R,) and -Σ b s to `of_b`: half of what |a - b| ± (a + b) s adds up to,
    which is NaN if either side is.
    """
    p, q = _probabilities(a, lses[:, :2]), _probabilities(b, lses[:, 2:])
    ratio = _ratio(a, b, lses).neg_()
    size = _difference(p, q, ratio).abs_().sum(1)
    # the sign of NaN, of a class that both exclude, is 0
    signed = ratio.sign_().mul_(p.add_(q)).sum(1)
    of_a.add_(size - signed, alpha=0.5)
    of_b.add_(size + signed, alpha=0.5)
    variation.add_(size, alpha=0.5)


def factors_(
    out: Tensor,
    a: Tensor,
    b: Tensor,
    lses: Tensor,
    kl: Tensor | None,
    cap: Tensor | None,
    scale: Tensor,
    share: Tensor | None,
    other: Tensor | None,
) -> None:
    """Write the factors of a's logits to `out` (R, C).

    The divergence is KL(a || b), which is `kl`; without `kl` KL(b || a); with `other` share KL(a ||
    m) + other KL(b || m), where m = share a + other b and `kl` is KL(a || m); with `share` alone,
    that much of |a - b|, and `kl` is Σ a s.  More than eight parameters: a fused kernel takes
    tensors.
    """
    p, ratio = _probabilities(a, lses[:, :2]), _ratio(a, b, lses)
    if kl is None:
        terms = _difference(_probabilities(b, lses[:, 2:]), p, ratio)
    elif share is not None and other is None:
        terms = ratio.sign_().sub_(kl[:, None]).mul_(p).mul_(share)
    else:
        if share is not None and other is not None:
            ratio = _log_ratio(ratio, share, other)
        terms = ratio.sub_(kl[:, None]).mul_(p)
        if share is not None:
            terms.mul_(share)
        terms = torch.where(p == 0, 0, terms)
    del p, ratio  # freed before the next ones are allocated
    if cap is not None:
        terms.mul_((a / cap[:, None]).square_().neg_().add_(1))
    out.copy_(terms.mul_(scale[:, None]))


def _probabilities(logits: Tensor, lses: Tensor) -> Tensor:
    """Return the probabilities of a side, of top and rest (R, 2)."""
    return (logits - lses[:, :1]).sub_(lses[:, 1:]).exp_()


def _ratio(a: Tensor, b: Tensor, lses: Tensor) -> Tensor:
    """Return log p_a - log p_b.

    The difference of close logits is exact, unlike that of their logarithms of probabilities.
    """
    of_lses = (lses[:, :1] - lses[:, 2:3]) + (lses[:, 1:2] - lses[:, 3:])
    return (a - b).sub_(of_lses)


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
