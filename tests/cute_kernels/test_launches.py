"""All strategies on the kernels' host code, with torch models of the kernels."""

import gc
import weakref

import pytest
import torch

from cutefce.cute_kernels.arch.base import Arch
from cutefce.cute_kernels.arch.sm90 import Sm90
from cutefce.cute_kernels.arch.sm100 import Sm100
from cutefce.cute_kernels.config import PortableTiles
from cutefce.cute_kernels.kernel_set import kernel_set
from cutefce.ops.primitives.cute_projection import CuteProjection, Semaphores
from cutefce.ops.primitives.dispatch import kernel_primitives
from tests.support.kernel_models import serve_calls
from tests.support.non_finite import (
    OVERFLOWS,
    ROW,
    WEIGHTS,
    assert_no_healthier,
    assert_same_kind,
    broken_case,
    healthy_case,
    names,
    torch_result,
)
from tests.support.reference import PLANS, assert_as_accurate, logits_case, planned, random_case

KERNELS = {
    f"{arch.name}, {rows}": (arch, rows == "counted rows")
    for arch in (Sm90(), Sm100())
    for rows in ("all rows", "counted rows")
}


@pytest.fixture(params=list(KERNELS.values()), ids=list(KERNELS))
def on_kernels(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, small_tiles: PortableTiles
) -> PortableTiles:
    """Route calls on a CPU to models of an architecture's kernels."""
    pytest.importorskip("cutlass")
    arch, selects = request.param
    serve_calls(monkeypatch, arch, small_tiles, selects=selects)
    return small_tiles


@pytest.mark.parametrize("logit_std", [0.1, 4, 40])
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_every_strategy(
    plan: tuple[str, int, int, int], logit_std: float, on_kernels: PortableTiles
) -> None:
    case = random_case(150, 48, 333, dtype=torch.bfloat16, logit_std=logit_std)
    case.upstream.fill_(1.0)
    names = ("loss", "dx", "dw") if plan[0] == "windows" else ("dx", "dw")
    assert_as_accurate(planned(case, on_kernels.window, *plan), case, names)


@pytest.mark.parametrize("aliased", [0, 64])
@pytest.mark.parametrize("height", [20.0, 60.0, 1e4])
def test_far_rows_are_repaired(height: float, aliased: int, on_kernels: PortableTiles) -> None:
    """In every window that keeps them, with one reference."""
    torch.manual_seed(1)
    logits, y = torch.randn(40, 333), torch.randint(333, (40,))
    for row in range(0, 40, 3):
        logits[row, (int(y[row]) + 1 + 13 * row) % 333] = height
    case = logits_case(logits.bfloat16(), y)
    got = planned(case, on_kernels.window, "windows", aliased, 336 - aliased, 40)
    assert_as_accurate(got, case, saturated=True)


@pytest.mark.parametrize("name", list(names(torch.bfloat16)))
def test_diverged_rows_end_as_those_of_torch(name: str, on_kernels: PortableTiles) -> None:
    case = broken_case(name, torch.bfloat16)
    want = torch_result(case)
    for plan in PLANS.values():
        got = planned(case, on_kernels.window, *plan)
        assert_same_kind(got.loss, want.loss if plan[0] == "windows" else want.loss.sum())
        assert_no_healthier(got.dx, want.dx)
        assert_no_healthier(got.dw, want.dw)
        if name not in WEIGHTS:
            clean = planned(healthy_case(torch.bfloat16), on_kernels.window, *plan)
            others = torch.arange(len(case.y)) != ROW
            assert torch.equal(got.dx[others], clean.dx[others])


@pytest.mark.parametrize("name", ["h NaN", *OVERFLOWS])
def test_an_ignored_row_may_hold_anything(name: str, on_kernels: PortableTiles) -> None:
    case, clean = broken_case(name, torch.bfloat16), healthy_case(torch.bfloat16)
    case.y[ROW] = clean.y[ROW] = -100
    for plan in PLANS.values():
        got, want = (planned(each, on_kernels.window, *plan) for each in (case, clean))
        assert torch.equal(got.loss, want.loss)
        assert torch.equal(got.dx, want.dx)
        assert not got.dx[ROW].any()


@pytest.mark.parametrize("count", [1, 33, Semaphores.BLOCK + 1])
def test_no_launches_share_semaphores(count: int) -> None:
    """Neither launches of a call, which write what they take, nor calls."""
    taken = []
    for _ in range(3):
        semaphores = Semaphores()
        taken += [semaphores.take(count, torch.device("cpu"))[:count] for _ in range(600)]
    for number, zeros in enumerate(taken, 1):
        assert zeros.shape == (count,)
        assert not zeros.any()
        zeros.fill_(number)


@pytest.mark.parametrize("arch", [Sm90(), Sm100()], ids=lambda arch: str(arch.name))
def test_primitives_leave_nothing_to_the_garbage_collector(
    arch: Arch, small_tiles: PortableTiles
) -> None:
    """Their semaphores are GPU memory, which a call must give back when it ends."""
    configs = arch.default_configs(tokens=8192, hidden=4096, num_sms=132)
    primitives = kernel_primitives(small_tiles, kernel_set(arch, "bfloat16", configs), 132)
    projection = primitives.projection
    assert isinstance(projection, CuteProjection)
    alive = weakref.ref(projection.semaphores)
    gc.collect()
    gc.disable()
    try:
        del primitives, projection
        assert alive() is None
    finally:
        gc.enable()
