"""Sampled gradients' kernels, emulated on numpy, against the definition and float64."""

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("cutlass")

from cutefce.cute_kernels.arch import arch_named
from cutefce.cute_kernels.config import GemmConfig
from cutefce.cute_kernels.spec.gemm import ProjectExpSpec
from cutefce.cute_kernels.spec.sampling import (
    ListSamplesSpec,
    PrepareSamplesSpec,
    SortSamplesSpec,
    SparseRowsSpec,
)
from cutefce.cute_kernels.variant import LogitTransform
from cutefce.ops.dtypes import dtype_name
from tests.emulation.cases import Case
from tests.emulation.configs import PINGPONG
from tests.emulation.hopper import run
from tests.emulation.samples import SEED, Sampled
from tests.support.sampled import bits, row_states
from tests.support.sampling_models import packed, unpacked
from tests.support.tiers import rest_slow

ARCH = arch_named("sm_90a")
FIRST = PrepareSamplesSpec(ARCH.name, "first")


def project_exp(config: GemmConfig, *, samples: bool) -> ProjectExpSpec:
    return ProjectExpSpec(ARCH.name, "bfloat16", config, sums=True, store=False, samples=samples)


@pytest.mark.slow
def test_entries_of_transformed_logits() -> None:
    transform = LogitTransform(row_scale=True, bias=True, softcap=True)
    case = Case(70, 72, 150, first=5000, scale=1.0, transform=transform)
    kernel = dataclasses.replace(project_exp(PINGPONG, samples=True), transform=transform)
    sampled = Sampled(case, kernel, samples=16, capacity=60)
    sampled.launch.run(run, kernel, 1)
    sampled.check()


@pytest.mark.parametrize("given", rest_slow([(70, False), (70, True), (0, True)]))
def test_rows_that_do_not_count_have_no_entries(given: tuple[int, bool]) -> None:
    count, may_skip = given
    case = Case(150, 72, 203)
    sampled = Sampled(case, project_exp(PINGPONG, samples=True), samples=16, capacity=60)
    sampled.launch.count, sampled.launch.vocab_splits = count, 1
    sampled.launch.may_skip = may_skip
    sampled.launch.run(run, project_exp(PINGPONG, samples=True), 2)
    assert not sampled.counts[count:].any() and (sampled.entries[count:] == -1).all()
    if count:
        assert 5 < sampled.counts[:count].mean() < 17


def test_overflowing_rows_write_no_more_than_their_slots() -> None:
    case = Case(70, 8, 300, scale=0.1)
    sampled = Sampled(case, project_exp(PINGPONG, samples=True), samples=1 << 20, capacity=9)
    sampled.launch.run(run, project_exp(PINGPONG, samples=True), 2)
    sampled.check()
    active = case.y.numpy() >= 0
    assert (sampled.counts[active] > 9).all()
    assert (sampled.counts <= 2 * 64).all(), "warpgroups stop after their tiles, of 64 columns"


@pytest.mark.parametrize("only_drawn", rest_slow([0, 1]))
def test_estimates(only_drawn: int) -> None:
    generator = torch.Generator().manual_seed(0)
    partials, drawn = 30 * torch.randn(2, 150, 5, generator=generator)
    drawn = drawn[:, :3].contiguous()
    partials[:, 3] = -torch.inf
    partials[7], drawn[7] = -torch.inf, -torch.inf
    reference = torch.randn(150, generator=generator)
    reference[11] = torch.inf
    estimate = torch.empty(150)
    kernel = PrepareSamplesSpec(ARCH.name, "estimate")
    run(kernel, partials, drawn, reference, estimate, 5.0, only_drawn)
    terms = [drawn + 5.0] if only_drawn else [drawn + 5.0, partials]
    sums = F.pad(torch.cat(terms, 1).double(), (1, 0)) * math.log(2)
    want = reference.double() + sums.logsumexp(1)
    torch.testing.assert_close(estimate.double(), want, rtol=1e-6, atol=1e-5)


def test_prepared_rows() -> None:
    generator = torch.Generator().manual_seed(0)
    estimate = 30 * torch.randn(150, generator=generator)
    estimate[11] = torch.inf
    order = torch.randperm(150, generator=generator)
    for selects in (0, 1):
        results = torch.empty(150), torch.empty(150, dtype=torch.int32)
        counts = torch.full((150,), 7, dtype=torch.int32)
        run(FIRST, estimate, order, SEED, *results, counts, 8.0, selects)
        want = estimate.double() / math.log(2) - 8.0 - 32.0
        torch.testing.assert_close(results[0].double(), want, rtol=1e-6, atol=1e-5)
        states = row_states(SEED, order if selects else torch.arange(150))
        assert np.array_equal(results[1].numpy(), states.view(np.int32))
        assert not counts.any()


def test_rows_are_prepared_again() -> None:
    """Thresholds are those of lse, but where the estimate is above it."""
    generator = torch.Generator().manual_seed(0)
    order, count = torch.randperm(150, generator=generator), torch.tensor([40], dtype=torch.int32)
    reference = torch.randn(150, generator=generator)
    sum_exp = 2 + torch.rand(150, generator=generator)
    lse = (reference.double() + sum_exp.double().log()) / math.log(2)
    distance = torch.tensor([-3.0, -0.01, 0.01, 9.0]).repeat(38)[:150]
    threshold = (lse - 8.0 - 32.0 - distance).float()
    before, counts = threshold.clone(), torch.full((150,), 7, dtype=torch.int32)
    own_reference = torch.empty(150)
    rows = order, count, reference, sum_exp, threshold, counts, own_reference
    run(PrepareSamplesSpec(ARCH.name, "again"), *rows, 8.0)
    again = torch.zeros(150, dtype=torch.bool).index_fill_(0, order[:40], True)
    moves = again & (distance > 0)
    want = torch.where(moves, lse - 8.0 - 32.0, before.double())
    torch.testing.assert_close(threshold.double(), want, rtol=1e-6, atol=1e-5)
    assert moves.any() and (again & ~moves).any()
    assert torch.equal(counts, torch.where(again, 0, 7).int())
    assert torch.equal(own_reference[:40], reference[order[:40]])
    assert bool((own_reference[40:] == torch.inf).all())


@pytest.mark.parametrize("of_kernel", rest_slow([(32, True), (512, True), (32, False)]))
def test_sorted_entries(of_kernel: tuple[int, bool]) -> None:
    """Where lse is above the estimate, far in every other row, it decides."""
    size, softcap = of_kernel
    generator = torch.Generator().manual_seed(0)
    rows, capacity, shard_start = 12, size - 5, 7
    columns = torch.stack([torch.randperm(1000, generator=generator) for _ in range(rows)])
    columns, u = columns[:, :capacity], 2 * torch.randn(rows, capacity, generator=generator)
    counts = torch.randint(capacity + 1, (rows,), generator=generator, dtype=torch.int32)
    counts[0], counts[1], counts[2], counts[3] = 0, 1, capacity, capacity + 1
    reference, sum_exp = torch.randn(rows), 2 + torch.rand(rows)
    lse = (reference.double() + sum_exp.double().log()) / math.log(2)
    final = lse.float() - 2.0 - 32.0
    threshold, scale = final.clone(), 15 + torch.rand(rows)
    threshold[1::2] -= 20.0  # every column is kept at first
    threshold[::2] += 4 * torch.rand(rows // 2) - 2
    final = torch.maximum(final, threshold)
    states = row_states(SEED, torch.arange(rows))
    entries, given = packed(columns, u), counts.clone()
    before = entries.clone()
    kernel, row_hash = SortSamplesSpec(ARCH.name, size, softcap), states.view(np.int32)
    vectors = threshold, torch.from_numpy(row_hash), reference, sum_exp, scale if softcap else None
    run(kernel, entries, counts, *vectors, 2.0, shard_start)
    derivative = (1 - (u / scale[:, None]).double() ** 2).clamp(0) if softcap else 1.0
    q = torch.exp2(u.double() / math.log(2) - final.double()[:, None] - 32) * derivative
    value = torch.exp(u.double() - reference.double()[:, None]) * derivative
    value /= q.clamp(max=1)
    assert counts[3] == -1
    removed = 0
    for row, count in enumerate(given.tolist()):
        if count > capacity:
            continue
        own = columns[row, :count]
        x = bits(SEED, torch.tensor([row]), own + shard_start)[0] / 2.0**32
        kept = torch.from_numpy(x) < q[row, :count]
        assert counts[row] == kept.sum()
        removed += count - int(counts[row])
        want, order = own[kept].sort()
        got, values = unpacked(entries[row, : counts[row]])
        assert torch.equal(got, want)
        expected = value[row, :count][kept][order]
        torch.testing.assert_close(values.double(), expected, rtol=1e-5, atol=1e-9)
        assert torch.equal(entries[row, count:], before[row, count:])
    assert removed > 20


def test_rows_sampled_again_are_those_of_their_order() -> None:
    case = Case(150, 72, 203)
    kernel = project_exp(PINGPONG, samples=True)
    sampled = Sampled(case, kernel, samples=16, capacity=60)
    order, launch = np.random.default_rng(0).permutation(150), sampled.launch
    sampled.counts[:] = 0
    given: Any = launch.samples
    launch.samples = *given[:5], order, 1
    for name in ("h", "reference", "target"):
        setattr(launch, name, np.ascontiguousarray(getattr(launch, name)[order]))
    launch.run(run, kernel, 2)
    sampled.check()


class Entries:
    """Sorted entries of rows, with coefficients; some rows have none, some targets are missing."""

    def __init__(self, tokens: int, vocab: int, capacity: int, hot: int = -1) -> None:
        """Class `hot` has an entry or the target of nearly every row."""
        generator = torch.Generator().manual_seed(0)
        weights = torch.rand(tokens, vocab, generator=generator)
        self.y = torch.randint(vocab, (tokens,), generator=generator)
        if hot >= 0:
            weights[:, hot] = 2.0
            self.y[::3] = hot
        weights[torch.arange(tokens), self.y] = -1.0
        columns = weights.topk(capacity, 1).indices
        self.counts = torch.randint(
            capacity // 2, capacity + 1, (tokens,), generator=generator, dtype=torch.int32
        )
        self.counts[4::9] = 0
        self.counts[5::9] = -1
        value = torch.rand(tokens, capacity, generator=generator) + 0.1
        self.dense = torch.zeros(tokens, vocab)
        self.entries = torch.full((tokens, capacity), -1, dtype=torch.int64)
        for row, count in enumerate(self.counts.clamp(0).tolist()):
            own = columns[row, :count].sort().values
            self.entries[row, :count] = packed(own, value[row, :count])
            self.dense[row, own] = value[row, :count]
        self.scale = torch.randn(tokens, generator=generator)
        self.target_scale = torch.randn(tokens, generator=generator)
        self.scale[6::9], self.target_scale[6::9] = 0, 0
        self.y[7::9], self.y[8::9] = -100, vocab
        self.order = torch.randperm(tokens, generator=generator)

    def products(self) -> torch.Tensor:
        """Return s · value, plus c at the targets, in float64."""
        result = self.scale.double()[:, None] * self.dense.double()
        inside = ((self.y >= 0) & (self.y < result.shape[1])).nonzero()[:, 0]
        result[inside, self.y[inside]] += self.target_scale.double()[inside]
        return result


@pytest.mark.slow
@pytest.mark.parametrize("undefined", rest_slow([None, "scale", "reference"]))
def test_lists_of_classes(undefined: str | None) -> None:
    """Short and long lists, several passes over rows, and several blocks of classes."""
    tokens, vocab, capacity, maps = 300, 4200, 13, int(undefined is None)
    case = Entries(tokens, vocab, capacity, hot=3000)
    kernel = ListSamplesSpec(ARCH.name, short=64, table_rows=256)
    total = tokens * (capacity + 1) + 5
    lists, ends = torch.full((total,), -1), torch.full((1 + vocab,), -1, dtype=torch.int32)
    between = torch.full((total,), -1, dtype=torch.int32), torch.full_like(ends[1:], 9)
    reference, start = torch.full((tokens,), -3.0), torch.full((1,), 7.0)
    reference[case.y == -100] = torch.inf
    row = int((case.y == vocab).nonzero()[0])  # it counts, on another rank
    if undefined == "scale":
        case.scale[row], case.counts[row] = -torch.inf, 0
    elif undefined == "reference":
        reference[row] = torch.nan
    rows = case.entries, case.counts, case.y, case.scale, case.target_scale, case.order, maps
    run(kernel, (*rows, reference, -100), (lists, ends, *between, start))
    assert bool(start.isnan()) == (undefined is not None) and (undefined or float(start) == 0.0)
    case.scale[row] = 0 if undefined == "scale" else case.scale[row]
    want = case.products()
    assert ends[0] == 0
    lengths = ends.diff()
    assert torch.equal(lengths.long(), (want != 0).sum(0))
    assert lengths[3000] > 64 and tokens > 256
    classes = torch.repeat_interleave(torch.arange(vocab), lengths.long())
    got, values = unpacked(lists[: ends[-1]])
    of_classes, ranks = want.t().nonzero(as_tuple=True)
    assert torch.equal(classes, of_classes)
    assert torch.equal(got, case.order[ranks] if maps else ranks), "in the order of rows"
    torch.testing.assert_close(values.double(), want[ranks, classes], rtol=1e-6, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("given", rest_slow([(1, 1, 20), (0, 1, 512), (1, 1, 512), (0, 2, 20)]))
def test_hidden_gradient(given: tuple[int, int, int]) -> None:
    """Long sums too, which warps share, and rows in another order."""
    scatters, vectors, long = given
    tokens, vocab, hidden = 19, 90, 328
    case = Entries(tokens, vocab, 50)
    kernel = SparseRowsSpec(ARCH.name, "bfloat16", "hidden", vectors, long=long)
    w = torch.randn(vocab, hidden).bfloat16()
    out = torch.full((tokens, hidden), torch.nan).bfloat16()
    rows = case.entries, case.counts, case.scale, case.target_scale, case.y, case.order
    run(kernel, out, w, (*rows, scatters))
    case.y.clamp_(0, vocab - 1)
    want = case.products() @ w.double()
    got = out[case.order] if scatters else out
    torch.testing.assert_close(got.double(), want, rtol=1.01 * 2**-8, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "given", rest_slow([(torch.float16, 1, 512, 328), (torch.bfloat16, 4, 16, 1096)])
)
@pytest.mark.parametrize("sums", rest_slow([(True, 0.0), (True, math.nan), (False, 0.0)], 2))
def test_weight_gradient(
    given: tuple[torch.dtype, int, int, int], sums: tuple[bool, float]
) -> None:
    (dtype, vectors, long, hidden), (adds, start) = given, sums
    tokens, vocab, name = 40, 70, dtype_name(dtype)
    out_type = torch.float32 if adds else dtype
    out_name = "float32" if adds else None
    more: Any = {"long": long, "out": out_name, "adds": adds, "bias": True}
    kernel = SparseRowsSpec(ARCH.name, name, "weight", vectors, **more)
    case, h = Entries(tokens, vocab, 20, hot=3), torch.randn(tokens, hidden).to(dtype)
    products = case.products()
    products[:, 5:9] = 0
    of_classes, ranks = products.t().nonzero(as_tuple=True)
    entries = packed(ranks, products[ranks, of_classes].float())
    ends = F.pad((products != 0).sum(0).cumsum(0), (1, 0)).int()
    assert ends[4] - ends[3] > 16
    want = products.t() @ h.double()
    out = torch.full((vocab, hidden), torch.nan).to(out_type)
    if adds:
        out = torch.randn(vocab, hidden)
        out[5:9] = torch.nan
        want += out.double()
    bias = torch.randn(vocab)
    total = products.sum(0) + (bias.double() if adds else 0)
    run(kernel, out, h, (entries, ends, torch.tensor([start]), bias))
    if math.isnan(start):
        assert bool(out.isnan().all()) and bool(bias.isnan().all())
        return
    torch.testing.assert_close(bias.double(), total, rtol=1e-6, atol=1e-5)
    rounding = 1e-6 if adds else 1.01 * torch.finfo(dtype).eps / 2
    torch.testing.assert_close(out.double(), want, rtol=rounding, atol=1e-5, equal_nan=adds)
