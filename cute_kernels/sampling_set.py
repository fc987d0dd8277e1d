"""Kernels of sampled gradients that depend on the sizes of a call."""

from cutefce.cute_kernels.spec.sampling import SortSamplesSpec, SparseRowsSpec

SORT_SIZES = 256, 1024, 4096
"""Entries of a row that kernels sort at most, in shared memory of up to 32 KiB."""
MAX_SAMPLE_SLOTS = SORT_SIZES[-1]


def sort_entries(name: str, slots: int, softcap: bool) -> SortSamplesSpec:
    """Return the kernel that sorts rows of up to `slots` entries."""
    return SortSamplesSpec(name, next(size for size in SORT_SIZES if slots <= size), softcap)


TABLE_TOKENS = 8192
"""Tokens of which 1024 features, 16 MiB, stay in the L2 cache while lists are summed."""


def weight_sums(name: str, dtype: str, tokens: int) -> SparseRowsSpec:
    """Return the kernel of dW: of fewer features at a time where fewer stay in the cache.

    Of a skewed vocabulary, a warp with a long list would leave the others of its block idle.
    """
    long = 128
    if tokens <= TABLE_TOKENS:
        return SparseRowsSpec(name, dtype, "weight", vectors=4, long=long)
    if tokens <= 2 * TABLE_TOKENS:
        return SparseRowsSpec(name, dtype, "weight", vectors=2, loads=8, long=long)
    return SparseRowsSpec(name, dtype, "weight", blocks=3, long=long)
