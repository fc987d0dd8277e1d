"""Kernel specs: frozen descriptions of every kernel that can be compiled, which are its JIT keys.

kernel.py      what every spec has
gemm.py        of kernels that multiply matrices
rowwise.py     of row-wise kernels
sampling.py    of the kernels of sampled gradients
divergence.py  of the kernel of divergences

This package does not import the DSL.
"""
