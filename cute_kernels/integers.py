"""Integer arithmetic of sizes."""


def ceil_div(a: int, b: int) -> int:
    """Return a / b rounded up."""
    return -(-a // b)


def round_up(a: int, multiple_of: int) -> int:
    """Return the smallest multiple of `multiple_of` that is at least `a`."""
    return ceil_div(a, multiple_of) * multiple_of
