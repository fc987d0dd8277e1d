"""Loss and gradients against float64: errors are at most those of the unfused loss."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

import cutefce
from cutefce.cute_kernels.config import PortableTiles
from tests.support.backends import Backend, on_backends
from tests.support.layouts import WINDOWS, Layout
from tests.support.reference import (
    Case,
    assert_as_accurate,
    by_layout,
    exact,
    logits_case,
    ours,
    random_case,
)
from tests.support.tiers import pairwise, rest_slow

SHAPES = {
    "a single class: every loss is 0": (5, 8, 1),
    "a vocabulary below one piece": (33, 16, 7),
    "more tokens than classes: lines of dW are dense in targets": (2000, 16, 7),
    "one token": (1, 32, 300),
    "odd hidden size: no row is aligned": (40, 13, 257),
    "more rows than a tile, a ragged last tile": (1100, 24, 1300),
    "32001: one beyond a multiple of every tile": (24, 16, 32001),
    "50257: GPT-2, odd": (24, 16, 50257),
    "151669: Qwen 3, odd": (12, 8, 151669),
}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pairwise(shape=SHAPES, dtype=DTYPES, workspace=["max", "min"])
def test_shapes(
    shape: tuple[int, int, int], dtype: torch.dtype, workspace: str, device: str
) -> None:
    case = random_case(*shape, dtype=dtype, device=device)
    assert_as_accurate(ours(case, workspace=workspace), case)


@pytest.mark.compiled_rows
@pytest.mark.parametrize("logit_std", rest_slow([0.01, 1, 16, 0.3, 3, 8], default=3))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_logit_scales(dtype: torch.dtype, logit_std: float, device: str) -> None:
    case = random_case(300, 64, 3000, dtype=dtype, device=device, logit_std=logit_std)
    assert_as_accurate(ours(case), case)


@pytest.mark.parametrize("workspace", ["max", "min"])
def test_errors_do_not_grow_with_tokens(workspace: str, device: str) -> None:
    """Relative to the gradients themselves, over all rows."""

    def errors(tokens: int) -> list[float]:
        case = random_case(tokens, 64, 1500, dtype=torch.bfloat16, device=device)
        got, want = ours(case, workspace=workspace), exact(case)
        pairs = ((got.dx, want.dx), (got.dw, want.dw))
        return [float((a - b).norm() / b.norm()) for a, b in pairs]

    for few, many in zip(errors(100), errors(6000), strict=True):
        assert many <= 1.05 * few


def _mixture(rows: int = 40, vocab: int = 97) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(rows, vocab), torch.randint(vocab, (rows,))


@pytest.mark.parametrize("offset", [1e4, -1e4, 1e3])
@pytest.mark.parametrize("workspace", ["max", "min"])
def test_a_common_offset_changes_nothing(offset: float, workspace: str, device: str) -> None:
    logits, y = _mixture()
    logits = (logits * 256).round() / 256  # exact with the offset added, so no input rounding
    plain, moved = logits_case(logits, y, device), logits_case(logits + offset, y, device)
    assert_as_accurate(ours(moved, workspace=workspace), moved)
    difference = (ours(plain).loss - ours(moved).loss).abs().max()
    # the identity's product and the subtraction of the reference are exact
    assert float(difference) <= 4 * torch.finfo(torch.float32).eps * float(ours(plain).loss.max())


@pytest.mark.parametrize("gap", [2.0, 10.0, 20.7, 30.0])
def test_confident_rows_keep_relative_precision(gap: float, device: str) -> None:
    """Up to p(target) = 1 - 1e-11, where cancellation ruins the unfused loss and gradient."""
    logits, y = _mixture()
    logits.scatter_(1, y[:, None], gap)
    case = logits_case(logits, y, device)
    others = logits.double().scatter(1, y[:, None], -torch.inf)
    want = (others - logits.double().gather(1, y[:, None])).exp().sum(1).log1p()
    relative = ((ours(case).loss.cpu() - want) / want).abs().max()
    # exp turns the rounding of a difference of logits into a relative error of the same size
    spread = float(logits.max() - logits.min())
    assert float(relative) <= 4 * spread * torch.finfo(torch.float32).eps
    assert_as_accurate(ours(case), case)


FAR_ROWS = {
    "none": (range(0), 33.0),
    "one": (range(7, 8), 1e4),
    "the last": (range(39, 40), 110.0),
    "half, near": (range(0, 40, 2), 33.0),
    "half": (range(0, 40, 2), 1e4),
    "a third, near": (range(0, 40, 3), 20.0),
    "a third": (range(0, 40, 3), 60.0),
    "all": (range(40), 1e4),
}
"""Rows of 40, and the height of a logit above their others."""
FAR_LAYOUTS = {name: layout for name, layout in WINDOWS.items() if name != "some aliased"}


@on_backends(float32=True, layout=FAR_LAYOUTS, far=FAR_ROWS)
def test_rows_far_above_their_target(
    layout: Layout, far: tuple[range, float], backend: Backend
) -> None:
    """Losses up to 10,000 nats beside ordinary ones: where a plain exp(z - r) would overflow."""
    case = _far_case(*far, dtype=backend.dtype, device=backend.device)
    assert_as_accurate(by_layout(case, layout), case, saturated=True)


def _far_case(
    rows: range, height: float, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> Case:
    """Return a case with far logits in some rows; each window has some of their classes."""
    logits, y = _mixture(vocab=333)
    for row in rows:
        logits[row, (int(y[row]) + 1 + 13 * row) % 333] = height
    return logits_case(logits.to(dtype), y, device)


@pairwise(layout=FAR_LAYOUTS, rows=[range(7, 8), range(0, 40, 2)])
def test_rows_as_far_as_can_be(
    layout: Layout, rows: range, small_tiles: PortableTiles, device: str
) -> None:
    case = _far_case(rows, 1e30, device=device)
    assert_as_accurate(by_layout(case, layout), case, saturated=True)


@pytest.mark.parametrize("given", rest_slow([(0.01, 1.0), (0.5, 1.0), (30.0, 1e3)]))
def test_logits_of_a_small_bound(given: tuple[float, float], device: str) -> None:
    """The derivative at the target's logit keeps its digits beside a log-sum-exp of log V."""
    bound, temperature = given
    torch.manual_seed(0)
    h, w = torch.randn(64, 40, device=device), torch.randn(1290, 40, device=device)
    y = torch.randint(len(w), (len(h),), device=device)

    def gradients(dtype: torch.dtype, *, fused: bool = False) -> Sequence[Tensor]:
        x, v = (t.to(dtype).requires_grad_() for t in (h, w))
        if fused:
            loss = cutefce.linear_cross_entropy(x, v, y, softcap=bound, temperature=temperature)
        else:
            u = bound * torch.tanh(x @ v.t() / bound) / temperature
            loss = torch.nn.functional.cross_entropy(u, y)
        return torch.autograd.grad(loss, (x, v))

    want, unfused = gradients(torch.float64), gradients(torch.float32)
    for got, own, best in zip(gradients(torch.float32, fused=True), unfused, want, strict=True):
        assert (got - best).norm() <= 4 * (own - best).norm()
