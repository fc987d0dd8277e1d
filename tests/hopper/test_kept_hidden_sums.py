"""The kernel that adds to kept sums of dX, emulated, against the format's definition."""

import pytest
import torch

pytest.importorskip("cutlass")

from cutefce.cute_kernels.arch.sm90 import KEPT_128, KEPT_192
from cutefce.cute_kernels.config import GemmConfig
from cutefce.cute_kernels.spec.gemm import GradGemmSpec
from tests.emulation.hopper import run
from tests.hopper.test_kept_weight_sums import (
    CLUSTERS,
    LOW,
    TALL,
    Sums,
    any_floats,
    named,
    same_bits,
)
from tests.support.tiers import rest_slow

KERNELS = ((LOW, 8), (LOW, 4), (KEPT_128, 4), (KEPT_192, 8), (KEPT_192, 4))
"""Configurations, and low bits of the sums."""
PRODUCTS = {
    "two K tiles": ((140, 136, 72), 0),
    "many K tiles": ((330, 136, 300), 0),
    "many K tiles, overwritten": ((330, 136, 300), 1),
    "one row": ((1, 64, 200), 0),
    "few columns": ((17, 8, 70), 0),
    "several tiles of each warpgroup": ((1100, 264, 40), 0),
}
"""Tokens, hidden and columns of a window, and whether the sums are overwritten."""


def operands(tokens: int, hidden: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return e (N, K), columns of a wider matrix, and w (K, D), small integers."""
    generator = torch.Generator().manual_seed(0)
    wide = torch.randint(0, 2, (tokens, columns + 24 + -columns % 8), generator=generator)
    w = torch.randint(-2, 3, (columns, hidden), generator=generator).bfloat16()
    return wide.bfloat16()[:, 16 : 16 + columns], w


def add(
    sums: Sums,
    e: torch.Tensor,
    w: torch.Tensor,
    config: GemmConfig,
    overwrite: int = 0,
    count: int | None = None,
    seed: int = 0,
) -> None:
    """Add e w to `sums` by the emulated kernel."""
    kernel = GradGemmSpec("sm_90a", "bfloat16", config, "hidden", False, False, sums.low_bits)
    semaphores = torch.zeros(kernel.semaphore_count(CLUSTERS), dtype=torch.int32)
    rows = torch.tensor([count or 0], dtype=torch.int32), int(count is not None)
    out = sums.upper, sums.low
    more = semaphores, *rows, CLUSTERS, None, overwrite
    run(kernel, e, w.t(), out, None, None, *more, seed=seed)
    assert (sums.wide[:, sums.low.shape[1] :] == 0x5A).all()


@pytest.mark.parametrize("product", rest_slow(PRODUCTS))
@pytest.mark.parametrize("kernel", rest_slow(named(*KERNELS)))
def test_any_sums_are_rounded(
    kernel: tuple[GemmConfig, int], product: tuple[tuple[int, int, int], int]
) -> None:
    """Whatever is overwritten; buffers are loaded and stored at any time at which they may be."""
    (config, low_bits), (shape, overwrite) = kernel, product
    e, w = operands(*shape)
    sums = Sums(any_floats(shape[0], shape[1]), low_bits)
    want = e.float() @ w.float() + (0 if overwrite else sums.values)
    add(sums, e, w, config, overwrite, seed=shape[0])
    same_bits(sums, want)


@pytest.mark.parametrize(
    "given", rest_slow([(64, 0), (0, 1), (0, 0), (1, 1), (130, 1), (400, 0)], default=2)
)
@pytest.mark.parametrize("kernel", rest_slow(named((LOW, 8), (LOW, 4), (TALL, 8))))
def test_counted_rows(kernel: tuple[GemmConfig, int], given: tuple[int, int]) -> None:
    """Row blocks behind those that count are neither read nor written."""
    (config, low_bits), (count, overwrite) = kernel, given
    e, w = operands(400, 136, 70)
    sums = Sums(any_floats(400, 136), low_bits)
    before, product = sums.values, e.float() @ w.float()
    e[count:] = torch.nan
    add(sums, e, w, config, overwrite, count=count)
    got = Sums(sums.values[:count], low_bits) if count else None
    if got is not None:
        same_bits(got, (product + (0 if overwrite else before))[:count])
    end = max(1, -(-count // config.rows)) * config.rows
    assert torch.equal(sums.values[end:].view(torch.int32), before[end:].view(torch.int32))
