"""Sums of dX whose kernel then scales exponentials, emulated."""

import pytest
import torch

pytest.importorskip("cutlass")

from cutefce.cute_kernels.config import GemmConfig
from cutefce.cute_kernels.spec.gemm import GradGemmSpec
from tests.emulation.configs import COOPERATIVE, PINGPONG, TALL
from tests.emulation.hopper import run
from tests.hopper.test_kept_sums import operands
from tests.support.tiers import rest_slow

CLUSTERS = 3
SHAPES = {
    "one raster group": (300, 136, 70),
    "several raster groups": (2200, 72, 133),
    "several parts of a row": (140, 8, 1601),
    "one row": (1, 64, 200),
}
"""Tokens, hidden and columns of a window."""


def check(
    shape: tuple[int, int, int],
    config: GemmConfig,
    splits: int = 1,
    count: int | None = None,
    seed: int = 0,
) -> None:
    """Compare sums and scaled exponentials of small integers, of `count` rows that are counted."""
    kernel = GradGemmSpec("sm_90a", "bfloat16", config, "hidden", final=False).scaling
    e, w = operands("hidden", *shape)
    counted = len(e) if count is None else count
    e[counted:] = 0
    before, factor = e.clone(), torch.randn(len(e))
    factor[counted:] = torch.nan
    sums = torch.full((len(e), shape[1]), 7.0)
    semaphores = torch.zeros(kernel.semaphore_count(CLUSTERS, len(e)), dtype=torch.int32)
    rows = torch.tensor([count or 0], dtype=torch.int32), int(count is not None)
    given = e, w.t(), sums, (e, factor), None, semaphores, *rows, CLUSTERS, splits, 0
    run(kernel, *given, seed=seed)
    assert torch.equal(sums[:counted], 7 + (before.float() @ w.float())[:counted])
    want = torch.where(before == 0, 0, before.float() * factor[:, None])
    assert torch.equal(e, want.bfloat16())


@pytest.mark.parametrize("shape", rest_slow(SHAPES))
@pytest.mark.parametrize("config", rest_slow([TALL, PINGPONG, COOPERATIVE]))
def test_sums_are_those_of_exponentials_before(
    config: GemmConfig, shape: tuple[int, int, int]
) -> None:
    check(shape, config)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_every_k_split_reads_before(seed: int) -> None:
    check((300, 136, 300), TALL, splits=3, seed=seed)


@pytest.mark.slow
@pytest.mark.parametrize("count", [0, 1, 130, 1600])
@pytest.mark.parametrize("config", [PINGPONG, COOPERATIVE], ids=str)
def test_counted_rows(config: GemmConfig, count: int) -> None:
    """The factors of the others are not read."""
    check((1700, 8, 133), config, count=count)
