"""Device code shared by all kernels."""
