"""The kernel that adds to kept sums of dW, emulated, against the format's definition."""

from typing import Any, NamedTuple

import pytest
import torch

pytest.importorskip("cutlass")

from cutefce.cute_kernels.arch.base import TILE_K
from cutefce.cute_kernels.arch.sm90 import KEPT_128, KEPT_192
from cutefce.cute_kernels.config import GemmConfig
from cutefce.cute_kernels.integers import ceil_div, round_up
from cutefce.cute_kernels.problem import LOW_BITS
from cutefce.cute_kernels.spec.gemm import GradGemmSpec
from cutefce.ops.dtypes import dtype_name
from tests.emulation.hopper import run
from tests.support.kept_sums import joined_sums, split_sums
from tests.support.tiers import rest_slow

LOW = GemmConfig(64, 128, cluster=1, stages=2, pingpong=True)
TALL = GemmConfig(128, 128, cluster=2, stages=3, pingpong=True)
WIDE = GemmConfig(64, 256, cluster=2, stages=3, pingpong=True)
DEEP = GemmConfig(128, 128, cluster=2, stages=6, pingpong=True)
ROUNDED = ((LOW, 4), (KEPT_128, 8), (DEEP, 8), (KEPT_192, 8), (LOW, 8), (WIDE, 4), (KEPT_192, 4))
KERNELS = (*ROUNDED, (LOW, 16), (KEPT_192, 16))
"""Configurations, and low bits of the sums."""
PRODUCTS = {
    "no multiple of 16 columns": ((70, 40, 70), 0),
    "many K tiles": ((150, 136, 330), 0),
    "many K tiles, overwritten": ((150, 136, 330), 1),
    "one row": ((1, 64, 200), 0),
    "few columns": ((130, 8, 17), 0),
}
"""Tokens, hidden and vocabulary, and whether the sums are overwritten."""
CLUSTERS = 2


def kernel_of(
    config: GemmConfig, low_bits: int, rank_one: bool = False, dtype: str = "bfloat16"
) -> GradGemmSpec:
    return GradGemmSpec("sm_90a", dtype, config, "weight", False, rank_one, low_bits)


class Terms(NamedTuple):
    """What is added to products: the targets' terms, and those of rank one."""

    targets: tuple[torch.Tensor | None, ...]
    rank_one: tuple[torch.Tensor, torch.Tensor] | None
    sums: torch.Tensor
    """(V, D): their sums."""


def named(*kernels: tuple[GemmConfig, int]) -> dict[str, tuple[GemmConfig, int]]:
    """Return configurations and low bits by their names."""
    return {f"{config}, {low_bits} low bits": (config, low_bits) for config, low_bits in kernels}


def terms_of(h: torch.Tensor, vocab: int, *, count: int = 0, rank_one: bool = False) -> Terms:
    """Return terms of the first `count` tokens, small integers; some targets have several."""
    generator = torch.Generator().manual_seed(3)
    target = torch.randint(0, max(1, vocab // 2), (count,), generator=generator)
    coef = torch.full((len(h),), torch.nan)
    order = torch.full((len(h),), -1)
    order[:count] = target.argsort(stable=True)
    coef[:count] = torch.randint(-3, 4, (count,), generator=generator).float()
    offsets = torch.searchsorted(target.sort().values, torch.arange(vocab + 1)).int()
    sums = torch.zeros(vocab, h.shape[1])
    tokens = order[:count]
    sums.index_add_(0, target[tokens], coef[:count, None] * h[tokens].float())
    term = None
    if rank_one:
        term = torch.arange(vocab) % 5 - 2.0, torch.arange(h.shape[1]) % 7 - 3.0
        sums += term[0][:, None] * term[1]
    return Terms((order, offsets, coef, h, None), term, sums)


class Sums:
    """Sums (V, D); what is kept of float32 `values` with some low bits."""

    def __init__(self, values: torch.Tensor, low_bits: int) -> None:
        vocab, hidden = values.shape
        self.low_bits, self.has_bytes = low_bits, low_bits in LOW_BITS
        columns = hidden * low_bits // 8 if self.has_bytes else 0
        self.upper = torch.empty(vocab, hidden, dtype=torch.bfloat16)
        # rows start at multiples of 16 bytes; what is between them stays as it is
        self.wide = torch.full((vocab, round_up(columns, 16)), 0x5A, dtype=torch.uint8)
        self.low = self.wide[:, :columns]
        if self.has_bytes:
            split_sums(self.upper, self.low, values)
        else:
            self.upper = values.clone()

    @property
    def values(self) -> torch.Tensor:
        return joined_sums(self.upper, self.low) if self.has_bytes else self.upper.float()

    def add(
        self,
        e: torch.Tensor,
        h: torch.Tensor,
        terms: Terms | None = None,
        overwrite: int = 0,
        count: int | None = None,
        config: GemmConfig = LOW,
        **how: Any,
    ) -> None:
        """Add eᵀ h and `terms` by the emulated kernel; other parameters are those of `run`."""
        terms = terms or terms_of(h, e.shape[1])
        dtype = dtype_name(e.dtype)
        kernel = kernel_of(config, self.low_bits, terms.rank_one is not None, dtype)
        semaphores = torch.zeros(kernel.semaphore_count(CLUSTERS), dtype=torch.int32)
        rows = torch.tensor([count or 0], dtype=torch.int32), int(count is not None)
        kept = self.upper, self.low if self.has_bytes else None
        operands = e.t(), h.t(), kept, terms.targets, terms.rank_one
        run(kernel, *operands, semaphores, *rows, CLUSTERS, None, overwrite, **how)
        assert (self.wide[:, self.low.shape[1] :] == 0x5A).all()


def same_bits(got: Sums, want: torch.Tensor) -> None:
    """Compare with what is kept of `want`; all NaN are equal."""
    kept, is_nan = Sums(want, got.low_bits), want.isnan()
    assert torch.equal(got.values.isnan(), is_nan)
    pairs = got.values.view(torch.int32), kept.values.view(torch.int32)
    assert torch.equal(*(values[~is_nan] for values in pairs))


def operands(tokens: int, hidden: int, vocab: int, seed: int = 0) -> Any:
    """Return e (N, V), columns of a wider matrix, and h (N, D), small integers."""
    generator = torch.Generator().manual_seed(seed)
    wide = torch.randint(0, 2, (tokens, vocab + 24 + -vocab % 8), generator=generator).bfloat16()
    h = torch.randint(-2, 3, (tokens, hidden), generator=generator).bfloat16()
    return wide[:, 16 : 16 + vocab], h


def any_floats(*shape: int) -> torch.Tensor:
    """Return float32 of any bits: NaN, infinities and subnormal numbers among them."""
    generator = torch.Generator().manual_seed(2)
    bits = torch.randint(-(1 << 31), 1 << 31, shape, generator=generator).to(torch.int32)
    values = bits.view(torch.float32)
    values.view(-1)[:3] = torch.tensor([torch.nan, torch.inf, -torch.inf])
    return values


@pytest.mark.slow
@pytest.mark.parametrize("product", rest_slow(PRODUCTS))
@pytest.mark.parametrize("kernel", rest_slow(named(*KERNELS)))
def test_any_sums_are_rounded(
    kernel: tuple[GemmConfig, int], product: tuple[tuple[int, int, int], int]
) -> None:
    """Whatever is overwritten; products of no number are none."""
    (config, low_bits), (shape, overwrite) = kernel, product
    tokens, hidden, vocab = shape
    e, h = operands(*shape)
    h[0, 0], h[-1, 1] = torch.nan, torch.inf
    sums, terms = Sums(any_floats(vocab, hidden), low_bits), terms_of(h, vocab, count=tokens)
    want = e.float().t() @ h.float() + terms.sums
    want = want if overwrite else sums.values + want
    sums.add(e, h, terms, overwrite, config=config)
    same_bits(sums, want)


@pytest.mark.slow
def test_float16_products() -> None:
    """Which are added to float32 sums alone."""
    e, h = (x.half() for x in operands(70, 72, 136))
    before = torch.randint(-100, 100, (136, 72)).float()
    sums, terms = Sums(before, 16), terms_of(h, 136, count=70, rank_one=True)
    sums.add(e, h, terms)
    same_bits(sums, before + e.float().t() @ h.float() + terms.sums)


@pytest.mark.slow
@pytest.mark.parametrize("rank_one", rest_slow([False, True]))
@pytest.mark.parametrize("count", rest_slow([64, 0, 1, 130], default=2))
@pytest.mark.parametrize("kernel", rest_slow(named((LOW, 4), (TALL, 8), (KEPT_192, 16))))
def test_counted_rows(kernel: tuple[GemmConfig, int], count: int, rank_one: bool) -> None:
    """Rows behind those that count are 0 up to a multiple of `TILE_K`, then anything."""
    (config, low_bits), overwrite = kernel, int(not rank_one)
    e, h = operands(150, 136, 330)
    end = max(1, ceil_div(count, TILE_K)) * TILE_K
    for rows in (e, h):
        rows[count:] = 0
        rows[end:] = torch.nan
    before = torch.randint(-(1 << 11), 1 << 11, (330, 136)).float()
    sums, terms = Sums(before, low_bits), terms_of(h, 330, count=count, rank_one=rank_one)
    sums.add(e, h, terms, overwrite, count=count, config=config)
    product = e[:count].float().t() @ h[:count].float() + terms.sums
    same_bits(sums, product + (0 if overwrite else before))


@pytest.mark.slow
@pytest.mark.parametrize("low_bits", rest_slow([4, 8, 16]))
def test_nothing_changes_where_nothing_counts(low_bits: int) -> None:
    e, h = operands(70, 72, 130)
    sums = Sums(torch.full((130, 72), -0.0), low_bits)
    before, terms = sums.values, terms_of(h, 130)
    order, offsets, coef, *rest = terms.targets
    assert order is not None and offsets is not None and coef is not None
    none = order[:0], offsets[:1], coef[:0], *rest
    sums.add(e, h, terms._replace(targets=none), count=0)
    assert torch.equal(sums.values.view(torch.int32), before.view(torch.int32))


@pytest.mark.slow
@pytest.mark.parametrize("low_bits", rest_slow([4, 8, 16]))
def test_targets_of_other_tokens(low_bits: int) -> None:
    """The last chunk adds the targets' terms of all, also if none of its own tokens counts."""
    (e, h), (_, others) = operands(70, 72, 130), operands(200, 72, 130)
    for rows in (e, h):
        rows[:] = torch.nan
        rows[:TILE_K] = 0
    before = torch.randint(-(1 << 11), 1 << 11, (130, 72)).float()
    sums, terms = Sums(before, low_bits), terms_of(others, 130, count=190)
    sums.add(e, h, terms, count=0)
    same_bits(sums, before + terms.sums)


ORDERS = [(*kernel, seed) for seed, kernel in enumerate(KERNELS)]


@pytest.mark.slow
@pytest.mark.parametrize(("config", "low_bits", "seed"), ORDERS, ids=str)
def test_every_order_of_events(config: GemmConfig, low_bits: int, seed: int) -> None:
    """Several tiles of each warpgroup: buffers are loaded again, and stored, at any time."""
    e, h = operands(70, 264, 700)
    sums = Sums(any_floats(700, 264), low_bits)
    want = sums.values + e.float().t() @ h.float()
    sums.add(e, h, config=config, seed=seed)
    same_bits(sums, want)
