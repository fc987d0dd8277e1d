"""Device code that all kernels share."""
