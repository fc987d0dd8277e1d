"""Budgets of memory, and what a plan prints of its cost."""

MINIMUM = -1
"""The budget "min": the fastest plan that takes little more than the least memory."""
MAXIMUM = 1 << 62
"""The budget "max": the fastest plan."""
DEFAULT = 5 << 29
"""2.5 GiB: all exponentials of 8192 tokens and 128k classes in bfloat16, about what a compiled
unfused loss takes for the same; larger problems keep a part and recompute the rest."""


def predicted(workspace_bytes: int, seconds: float, budget: int | None) -> str:
    """Return what a plan prints of memory and time; `budget` are bytes that no plan is within."""
    time = f"{seconds * 1e3:.1f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.1f} µs"
    text = f"{_size(workspace_bytes)}, {time} predicted"
    if budget is not None:
        text += f"; no plan takes as little as the workspace of {_size(budget)}"
    return text


def _size(count: int) -> str:
    return f"{count / 2**20:.1f} MiB" if count >= 1 << 20 else f"{count} bytes"
