"""The terms of divergences of two probabilities a and b, and their derivatives by logits.

Each is exact to rounding where both are close, as in `ops.divergence.elementwise`.  A term of a
divergence from a to b has b - a added, which is 0 over all classes: no term is below 0.
"""

from typing import Any

import cutlass.cute as cute
from cutlass import Float32

from cutefce.cute_kernels.common.dsl import LN_2, LOG2_E, exp2

CLOSE = 0.125
"""Arguments of expm1 and log1p below this have series: the hardware's exponentials and logarithms
have small absolute errors, which above it are small beside the result too."""
FAR = 126.0
"""The largest binary logarithm of probabilities' ratios that are computed with."""
EXPM1 = (1 / 120, 1 / 24, 1 / 6, 1 / 2, 1.0)
"""Coefficients of expm1(x) / x, from x⁴ on down."""
LOG1P = (1 / 7, -1 / 6, 1 / 5, -1 / 4, 1 / 3, -1 / 2, 1.0)
"""Those of log1p(x) / x, from x⁶ on down."""


@cute.jit
def polynomial(x: Float32, coefficients: Any) -> Float32:
    """Return x times the polynomial of these coefficients, the highest first."""
    result = Float32(coefficients[0])
    for coefficient in coefficients[1:]:
        result = result * x + coefficient
    return result * x


@cute.jit
def probability(logit: Float32, lse: Any) -> Float32:
    """Return exp(logit - top - rest) of `lse`, (top, rest)."""
    top, rest = lse
    return exp2((logit - top) * LOG2_E - rest * LOG2_E)


@cute.jit
def size(x: Float32) -> Float32:
    """Return the absolute value; of NaN, NaN."""
    return cute.arch.fmax(x, -x, nan=True)


@cute.jit
def sign(x: Float32) -> Float32:
    """Return -1, 0 or 1; of NaN, 0."""
    result = Float32(0.0)
    if x > 0.0:
        result = Float32(1.0)
    if x < 0.0:
        result = Float32(-1.0)
    return result


@cute.jit
def difference(a: Float32, b: Float32, distance: Float32) -> Float32:
    """Return b - a of probabilities, with `distance` = log b - log a."""
    result = polynomial(distance, EXPM1) * a
    if not size(distance) < CLOSE:
        result = b - a
    return result


@cute.jit
def kl_term(a: Float32, b: Float32, distance: Float32) -> Any:
    """Return the term of KL(a || b) and b - a, with `distance` = log b - log a."""
    change = difference(a, b, distance)
    term = change - distance * a
    if a == 0.0:  # a class that both exclude has distance NaN
        term = b
    return term, change


@cute.jit
def mixture_log(distance: Float32, shares: Any) -> Float32:
    """Return log a - log m, with `distance` = log a - log b.

    m = s a + t b, with s, t = `shares`, which add up to 1.
    """
    s, t = shares
    # a is below 2^-FAR where this is bounded, and so are its products with what is returned
    ratio = exp2(cute.arch.fmin(distance * -LOG2_E, Float32(FAR), nan=True))
    change = polynomial(-distance, EXPM1)
    if not size(distance) < CLOSE:
        change = ratio - 1.0
    over = t * change  # m / a - 1: where it is close to 0, a logarithm's absolute error is large
    result = -polynomial(over, LOG1P)
    if not size(over) < CLOSE:
        result = -LN_2 * cute.math.log2(s + t * ratio, fastmath=True)
    return result


@cute.jit
def mixture_logs(distance: Float32, shares: Any) -> Any:
    """Return `mixture_log` of both sides, and l / g - 1 of the larger one g and the other one l."""
    s, t = shares
    gap = size(distance)
    of_larger, of_smaller = s, t
    if distance < 0.0:
        of_larger, of_smaller = t, s
    ratio = exp2(gap * -LOG2_E)
    change = polynomial(-gap, EXPM1)
    if not gap < CLOSE:
        change = ratio - 1.0
    log_m = LN_2 * cute.math.log2(of_larger + of_smaller * ratio, fastmath=True)
    over_larger = of_smaller * change
    over_smaller = -of_larger * change * cute.arch.rcp_approx(ratio)
    larger, smaller = -polynomial(over_larger, LOG1P), -polynomial(over_smaller, LOG1P)
    if not size(over_larger) < CLOSE:
        larger = -log_m
    if not size(over_smaller) < CLOSE:
        smaller = -gap - log_m
    log_a, log_b = larger, smaller
    if distance < 0.0:
        log_a, log_b = smaller, larger
    return log_a, log_b, change


@cute.jit
def mixture_terms(a: Float32, b: Float32, distance: Float32, shares: Any) -> Any:
    """Return the terms of KL(a || m) and KL(b || m), `mixture_log`, and b - a."""
    log_a, log_b, relative = mixture_logs(distance, shares)
    s, t = shares
    change = weighted(a, relative)  # b - a; of classes that both exclude, `relative` is NaN
    if distance < 0.0:
        change = -relative * b
    return (weighted(a, log_a) + t * change, weighted(b, log_b) - s * change), log_a, change


@cute.jit
def variation_terms(a: Float32, b: Float32, distance: Float32) -> Any:
    """Return the terms of Σ a s and -Σ b s, with s the sign of `distance`; s, and b - a.

    `distance` is log a - log b.  The terms are NaN if either side is.
    """
    s, change = sign(distance), difference(a, b, -distance)
    half, mean = 0.5 * size(change), 0.5 * s * (a + b)
    return (half + mean, half - mean), s, change


@cute.jit
def weighted(a: Float32, x: Float32) -> Float32:
    """Return a x, 0 where a is 0."""
    result = a * x
    if a == 0.0:
        result = Float32(0.0)
    return result
