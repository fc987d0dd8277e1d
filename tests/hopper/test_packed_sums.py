"""The kernels that add to packed sums of dX and of dW, emulated, and the format's definition."""

from typing import Any, Literal, NamedTuple

import pytest
import torch

pytest.importorskip("cutlass")

from cutefce.cute_kernels.arch.base import TILE_K
from cutefce.cute_kernels.arch.sm90 import PACKED_128, PACKED_192
from cutefce.cute_kernels.config import GemmConfig
from cutefce.cute_kernels.integers import ceil_div, round_up
from cutefce.cute_kernels.problem import LOW_BITS
from cutefce.cute_kernels.spec.gemm import GradGemmSpec
from cutefce.ops.dtypes import dtype_name
from tests.emulation.hopper import run
from tests.support.packed_sums import joined_sums, split_sums
from tests.support.tiers import rest_slow

SMALL = GemmConfig(64, 128, cluster=1, stages=2, pingpong=True)
TALL = GemmConfig(128, 128, cluster=2, stages=3, pingpong=True)
WIDE = GemmConfig(64, 256, cluster=2, stages=3, pingpong=True)
DEEP = GemmConfig(128, 128, cluster=2, stages=6, pingpong=True)
OF_DX = ((SMALL, 8), (SMALL, 4), (PACKED_128, 4), (PACKED_192, 8), (PACKED_192, 4))
ROUNDED = (
    (SMALL, 4),
    (PACKED_128, 8),
    (DEEP, 8),
    (PACKED_192, 8),
    (SMALL, 8),
    (WIDE, 4),
    (PACKED_192, 4),
)
OF_DW = (*ROUNDED, (SMALL, 16), (PACKED_192, 16))
"""Configurations, and low bits of the sums."""
PRODUCTS = {
    "two K tiles": ((140, 136, 72), 0),
    "no multiple of 16 columns": ((70, 40, 70), 0),
    "many K tiles": ((330, 136, 300), 0),
    "many K tiles, overwritten": ((330, 136, 300), 1),
    "one row": ((1, 64, 200), 0),
    "one product": ((200, 64, 1), 0),
    "few columns": ((17, 8, 70), 0),
    "several tiles of each warpgroup": ((1100, 264, 40), 0),
}
"""Rows, hidden size and products of the sums, and whether they are overwritten."""
CLUSTERS = 2
Input = Literal["hidden", "weight"]


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
    """Sums (R, D) of dX or dW; what is packed of float32 `values` with some low bits."""

    def __init__(self, values: torch.Tensor, low_bits: int, wrt: Input = "weight") -> None:
        rows, hidden = values.shape
        self.low_bits, self.has_bytes, self.wrt = low_bits, low_bits in LOW_BITS, wrt
        columns = hidden * low_bits // 8 if self.has_bytes else 0
        self.upper = torch.empty(rows, hidden, dtype=torch.bfloat16)
        # rows start at multiples of 16 bytes; what is between them stays as it is
        self.wide = torch.full((rows, round_up(columns, 16)), 0x5A, dtype=torch.uint8)
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
        a: torch.Tensor,
        b: torch.Tensor,
        terms: Terms | None = None,
        overwrite: int = 0,
        count: int | None = None,
        config: GemmConfig = SMALL,
        **how: Any,
    ) -> None:
        """Add a b and `terms` by the emulated kernel; other parameters are those of `run`."""
        terms = terms or terms_of(b, len(a))
        dtype, rank_one = dtype_name(a.dtype), terms.rank_one is not None
        kernel = GradGemmSpec("sm_90a", dtype, config, self.wrt, False, rank_one, self.low_bits)
        semaphores = torch.zeros(kernel.semaphore_count(CLUSTERS), dtype=torch.int32)
        rows = torch.tensor([count or 0], dtype=torch.int32), int(count is not None)
        packed = self.upper, self.low if self.has_bytes else None
        targets = terms.targets if self.wrt == "weight" else None
        more = semaphores, *rows, CLUSTERS, None, overwrite
        run(kernel, a, b.t(), packed, targets, terms.rank_one, *more, **how)
        assert (self.wide[:, self.low.shape[1] :] == 0x5A).all()


def same_bits(got: Sums, want: torch.Tensor) -> None:
    """Compare with what is packed of `want`; all NaN are equal."""
    packed, is_nan = Sums(want, got.low_bits), want.isnan()
    assert torch.equal(got.values.isnan(), is_nan)
    pairs = got.values.view(torch.int32), packed.values.view(torch.int32)
    assert torch.equal(*(values[~is_nan] for values in pairs))


def operands(
    wrt: Input, rows: int, hidden: int, products: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a (R, K) and b (K, D), small integers; a is e or eᵀ, e columns of a wider matrix."""
    tokens, columns = (rows, products) if wrt == "hidden" else (products, rows)
    generator = torch.Generator().manual_seed(0)
    wide = torch.randint(0, 2, (tokens, columns + 24 + -columns % 8), generator=generator)
    e = wide.bfloat16()[:, 16 : 16 + columns]
    b = torch.randint(-2, 3, (products, hidden), generator=generator).bfloat16()
    return e if wrt == "hidden" else e.t(), b


def any_floats(*shape: int) -> torch.Tensor:
    """Return float32 of any bits: NaN, infinities and subnormal numbers among them."""
    generator = torch.Generator().manual_seed(2)
    bits = torch.randint(-(1 << 31), 1 << 31, shape, generator=generator).to(torch.int32)
    values = bits.view(torch.float32)
    values.view(-1)[:3] = torch.tensor([torch.nan, torch.inf, -torch.inf])
    return values


@pytest.mark.parametrize("product", rest_slow(PRODUCTS))
@pytest.mark.parametrize(
    ("wrt", "kernel"),
    [
        pytest.param(wrt, kernel, id=f"{wrt}, {name}", marks=[pytest.mark.slow] * is_slow)
        for wrt, kernels in (("hidden", OF_DX), ("weight", OF_DW))
        for name, kernel in named(*kernels).items()
        for is_slow in [(wrt, kernel) != ("hidden", OF_DX[0])]
    ],
)
def test_any_sums_are_rounded(
    wrt: Input, kernel: tuple[GemmConfig, int], product: tuple[tuple[int, int, int], int]
) -> None:
    """Whatever is overwritten; products of no number are none.

    Buffers are loaded and stored at any time at which they may be.
    """
    (config, low_bits), (shape, overwrite) = kernel, product
    (rows, hidden, products), (a, b) = shape, operands(wrt, *shape)
    b[0, 0], b[-1, 1] = torch.nan, torch.inf
    sums = Sums(any_floats(rows, hidden), low_bits, wrt)
    terms = terms_of(b, rows, count=products) if wrt == "weight" else None
    want = a.float() @ b.float() + (0 if terms is None else terms.sums)
    want = want if overwrite else sums.values + want
    sums.add(a, b, terms, overwrite, config=config, seed=rows)
    same_bits(sums, want)


@pytest.mark.parametrize(
    "given", rest_slow([(64, 0), (0, 1), (0, 0), (1, 1), (130, 1), (400, 0)], default=2)
)
@pytest.mark.parametrize("kernel", rest_slow(named((SMALL, 8), (SMALL, 4), (TALL, 8))))
def test_counted_rows_of_dx(kernel: tuple[GemmConfig, int], given: tuple[int, int]) -> None:
    """Row blocks behind those that count are neither read nor written."""
    (config, low_bits), (count, overwrite) = kernel, given
    e, w = operands("hidden", 400, 136, 70)
    sums = Sums(any_floats(400, 136), low_bits, "hidden")
    before, product = sums.values, e.float() @ w.float()
    e[count:] = torch.nan
    sums.add(e, w, None, overwrite, count=count, config=config)
    if count:
        got = Sums(sums.values[:count], low_bits)
        same_bits(got, (product + (0 if overwrite else before))[:count])
    end = max(1, ceil_div(count, config.rows)) * config.rows
    assert torch.equal(sums.values[end:].view(torch.int32), before[end:].view(torch.int32))


@pytest.mark.slow
def test_float16_products() -> None:
    """Which are added to float32 sums alone."""
    a, h = (x.half() for x in operands("weight", 136, 72, 70))
    before = torch.randint(-100, 100, (136, 72)).float()
    sums, terms = Sums(before, 16), terms_of(h, 136, count=70, rank_one=True)
    sums.add(a, h, terms)
    same_bits(sums, before + a.float() @ h.float() + terms.sums)


@pytest.mark.slow
@pytest.mark.parametrize("rank_one", rest_slow([False, True]))
@pytest.mark.parametrize("count", rest_slow([64, 0, 1, 130], default=2))
@pytest.mark.parametrize("kernel", rest_slow(named((SMALL, 4), (TALL, 8), (PACKED_192, 16))))
def test_counted_rows_of_dw(kernel: tuple[GemmConfig, int], count: int, rank_one: bool) -> None:
    """Rows behind those that count are 0 up to a multiple of `TILE_K`, then anything."""
    (config, low_bits), overwrite = kernel, int(not rank_one)
    a, h = operands("weight", 330, 136, 150)
    end = max(1, ceil_div(count, TILE_K)) * TILE_K
    for rows in (a.t(), h):
        rows[count:] = 0
        rows[end:] = torch.nan
    before = torch.randint(-(1 << 11), 1 << 11, (330, 136)).float()
    sums, terms = Sums(before, low_bits), terms_of(h, 330, count=count, rank_one=rank_one)
    sums.add(a, h, terms, overwrite, count=count, config=config)
    product = a[:, :count].float() @ h[:count].float() + terms.sums
    same_bits(sums, product + (0 if overwrite else before))


@pytest.mark.slow
@pytest.mark.parametrize("low_bits", rest_slow([4, 8, 16]))
def test_nothing_changes_where_nothing_counts(low_bits: int) -> None:
    a, h = operands("weight", 130, 72, 70)
    sums = Sums(torch.full((130, 72), -0.0), low_bits)
    before, terms = sums.values, terms_of(h, 130)
    order, offsets, coef, *rest = terms.targets
    assert order is not None and offsets is not None and coef is not None
    none = order[:0], offsets[:1], coef[:0], *rest
    sums.add(a, h, terms._replace(targets=none), count=0)
    assert torch.equal(sums.values.view(torch.int32), before.view(torch.int32))


@pytest.mark.slow
@pytest.mark.parametrize("low_bits", rest_slow([4, 8, 16]))
def test_targets_of_other_tokens(low_bits: int) -> None:
    """The last chunk adds the targets' terms of all, also if none of its own tokens counts."""
    (a, h), (_, others) = operands("weight", 130, 72, 70), operands("weight", 130, 72, 200)
    for rows in (a.t(), h):
        rows[:] = torch.nan
        rows[:TILE_K] = 0
    before = torch.randint(-(1 << 11), 1 << 11, (130, 72)).float()
    sums, terms = Sums(before, low_bits), terms_of(others, 130, count=190)
    sums.add(a, h, terms, count=0)
    same_bits(sums, before + terms.sums)


ORDERS = [(*kernel, seed) for seed, kernel in enumerate(OF_DW)]


@pytest.mark.slow
@pytest.mark.parametrize(("config", "low_bits", "seed"), ORDERS, ids=str)
def test_every_order_of_events(config: GemmConfig, low_bits: int, seed: int) -> None:
    """Several tiles of each warpgroup: buffers are loaded again, and stored, at any time."""
    a, h = operands("weight", 700, 264, 70)
    sums = Sums(any_floats(700, 264), low_bits)
    want = sums.values + a.float() @ h.float()
    sums.add(a, h, config=config, seed=seed)
    same_bits(sums, want)
