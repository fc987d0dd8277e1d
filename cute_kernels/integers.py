"""Integer arithmetic of sizes; takes Python integers, symbolic ones of torch, and a kernel's."""

from typing import TypeVar

Integer = TypeVar("Integer", bound=int)


def ceil_div(a: Integer, b: int) -> Integer:
    """Return a / b rounded up."""
    return -(-a // b)  # type: ignore[return-value]


def round_up(a: Integer, unit: int) -> Integer:
    """Return the smallest multiple of `unit` that is at least `a`."""
    return ceil_div(a, unit) * unit  # type: ignore[return-value]
