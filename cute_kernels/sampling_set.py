"""The kernels of a call with sampled gradients."""

import dataclasses
from typing import NamedTuple

from cutefce.cute_kernels.kernel_set import KernelSet
from cutefce.cute_kernels.spec import (
    ListSamplesSpec,
    PrepareSamplesSpec,
    ProjectExpSpec,
    SortSamplesSpec,
    SparseRowsSpec,
)


class SamplingKernels(NamedTuple):
    """What a call with sampled gradients launches beside the kernels of exact statistics."""

    estimate: PrepareSamplesSpec
    """The estimates of lse."""
    prepare: PrepareSamplesSpec
    project_exp: ProjectExpSpec
    """Row sums, and the entries."""
    prepare_again: PrepareSamplesSpec
    sort: SortSamplesSpec
    list_classes: ListSamplesSpec
    """The lists of dW."""
    grad_hidden: SparseRowsSpec
    grad_weight: SparseRowsSpec


SORT_SIZES = 256, 1024, 4096
"""Entries of a row that kernels sort at most, in shared memory of up to 32 KiB."""
MAX_SAMPLE_SLOTS = SORT_SIZES[-1]


def sampling_kernels(exact: KernelSet, tokens: int, slots: int) -> SamplingKernels:
    """Return the kernels of `tokens` rows with `slots` entries, beside those of exact losses."""
    row_sums, config = exact.row_sums, exact.exps.config
    name, dtype = row_sums.arch, row_sums.dtype
    size = next(size for size in SORT_SIZES if slots <= size)
    return SamplingKernels(
        estimate=PrepareSamplesSpec(name, "estimate"),
        prepare=PrepareSamplesSpec(name, "first"),
        project_exp=dataclasses.replace(row_sums, config=config, store=False, samples=True),
        prepare_again=PrepareSamplesSpec(name, "again"),
        sort=SortSamplesSpec(name, size, row_sums.transform.softcap),
        list_classes=ListSamplesSpec(name),
        grad_hidden=SparseRowsSpec(name, dtype, "hidden", blocks=3),
        grad_weight=weight_sums(name, dtype, tokens),
    )


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
