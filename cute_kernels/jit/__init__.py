"""Compiles kernels from their specs, and caches the libraries."""
