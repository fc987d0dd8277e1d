"""Budgets that are no number of bytes, as plans get them."""

MINIMUM = -1
"""The budget "min": the fastest plan that takes little more than the least memory."""
MAXIMUM = 1 << 62
"""The budget "max": the fastest plan."""
