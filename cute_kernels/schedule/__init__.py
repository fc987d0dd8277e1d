"""Tile order: integer functions for host and device, and the kernels' scheduler."""
