"""inductor: fused functions of rows are one kernel for each layout, and as accurate."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from cutefce.cute_kernels.config import PortableTiles
from cutefce.ops.primitives.elementwise import can_fuse, fused, scale_by_log_
from tests.support import divergence
from tests.support.options import LOSSES, OptionsCase, assert_results_as_accurate
from tests.support.outputs import OUTPUTS, values_case
from tests.support.tiers import rest_slow

pytestmark = [pytest.mark.gpu, pytest.mark.compiled_rows]

TOGETHER = "class indices, smoothing and all factors", "soft targets, softcap and all factors"
COMMON = {name: LOSSES[name] for name in ("plain", *TOGETHER)}


def scaled(rows: int, columns: int, pitch: int) -> Tensor:
    """Return the result for exponentials (rows, columns) with rows of `pitch`."""
    torch.manual_seed(0)
    exps = torch.rand(rows, pitch, device="cuda")[:, :columns]
    a, b = torch.randn(2, rows, device="cuda")
    want = exps.double()
    scale_by_log_(want, a.double(), b.double())
    fused(scale_by_log_)(exps, a, b)
    torch.testing.assert_close(exps.double(), want, rtol=1e-5, atol=1e-5)
    return exps


def test_bits_do_not_depend_on_what_was_compiled_before() -> None:
    if not can_fuse(torch.zeros(2, device="cuda")):
        pytest.skip("needs Triton")
    sizes = [(150, 64, 64), (150, 64, 336), (150, 13, 64), (64, 64, 64), (2, 64, 96)]
    first = [scaled(*size) for size in sizes]
    again = [scaled(*size) for size in reversed(sizes)]
    assert all(torch.equal(a, b) for a, b in zip(first, reversed(again), strict=True))


def test_a_layout_is_compiled_once() -> None:
    from torch._dynamo.utils import counters

    if not can_fuse(torch.zeros(2, device="cuda")):
        pytest.skip("needs Triton")
    scaled(100, 72, 72)
    before = counters["stats"]["unique_graphs"]
    for rows in (2, 33, 72, 1000):
        scaled(rows, 72, 72)
    # as many rows as the pitch is a layout of its own
    assert counters["stats"]["unique_graphs"] <= before + 1


@pytest.mark.parametrize("make", rest_slow(COMMON | LOSSES, len(COMMON)))
def test_each_loss(make: Callable[..., OptionsCase], small_tiles: PortableTiles) -> None:
    x = make(150, 48, 333, dtype=torch.float32, device="cuda")
    for workspace in ("max", "min"):
        assert_results_as_accurate(x.ours(workspace=workspace), x)


@pytest.mark.parametrize("outputs", rest_slow([OUTPUTS, (), *((name,) for name in OUTPUTS)]))
@pytest.mark.parametrize("classes", [None, 7])
def test_each_output(
    classes: int | None, outputs: tuple[str, ...], small_tiles: PortableTiles
) -> None:
    names = ["linear_bias", "logit_scale", "temperature (N,)"]
    more: dict[str, Any] = {"dtype": torch.float32, "device": "cuda", "outputs": outputs}
    x = values_case(names, classes, 150, 48, 333, **more)
    x.check(x.ours(workspace="min"))


@pytest.mark.parametrize("form", rest_slow(divergence.FORMS))
def test_each_divergence(form: dict[str, Any]) -> None:
    how: dict[str, Any] = {"dtype": torch.float32, "device": "cuda", "logit_std": 2}
    divergence.assert_as_accurate(divergence.several(150, (48, 40), 333, **how), **form)
