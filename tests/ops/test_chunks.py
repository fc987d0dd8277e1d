"""Chunks of tokens that shrink, as what they take lies in the rows of dX that are not written."""

import dataclasses
import random
from typing import Any

import pytest
import torch
from torch import Tensor

import cutefce
from bench.harness.accuracy import relative_error
from bench.harness.timing import peak_bytes
from cutefce.autotune_cache.defaults import widest_window
from cutefce.cute_kernels.arch.sm90 import Sm90
from cutefce.cute_kernels.arch.sm100 import Sm100
from cutefce.cute_kernels.config import PortableTiles
from cutefce.cute_kernels.integers import round_up
from cutefce.cute_kernels.problem import Problem
from cutefce.ops.dtypes import dtype_name
from cutefce.ops.interface.options import LossOptions
from cutefce.ops.planning.chunks.sizes import Chunks, own_columns, shrinking
from cutefce.ops.planning.memory_model import chunked_bytes
from cutefce.ops.planning.planner import Plan
from cutefce.ops.primitives.dispatch import arch_of
from tests.support.kernel_models import serve_calls
from tests.support.options import OPTIONS, PER_TOKEN, options_case
from tests.support.reference import fixed_plan, loss_of_plan, random_case

SHAPE = TOKENS, HIDDEN, VOCAB = 150, 48, 333
COLUMNS, BLOCK = 336, 16


def plan_of(chunks: Chunks, hidden_bits: int | None = None, low_bits: int = 8, **more: Any) -> Plan:
    sizes = 64, 0, COLUMNS, chunks.largest
    shrinks = chunks if chunks.shrink else None
    plan = Plan("gradients_in_forward", *sizes, True, True, low_bits=low_bits, **more)
    return dataclasses.replace(plan, hidden_bits=hidden_bits, shrinking=shrinks)


SHRINKING = shrinking(TOKENS, HIDDEN, COLUMNS, BLOCK, 8, 5)
EVEN = Chunks.even(TOKENS, 32)


@pytest.mark.parametrize("seed", range(20))
def test_what_is_beside_fits_into_unwritten_rows(seed: int) -> None:
    r = random.Random(seed)
    for _ in range(20):
        tokens, hidden, count = r.randint(1, 40000), r.randint(1, 9000), r.randint(1, 80)
        block = r.choice([16, 256])
        columns = round_up(r.randint(1, 200000), block)
        chunks = shrinking(tokens, hidden, columns, block, 256, count)
        assert sum(chunks.sizes) == tokens and min(chunks.sizes) > 0 and len(chunks.sizes) <= count
        assert len(chunks.sizes) == 1 or chunks.unit % 256 == 0
        for rows in chunks.slices():
            size = rows.stop - rows.start
            own = own_columns(size, columns, chunks.own, block)
            assert size * own <= chunks.own * columns and own % block == 0
            if size > chunks.own:
                beside = size * (columns - own)
                assert beside <= (tokens - rows.stop) * hidden
        most = Chunks.even(tokens, round_up(-(-tokens // count), 256)).own
        assert chunks.own <= round_up(most, 16), "no more memory than even chunks"


def test_large_problems_need_fewer_chunks() -> None:
    chunks = shrinking(32768, 4096, 131072, 256, 256, 27)
    assert chunks.shrink and chunks.own < 960 and chunks.largest > 1024, chunks


@pytest.fixture(
    params=[(arch, rows) for arch in (Sm90(), Sm100()) for rows in (False, True)], ids=str
)
def on_kernels(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, small_tiles: PortableTiles
) -> bool:
    """Route calls on a CPU to models of an architecture's kernels; return whether they select."""
    pytest.importorskip("cutlass")
    arch, selects = request.param
    serve_calls(monkeypatch, arch, small_tiles, selects=selects)
    return bool(selects)


def gradients(x: Any, plan: Plan, upstream: float = 1.0) -> tuple[Tensor, ...]:
    leaves = [t.detach().clone().requires_grad_() for t in (x.case.h, x.case.w)]
    torch.manual_seed(0)
    options = dict(x.options)
    if "linear_bias" in options:
        options["linear_bias"] = options["linear_bias"].detach().requires_grad_()
        leaves.append(options["linear_bias"])
        plan = dataclasses.replace(plan, grad_bias=True)
    with fixed_plan(dataclasses.replace(plan, tokens=len(x.case.y))):
        loss: Any = cutefce.linear_cross_entropy(*leaves[:2], x.case.y, reduction="sum", **options)
    return torch.autograd.grad(loss * upstream, leaves)


@pytest.mark.parametrize("name", [name for name in OPTIONS if name not in PER_TOKEN])
def test_options_of_shrinking_chunks(name: str, on_kernels: bool) -> None:
    x = options_case([name], *SHAPE, dtype=torch.bfloat16, ignored=0.3)
    if on_kernels:
        x.case.h[x.case.y == -100] = torch.nan
    assert SHRINKING.shrink and len(set(SHRINKING.sizes)) > 2
    want = gradients(x, plan_of(EVEN))
    for bits in (None, 0):
        got = gradients(x, plan_of(SHRINKING, bits))
        assert not got[0][x.case.y == -100].any()
        for a, b in zip(got, want, strict=True):
            assert relative_error(a, b) < 2.0**-9


@pytest.mark.parametrize("ignored", [0.0, 0.5, 0.95, 1.0])
@pytest.mark.parametrize("bits", [(None, 4), (0, 0)], ids=str)
def test_ignored_rows_of_shrinking_chunks(
    bits: tuple[int | None, int], ignored: float, on_kernels: bool
) -> None:
    """Rows move to their places in their own memory."""
    case = random_case(*SHAPE, dtype=torch.bfloat16, ignored=0)
    case.y[torch.rand(TOKENS) < ignored] = -100
    if on_kernels:
        case.h[case.y == -100] = torch.nan
    x: Any = type("Plain", (), {"case": case, "options": {}})
    want = gradients(x, plan_of(EVEN), 0.37)
    got = gradients(x, plan_of(SHRINKING, *bits), 0.37)
    again = gradients(x, plan_of(SHRINKING, *bits), 0.37)
    assert not got[0][case.y == -100].any()
    assert relative_error(got[0], want[0]) <= 2.0**-8 * (ignored < 1)
    assert relative_error(got[1], want[1]) <= 2.0**-7 * (ignored < 1)
    assert all(map(torch.equal, got, again)), "equal bits of a second call"


@pytest.mark.parametrize(
    ("dtype", "random_sums"),
    [(torch.bfloat16, False), (torch.bfloat16, True), (torch.float32, False)],
    ids=str,
)
def test_the_peak_of_shrinking_chunks_is_predicted(
    random_sums: bool, dtype: torch.dtype, device: str
) -> None:
    torch.compiler.reset()
    shape = 512, 1024, 8192
    case = random_case(*shape, dtype=dtype, device=device, ignored=0)
    h, w = case.h.requires_grad_(), case.w.requires_grad_()
    name = dtype_name(dtype)
    problem = Problem(*shape, name, device, arch=arch_of(h, w), random_sums=random_sums)
    config = widest_window(problem)
    chunks = shrinking(512, 1024, 8192, config.reference_block, 16, 4)
    assert chunks.shrink
    sizes = config.window, 0, 8192, chunks.largest
    bits = (0, 0) if random_sums else (4, None)
    plan = Plan("gradients_in_forward", *sizes, True, True, low_bits=bits[0], shrinking=chunks)
    plan = dataclasses.replace(plan, hidden_bits=bits[1])

    def step() -> None:
        loss = loss_of_plan(h, w, case.y, plan, LossOptions())
        torch.autograd.grad(loss, (h, w))

    step()
    measured = peak_bytes(step, device) - problem.gradient_bytes
    assert abs(chunked_bytes(problem, config, 8192, chunks) - measured) <= 0.05 * measured
