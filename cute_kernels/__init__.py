"""CuTe DSL kernels: problems, configurations, kernel specs, the JIT compiler and its cache.

    problem, config          what to compute, and how
    variant                  what a call does to logits, and what else it reduces
    arch/                    GPUs: limits and defaults of each architecture
    spec, kernel_set         kernel specs (the JIT keys), and those that a call needs
    sampling_set             those of sampled gradients that depend on sizes
    workspace                the buffers that kernels share
    schedule/, common/       tile order and device code for all architectures
    sm90/, sm100/, rowwise/  the kernels, one a file
    soft_targets/, sampling/, divergence/
                             those of these calls alone, for all architectures
    jit/                     compiler and library cache
    cache_files              the user's cache folder: trust, locks, atomic writing
    process_cache            what a process computes once

This package imports neither `cutefce.autotune_cache` nor `cutefce.ops`.
"""
