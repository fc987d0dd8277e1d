"""Blackwell kernels."""
