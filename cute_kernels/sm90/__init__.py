"""Hopper kernels."""
