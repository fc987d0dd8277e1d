"""Integer arithmetic of sizes."""

from typing import TypeVar

Integer = TypeVar("Integer", bound=int)


def ceil_div(a: Integer, b: int) -> Integer:
    """Return a / b rounded up."""
    return -(-a // b)  # type: ignore[return-value]


def round_up(a: Integer, multiple_of: int) -> Integer:
    """Return the smallest multiple of `multiple_of` that is at least `a`."""
    return ceil_div(a, multiple_of) * multiple_of  # type: ignore[return-value]
