"""2**x by a polynomial, to relieve the hardware's exponential unit.

With n = round(x) and f = x - n, 2**x = 2**n · 2**f.  Adding `SHIFT` leaves n + 127 in the lowest
bits of the sum, which shifted left by 23 are the float 2**n; 2**f is a polynomial on [-1/2, 1/2].
The largest relative error is 2.5·10⁻⁷, about 2 ulp like the hardware's.  Results below 2⁻¹²⁶ are
flushed towards 0 (exactly 0 for -inf), results from 2¹²⁸ on are inf, and NaN stays NaN.

The same function serves device code and numpy, which tests it.
"""

from collections.abc import Callable
from typing import Any

SHIFT = 1.5 * 2**23 + 127
COEFFICIENTS = (0.00132764725, 0.00967554096, 0.0555071309, 0.240221202, 0.693146944, 1.00000012)
"""Coefficients of f⁵ to f⁰ with the least maximal relative error."""


def poly_exp2(
    x: Any, clamp: Callable[[Any, float, float], Any], shift_bits: Callable[[Any], Any]
) -> Any:
    """Return 2**x.

    `clamp(x, low, high)` keeps NaN; `shift_bits` shifts a float's bits left by 23, as a float.
    """
    x = clamp(x, -127.0, 128.0)
    shifted = x + SHIFT
    fraction = x - (shifted - SHIFT)
    result = COEFFICIENTS[0]
    for coefficient in COEFFICIENTS[1:]:
        result = result * fraction + coefficient
    return result * shift_bits(shifted)


def uses_poly_exp2(column: int, poly_per_16: int) -> bool:
    """Return whether a column is one of `poly_per_16` in every 16, evenly spread."""
    return column % 16 * poly_per_16 % 16 < poly_per_16
