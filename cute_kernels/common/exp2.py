"""2**x by products and sums, for where the hardware's own exponentials are too few.

With n = round(x) and f = x - n, 2**x = 2**n · 2**f.  Adding `SHIFT` leaves n + 127 in the lowest
bits of the sum, where moving them by 23 gives the float 2**n; 2**f is a polynomial on [-1/2, 1/2].
The largest relative error is 2.5·10⁻⁷: about 2 units of the last place, as the hardware's.  Below
2⁻¹²⁶ little is left of a result, of -inf exactly 0; from 2¹²⁸ on it is inf; NaN stays NaN.

One function for a kernel's numbers and for numpy's, which test it.
"""

from collections.abc import Callable
from typing import Any

SHIFT = 1.5 * 2**23 + 127
COEFFICIENTS = (0.00132764725, 0.00967554096, 0.0555071309, 0.240221202, 0.693146944, 1.00000012)
"""Of f⁵ down to 1, for the least relative error."""


def emulated_exp2(
    x: Any, clamp: Callable[[Any, float, float], Any], power: Callable[[Any], Any]
) -> Any:
    """Return 2**x; `power` moves the bits of a float by 23, as a float."""
    x = clamp(x, -127.0, 128.0)
    shifted = x + SHIFT
    fraction = x - (shifted - SHIFT)
    result = COEFFICIENTS[0]
    for coefficient in COEFFICIENTS[1:]:
        result = result * fraction + coefficient
    return result * power(shifted)
