"""What budgets mean that users do not give in bytes."""

MINIMUM = -1
"""The budget "min": the fastest plan that takes little more than the least memory."""
MAXIMUM = 1 << 62
"""The budget "max": the fastest plan."""
DEFAULT = 9 << 28
"""2.25 GiB: all exponentials of 8192 tokens and 128k classes in bfloat16, less than a compiled
unfused loss takes for the same; larger problems keep a part and recompute the rest."""
